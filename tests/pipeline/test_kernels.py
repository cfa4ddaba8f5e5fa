"""Our kernels: the references are right, and the CUDA C++ does what they do."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cuda_on_cpu
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heterolab.device.base import Kernel
from heterolab.device.cuda_kernels import check_arguments
from heterolab.errors import InputError
from heterolab.pipeline import kernels

needs_compiler = pytest.mark.skipif(cuda_on_cpu.COMPILER is None, reason="needs g++")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cuda_on_cpu")


def on_cpu(kernel: Kernel, reads: list[Any], writes: list[Any], folder: Path) -> None:
    assert kernel.cuda is not None
    cuda_on_cpu.launch(kernel.cuda, reads, writes, folder)


# -- one thread an element --------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize("n", [1, 255, 256, 257, 1000])
def test_vector_add(n: int, built: Path) -> None:
    rng = np.random.default_rng(n)
    a, b = rng.standard_normal((2, n), np.float32)
    by_numpy, by_cuda = np.zeros(n, np.float32), np.full(n + 1, 7, np.float32)
    kernels.vector_add().run(np, [a, b], [by_numpy])
    on_cpu(kernels.vector_add(), [a, b], [by_cuda[:n]], built)
    np.testing.assert_array_equal(by_numpy, a + b)
    np.testing.assert_array_equal(by_cuda[:n], by_numpy)
    assert by_cuda[n] == 7, "the last block wrote past the end"


@given(st.integers(0, 300), st.integers(0, 2**32 - 1))
def test_rounds_jumps_to_where_the_loop_arrives(k: int, start: int) -> None:
    x, y = np.array([start], np.uint32), np.zeros(1, np.uint32)
    kernels.rounds(k).run(np, [x], [y])
    value = start
    for _ in range(k):
        value = (kernels.ROUND_A * value + kernels.ROUND_C) % 2**32
    assert y[0] == value


@needs_compiler
@pytest.mark.parametrize("k", [0, 1, 7, 1000])
def test_rounds_on_cuda(k: int, built: Path) -> None:
    x = np.random.default_rng(k).integers(0, 2**32, 300, dtype=np.uint32)
    by_numpy, by_cuda = np.zeros_like(x), np.zeros_like(x)
    kernels.rounds(k).run(np, [x], [by_numpy])
    on_cpu(kernels.rounds(k), [x], [by_cuda], built)
    np.testing.assert_array_equal(by_numpy, by_cuda)


@pytest.mark.parametrize("k", [-1, 1.5, True, 10**7, "3"])
def test_rounds_refuses(k: Any) -> None:
    with pytest.raises(InputError, match="rounds"):
        kernels.rounds(k)


def test_rounds_work_grows_with_k() -> None:
    buffer: Any = SimpleNamespace(shape=(1000,))
    one, many = kernels.rounds(1).work([buffer], [buffer]), kernels.rounds(50).work([buffer], [buffer])
    assert (one.flops, many.flops) == (2000, 100_000)
    assert one.bytes == many.bytes == 8000
    assert many.dtype == "int32"
    assert many.blocks == 4


def test_vector_add_work() -> None:
    buffer: Any = SimpleNamespace(shape=(10, 100))
    work = kernels.vector_add().work([buffer, buffer], [buffer])
    assert (work.bytes, work.size, work.flops) == (12_000, 1000, 1000)


# -- mean-pool --------------------------------------------------------------------------------


def test_pool_is_the_normalised_mean_of_the_real_tokens() -> None:
    rng = np.random.default_rng(0)
    hidden = rng.standard_normal((3, 5, 8), np.float32)
    lengths = np.array([5, 2, 0], np.int32)
    vectors = np.zeros((3, 8), np.float32)
    kernels.pool().run(np, [hidden, lengths], [vectors])
    for row, length in ((0, 5), (1, 2)):
        mean = hidden[row, :length].astype(np.float64).mean(axis=0)
        np.testing.assert_allclose(vectors[row], mean / np.linalg.norm(mean), atol=1e-6)
    assert not vectors[2].any()


def test_pool_ignores_what_lies_in_the_padding() -> None:
    hidden = np.random.default_rng(0).standard_normal((1, 6, 8), np.float32)
    short, padded = np.zeros((2, 1, 8), np.float32)
    lengths = np.array([4], np.int32)
    kernels.pool().run(np, [hidden[:, :4], lengths], [short])
    hidden[:, 4:] = np.inf
    kernels.pool().run(np, [hidden, lengths], [padded])
    np.testing.assert_array_equal(short, padded)


@needs_compiler
@settings(max_examples=12, deadline=None)
@given(st.integers(1, 3), st.integers(1, 12), st.integers(1, 300), st.data())
def test_pool_on_cuda(built: Path, batch: int, tokens: int, dim: int, data: st.DataObject) -> None:
    lengths = np.array(data.draw(st.lists(st.integers(0, tokens), min_size=batch, max_size=batch)), np.int32)
    hidden = np.random.default_rng(dim).standard_normal((batch, tokens, dim), np.float32)
    by_numpy, by_cuda = np.zeros((2, batch, dim), np.float32)
    kernels.pool().run(np, [hidden, lengths], [by_numpy])
    on_cpu(kernels.pool(), [hidden, lengths], [by_cuda], built)
    np.testing.assert_allclose(by_cuda, by_numpy, atol=1e-6)


@needs_compiler
def test_pool_on_cuda_at_the_longest_text(built: Path) -> None:
    hidden = np.random.default_rng(1).standard_normal((2, 512, 384), np.float32)
    lengths = np.array([512, 600], np.int32)  # a wrong length must not read past the text
    by_cuda = np.zeros((2, 384), np.float32)
    on_cpu(kernels.pool(), [hidden, lengths], [by_cuda], built)
    mean = hidden.astype(np.float64).mean(axis=1)
    np.testing.assert_allclose(by_cuda, mean / np.linalg.norm(mean, axis=1, keepdims=True), atol=1e-6)


# -- top-k ------------------------------------------------------------------------------------


def unit(rows: np.ndarray) -> np.ndarray:
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


@needs_compiler
@pytest.mark.parametrize(("batch", "n", "k"), [(1, 747, 3), (2, 2500, 8), (2, 5, 5), (2, 1024, 1), (1, 1, 1)])
def test_top_k_on_cuda(batch: int, n: int, k: int, built: Path) -> None:
    rng = np.random.default_rng(n)
    rows, vectors = unit(rng.standard_normal((n, 384))), unit(rng.standard_normal((batch, 384)))
    kernel = kernels.top_k(np.ascontiguousarray(rows.T), k)
    by_numpy, by_cuda = np.zeros((2, batch, 2, k), np.float32)
    kernel.run(np, [vectors], [by_numpy])
    on_cpu(kernel, [vectors], [by_cuda], built)
    np.testing.assert_array_equal(by_cuda[:, 0], by_numpy[:, 0])
    np.testing.assert_allclose(by_cuda[:, 1], by_numpy[:, 1], atol=1e-6)
    scores = vectors.astype(np.float64) @ rows.T
    np.testing.assert_array_equal(by_numpy[:, 0], np.argsort(-scores, axis=1)[:, :k])


@needs_compiler
def test_top_k_of_equal_scores_takes_the_lowest_row(built: Path) -> None:
    rows = np.zeros((1500, 16), np.float32)
    rows[:, 0] = -1
    rows[[7, 140, 1031, 290], 0] = 1  # 7 and 1031 belong to the same thread of the block
    vector = np.zeros((1, 16), np.float32)
    vector[0, 0] = 1
    kernel = kernels.top_k(np.ascontiguousarray(rows.T), 6)
    by_numpy, by_cuda = np.zeros((2, 1, 2, 6), np.float32)
    kernel.run(np, [vector], [by_numpy])
    on_cpu(kernel, [vector], [by_cuda], built)
    assert by_numpy[0].tolist() == [[7, 140, 290, 1031, 0, 1], [1, 1, 1, 1, -1, -1]]
    np.testing.assert_array_equal(by_cuda, by_numpy)


@pytest.mark.parametrize("k", [0, 9, 5, True, 2.0])
def test_top_k_refuses(k: Any) -> None:
    with pytest.raises(InputError, match=r"1 to 4 \(4 rows"):
        kernels.top_k(np.zeros((8, 4), np.float32), k)


# -- logits -----------------------------------------------------------------------------------


def test_logits_and_what_is_recalled_of_them() -> None:
    rng = np.random.default_rng(0)
    rows, vectors = unit(rng.standard_normal((10, 8))), unit(rng.standard_normal((3, 8)))
    table = np.zeros((8, 64), np.float32)
    table[:, :10] = rows.T
    kernel = kernels.logits(table, rows)
    computed, recalled = np.full((2, 3, 64), 9, np.float32)
    kernel.run(np, [vectors], [computed])
    assert kernel.recall is not None
    kernel.recall([vectors], [recalled])
    np.testing.assert_allclose(recalled, computed, atol=1e-6)
    assert not computed[:, 10:].any()


def test_arguments_have_the_types_that_the_sources_say() -> None:
    floats, ints = np.zeros((2, 4, 8), np.float32), np.zeros(2, np.int32)
    words, vectors = np.zeros(4, np.uint32), np.zeros((2, 8), np.float32)
    launches = [
        (kernels.vector_add(), [floats, floats], [floats]),
        (kernels.rounds(3), [words], [words]),
        (kernels.empty(), [], []),
        (kernels.pool(), [floats, ints], [vectors]),
        (kernels.top_k(np.zeros((8, 5), np.float32), 3), [vectors], [np.zeros((2, 2, 3), np.float32)]),
    ]
    for kernel, reads, writes in launches:
        assert kernel.cuda is not None
        check_arguments(kernel.name, kernel.cuda, kernel.cuda.arguments(reads, writes))


# -- all of them ------------------------------------------------------------------------------


def test_empty_does_nothing() -> None:
    kernel = kernels.empty()
    kernel.run(np, [], [])
    assert kernel.work([], []).bytes == 0
    assert kernel.cuda is not None
    assert kernel.cuda.arguments([], []) == ()


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("entry", sorted(kernels.SOURCES))
def test_cuda_compiles(entry: str, tmp_path: Path) -> None:
    path = tmp_path / f"{entry}.cu"
    path.write_text(kernels.SOURCES[entry])
    command = [
        "nvcc",
        "-arch=sm_75",
        "-cubin",
        "-Werror",
        "all-warnings",
        "-o",
        str(tmp_path / "out"),
        str(path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"void {entry}(" in kernels.SOURCES[entry]
