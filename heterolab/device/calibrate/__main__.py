"""``python -m heterolab.device.calibrate``: the same as ``heterolab calibrate``."""

from __future__ import annotations

import sys

from heterolab.errors import HeteroLabError


def main() -> int:
    """Measure, write, and say where the profile is."""
    from heterolab.cli import app

    try:
        app(["calibrate", *sys.argv[1:]], standalone_mode=False)
    except HeteroLabError as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
