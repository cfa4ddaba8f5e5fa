"""``python -m heterolab.device.calibrate --device cpu|cuda --out FILE``."""

from __future__ import annotations

import argparse
import time

from heterolab.device.calibrate import calibrate, write
from heterolab.errors import HeteroLabError


def main() -> int:
    """Measure, write, and say where the profile is."""
    parser = argparse.ArgumentParser(prog="heterolab calibrate", description="Measure this machine.")
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--base", help="for a GPU: the profile whose physics is kept")
    parser.add_argument("--out", required=True, help="JSON file to write")
    arguments = parser.parse_args()
    start = time.monotonic()

    def tell(line: str) -> None:
        print(f"{time.monotonic() - start:5.1f} s  {line}", flush=True)

    try:
        path = write(calibrate(arguments.device, arguments.base, tell), arguments.out)
    except HeteroLabError as error:
        print(error)
        return 1
    tell(f"written: {path}. Simulate this machine with device='sim:{path}'.")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
