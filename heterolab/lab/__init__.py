"""What the labs need beside the course's subject: predictions, checks, and the report."""

from __future__ import annotations

from heterolab.lab.check import Verdict, check
from heterolab.lab.predict import predict, reveal

__all__ = ["Verdict", "check", "predict", "reveal"]
