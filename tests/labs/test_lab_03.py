"""Lab 03: what must happen, and where streams must not help; ratios of one and the same run."""

from __future__ import annotations

import ast
import inspect

import pytest
from lab_files import STUDENT, notebook

import heterolab as hl
from heterolab.device.base import Device
from heterolab.lab import broken, streams
from heterolab.lab.streams import Job
from heterolab.pipeline.kernels import empty, rounds
from heterolab.trace.trace import Trace

PROFILES = ("sim:h200", "sim:a100", "sim:t4")


@pytest.fixture(scope="module", params=PROFILES)
def dev(request: pytest.FixtureRequest) -> Device:
    return hl.open_device(request.param)


@pytest.fixture(scope="module")
def k(dev: Device) -> int:
    return streams.balanced_rounds(dev)


@pytest.fixture(scope="module")
def balanced(dev: Device, k: int) -> Job:
    return streams.job(dev, rounds(k))


@pytest.fixture(scope="module")
def one(dev: Device, balanced: Job) -> Trace:
    return streams.timed(dev, streams.serial, balanced)


def cut(dev: Device, job: Job, chunks: int, count: int) -> Trace:
    job.clear()
    trace = streams.timed(dev, streams.in_chunks, job, chunks, streams.queues(dev, count))
    assert job.right()
    return trace


# -- the article's program ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def article(dev: Device) -> dict[tuple[str, int], Trace]:
    return {
        (memory, count): streams.timed(
            dev, streams.two_tasks, streams.pairs(dev, memory), streams.queues(dev, count)
        )
        for memory in ("pageable", "pinned")
        for count in (1, 2)
    }


def test_pinning_is_what_helps_the_articles_program(article: dict[tuple[str, int], Trace]) -> None:
    assert article["pageable", 1].wall_ns > 1.5 * article["pinned", 1].wall_ns


@pytest.mark.parametrize("memory", ["pageable", "pinned"])
def test_its_second_stream_does_not(article: dict[tuple[str, int], Trace], memory: str) -> None:
    gain = article[memory, 1].wall_ns / article[memory, 2].wall_ns
    assert 0.98 < gain < 1.15


def test_because_the_copy_dwarfs_the_kernel(article: dict[tuple[str, int], Trace]) -> None:
    lanes = streams.lane_ns(article["pinned", 1])
    assert lanes["h2d"] > 5 * lanes["gpu"]


def test_and_one_engine_copies_one_after_the_other(article: dict[tuple[str, int], Trace]) -> None:
    copies = article["pinned", 2].kind("h2d")
    assert copies["end_ns"][0] <= copies["start_ns"][1]
    assert set(copies["stream"].tolist()) == {0, 1}


# -- the balanced job --------------------------------------------------------------------------


def test_the_balanced_job_is_balanced(one: Trace) -> None:
    lanes = streams.lane_ns(one).values()
    assert max(lanes) < 1.15 * min(lanes)


@pytest.mark.parametrize("chunks", [4, 8, 16, 32])
def test_chunks_on_four_streams_pay(dev: Device, balanced: Job, one: Trace, chunks: int) -> None:
    gain = one.wall_ns / cut(dev, balanced, chunks, 4).wall_ns
    assert 1.7 <= gain <= streams.speed_up_bound(chunks) * 1.05


def test_too_many_chunks_give_it_all_back(dev: Device, balanced: Job, one: Trace) -> None:
    gains = {n: one.wall_ns / cut(dev, balanced, n, 4).wall_ns for n in (1, 2, 8, 64, 256)}
    assert gains[1] < 1.02 < gains[2] < gains[8]
    assert gains[256] < gains[64] < 1.1 * gains[8]
    # The slower the link, the longer it keeps the host's calls hidden.
    assert gains[256] < (1.0 if "H200" in dev.name else 0.9 * gains[8])


def test_two_streams_stop_below_four(dev: Device, balanced: Job, one: Trace) -> None:
    best = {
        count: max(one.wall_ns / cut(dev, balanced, n, count).wall_ns for n in (4, 8, 16, 32))
        for count in (2, 4)
    }
    assert best[2] < 1.85
    assert best[4] > 1.2 * best[2]


# -- where it does not help --------------------------------------------------------------------


def test_not_when_one_lane_dominates(dev: Device, k: int) -> None:
    heavy = streams.job(dev, rounds(10 * k))
    gain = streams.timed(dev, streams.serial, heavy).wall_ns / cut(dev, heavy, 8, 4).wall_ns
    assert 1.0 < gain < 1.3


def test_not_from_pageable_memory(dev: Device, balanced: Job, one: Trace) -> None:
    ordinary = streams.job(dev, balanced.kernel, memory="pageable")
    assert cut(dev, ordinary, 8, 4).wall_ns > one.wall_ns


def test_an_empty_kernel_shows_copies_beside_copies_only(dev: Device) -> None:
    nothing = streams.job(dev, empty())
    alone, trace = streams.timed(dev, streams.serial, nothing), cut(dev, nothing, 8, 4)
    gain = alone.wall_ns / trace.wall_ns
    assert 1.3 < gain < 1.95
    lanes = streams.lane_ns(trace)
    assert hl.metrics.overlap_ns(trace, "h2d", "d2h") > 0.5 * min(lanes["h2d"], lanes["d2h"])
    assert hl.metrics.overlap_ns(trace, "link", "gpu") < 0.02 * trace.wall_ns


# -- the same on this machine's CPU, where ratios prove nothing ----------------------------------


def test_the_job_is_right_on_the_cpu_device(cpu_device: Device) -> None:
    job = streams.job(cpu_device, rounds(streams.balanced_rounds(cpu_device)), mib=1)
    for chunks, count in ((1, 1), (7, 3), (64, 4)):
        trace = cut(cpu_device, job, chunks, count)
        assert streams.moved(trace, "h2d") == streams.moved(trace, "d2h") == job.nbytes


@pytest.mark.gpu
def test_on_a_gpu_the_second_stream_helps_little_and_chunks_help() -> None:
    dev = hl.open_device("cuda")
    tasks = streams.pairs(dev, "pinned")
    walls = [streams.timed(dev, streams.two_tasks, tasks, streams.queues(dev, n)).wall_ns for n in (1, 2)]
    assert walls[0] / walls[1] < 1.15
    job = streams.job(dev, rounds(streams.balanced_rounds(dev)))
    one = streams.timed(dev, streams.serial, job)
    assert one.wall_ns / cut(dev, job, 16, 4).wall_ns >= 1.7


# -- exercise 2 in the notebook is what the check knows -------------------------------------------


@pytest.mark.parametrize("name", list(broken.PROGRAMS))
def test_the_notebook_shows_the_programs_that_the_check_knows(name: str) -> None:
    shown = {cell["id"]: "".join(cell["source"]) for cell in notebook(STUDENT[0])["cells"]}
    tree = ast.parse(shown[f"lab03-program-{name}"])
    mine = next(node for node in tree.body if isinstance(node, ast.FunctionDef))
    known = ast.parse(inspect.getsource(broken.PROGRAMS[name].program)).body[0]
    assert isinstance(known, ast.FunctionDef)
    assert list(map(ast.unparse, mine.body)) == list(map(ast.unparse, known.body))
