"""The models that the course serves."""

from __future__ import annotations

from heterolab.models.encoder import Encoder, EncoderKernels, encoder
from heterolab.models.knowledge import KnowledgeBase
from heterolab.models.weights import UntrainedWarning

__all__ = ["Encoder", "EncoderKernels", "KnowledgeBase", "UntrainedWarning", "encoder"]
