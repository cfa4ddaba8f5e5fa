"""``python -m heterolab.models fetch | half FOLDER | rebuild``: the models' data.

``fetch`` gets MiniLM's weights now rather than at first use. ``half FOLDER`` writes a copy in
half precision (45 MB) for a machine that has no network: ``HETEROLAB_WEIGHTS=FOLDER``.
``rebuild`` makes the knowledge base's files again.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from heterolab.errors import HeteroLabError
from heterolab.models import knowledge, weights


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m heterolab.models",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("job", choices=("fetch", "half", "rebuild"))
    parser.add_argument("folder", type=Path, nargs="?", help="where to write (half: needed)")
    chosen = parser.parse_args(arguments)
    if chosen.job == "half" and not chosen.folder:
        parser.error("half needs a FOLDER to write to.")
    try:
        if chosen.job == "rebuild":
            print(knowledge.rebuild(chosen.folder or knowledge.DATA))
        else:
            _fetch(chosen.folder if chosen.job == "half" else None)
    except HeteroLabError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _fetch(half: Path | None) -> None:
    loaded = weights.load()
    if loaded.tokenizer is None:
        raise weights.FetchError(f"There are no trained weights here: {loaded.untrained_because}")
    print(f"MiniLM's weights lie in {loaded.tokenizer.parent}")
    if half:
        from safetensors.numpy import save_file

        half.mkdir(parents=True, exist_ok=True)
        arrays = {name: array.astype(np.float16) for name, array in loaded.arrays.items()}
        save_file(arrays, half / weights.MODEL_FILE)
        shutil.copyfile(loaded.tokenizer, half / weights.TOKENIZER_FILE)
        print(f"Half-precision copy in {half}; use it with HETEROLAB_WEIGHTS={half}")


if __name__ == "__main__":
    sys.exit(main())
