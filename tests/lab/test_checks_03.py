"""Lab 03's checks: right answers pass, and each typical wrong one gets its own message."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

import heterolab as hl
from heterolab.device.base import Device, Kernel, Stream
from heterolab.lab import broken, streams
from heterolab.lab.check import check
from heterolab.lab.streams import Job, Sum
from heterolab.pipeline.kernels import empty, vector_add

PROFILES = ("sim:h200", "sim:a100", "sim:t4")
Queues = Sequence[Stream]


@pytest.fixture(autouse=True)
def smaller_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of the lab's size: the same shape, less work for the tests."""
    monkeypatch.setattr(streams, "SIZE_MIB", 32)


# -- exercise 1 --------------------------------------------------------------------------------


def right(dev: Device, job: Job, chunks: int, queues: Queues) -> None:
    for i, part in enumerate(job.parts(chunks)):
        queue, d = queues[i % len(queues)], job.d[part]
        queue.copy(d, job.h_in[part])
        queue.launch(job.kernel, reads=[d], writes=[d])
        queue.copy(job.h_out[part], d)
    dev.synchronize()


def in_three_loops(dev: Device, job: Job, chunks: int, queues: Queues) -> None:
    """A trap: on each stream, the first kernel now stands behind the second chunk's copy."""
    parts = [(queues[i % len(queues)], part) for i, part in enumerate(job.parts(chunks))]
    for queue, part in parts:
        queue.copy(job.d[part], job.h_in[part])
    for queue, part in parts:
        queue.launch(job.kernel, reads=[job.d[part]], writes=[job.d[part]])
    for queue, part in parts:
        queue.copy(job.h_out[part], job.d[part])
    dev.synchronize()


def in_rounds(dev: Device, job: Job, chunks: int, queues: Queues) -> None:
    """Also right: a round of chunks at a time, one a stream; copies in, kernels, copies out."""
    parts = job.parts(chunks)
    for first in range(0, chunks, len(queues)):
        dealt = list(zip(queues, parts[first : first + len(queues)], strict=False))
        for queue, part in dealt:
            queue.copy(job.d[part], job.h_in[part])
        for queue, part in dealt:
            queue.launch(job.kernel, reads=[job.d[part]], writes=[job.d[part]])
        for queue, part in dealt:
            queue.copy(job.h_out[part], job.d[part])
    dev.synchronize()


def nothing(dev: Device, job: Job, chunks: int, queues: Queues) -> None: ...


def constant(dev: Device, job: Job, chunks: int, queues: Queues) -> float:
    return 2.4


def on_the_host(dev: Device, job: Job, chunks: int, queues: Queues) -> None:
    job.h_out.write()[...] = job.expected(slice(None))


def early_return(dev: Device, job: Job, chunks: int, queues: Queues) -> None:
    for i, part in enumerate(job.parts(chunks)):
        queue, d = queues[i % len(queues)], job.d[part]
        queue.copy(d, job.h_in[part])
        queue.launch(job.kernel, reads=[d], writes=[d])
        queue.copy(job.h_out[part], d)
        return


def everything_each_time(dev: Device, job: Job, chunks: int, queues: Queues) -> None:
    for _ in range(chunks):
        queues[0].copy(job.d, job.h_in)
        queues[0].launch(job.kernel, reads=[job.d], writes=[job.d])
        queues[0].copy(job.h_out, job.d)


def not_back(dev: Device, job: Job, chunks: int, queues: Queues) -> None:
    for i, part in enumerate(job.parts(chunks)):
        queue, d = queues[i % len(queues)], job.d[part]
        queue.copy(d, job.h_in[part])
        queue.launch(job.kernel, reads=[d], writes=[d])


def no_kernel(dev: Device, job: Job, chunks: int, queues: Queues) -> None:
    for i, part in enumerate(job.parts(chunks)):
        queue, d = queues[i % len(queues)], job.d[part]
        queue.copy(d, job.h_in[part])
        queue.copy(job.h_out[part], d)


def empty_kernel(dev: Device, job: Job, chunks: int, queues: Queues) -> None:
    for i, part in enumerate(job.parts(chunks)):
        queue, d = queues[i % len(queues)], job.d[part]
        queue.copy(d, job.h_in[part])
        queue.launch(empty(), reads=[d], writes=[d])
        queue.copy(job.h_out[part], d)


def kernel_twice(dev: Device, job: Job, chunks: int, queues: Queues) -> None:
    for i, part in enumerate(job.parts(chunks)):
        queue, d = queues[i % len(queues)], job.d[part]
        queue.copy(d, job.h_in[part])
        for _ in range(2):
            queue.launch(job.kernel, reads=[d], writes=[d])
        queue.copy(job.h_out[part], d)


def kernel_after_the_copy_back(dev: Device, job: Job, chunks: int, queues: Queues) -> None:
    for i, part in enumerate(job.parts(chunks)):
        queue, d = queues[i % len(queues)], job.d[part]
        queue.copy(d, job.h_in[part])
        queue.copy(job.h_out[part], d)
        queue.launch(job.kernel, reads=[d], writes=[d])


def one_piece(dev: Device, job: Job, chunks: int, queues: Queues) -> None:
    right(dev, job, 1, queues)


def one_stream(dev: Device, job: Job, chunks: int, queues: Queues) -> None:
    right(dev, job, chunks, queues[:1])


def waits_each_time(dev: Device, job: Job, chunks: int, queues: Queues) -> None:
    for i, part in enumerate(job.parts(chunks)):
        queue, d = queues[i % len(queues)], job.d[part]
        queue.copy(d, job.h_in[part])
        queue.launch(job.kernel, reads=[d], writes=[d])
        queue.copy(job.h_out[part], d)
        queue.synchronize()


def waits_not_at_all(dev: Device, job: Job, chunks: int, queues: Queues) -> None:
    for i, part in enumerate(job.parts(chunks)):
        queue, d = queues[i % len(queues)], job.d[part]
        queue.copy(d, job.h_in[part])
        queue.launch(job.kernel, reads=[d], writes=[d])
        queue.copy(job.h_out[part], d)


def waits_twice(dev: Device, job: Job, chunks: int, queues: Queues) -> None:
    right(dev, job, chunks, queues)
    dev.synchronize()


def fail(xp: Any, reads: Any, writes: Any) -> None:
    raise ValueError("no such shape")


FAILING = Kernel("failing", fail, empty().work)


def fails_unnoticed(dev: Device, job: Job, chunks: int, queues: Queues) -> None:
    """Its kernel raises, and it never waits: the error comes out after it has returned."""
    queues[0].launch(FAILING, reads=[job.d], writes=[job.d])


def one_after_the_other(dev: Device, job: Job, chunks: int, queues: Queues) -> None:
    """Every chunk waits for the one before, through an event."""
    before = None
    for i, part in enumerate(job.parts(chunks)):
        queue, d = queues[i % len(queues)], job.d[part]
        if before is not None:
            queue.wait(before)
        queue.copy(d, job.h_in[part])
        queue.launch(job.kernel, reads=[d], writes=[d])
        queue.copy(job.h_out[part], d)
        before = queue.record()
    dev.synchronize()


def unordered(dev: Device, job: Job, chunks: int, queues: Queues) -> None:
    """A race: the kernel runs on another stream than its copy."""
    for i, part in enumerate(job.parts(chunks)):
        queue, other, d = queues[i % len(queues)], queues[(i + 1) % len(queues)], job.d[part]
        queue.copy(d, job.h_in[part])
        other.launch(job.kernel, reads=[d], writes=[d])
        queue.copy(job.h_out[part], d)


def no_such_name(dev: Device, job: Job, chunks: int, queues: Queues) -> None:
    job.h_inn  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize("device", PROFILES)
@pytest.mark.parametrize("answer", [right, in_rounds])
def test_right_answers_pass(device: str, answer: Callable[..., Any]) -> None:
    verdict = check("03-1", answer, on=hl.open_device(device))
    assert verdict.passed, verdict


WRONG = {
    nothing: "got no copy and no kernel",
    constant: "got no copy and no kernel",
    on_the_host: "got no copy and no kernel",
    early_return: "MiB to the device (chunks=8",
    everything_each_time: "a part, or everything",
    not_back: "of 32 MiB back",
    no_kernel: "covered 0%",
    empty_kernel: "You launched empty",
    kernel_twice: "covered 200%",
    kernel_after_the_copy_back: "first in element",
    one_piece: "you launched kernels: 1",
    one_stream: "your work ran on 1",
    waits_each_time: "The host waited for the device 8 times",
    waits_twice: "The host waited for the device 2 times",
    waits_not_at_all: "returns before the result is there",
    fails_unnoticed: "In the kernel 'failing' on stream",
    one_after_the_other: "which lane waits",
    in_three_loops: "which lane waits",
    unordered: "The missing event",
    no_such_name: "job.h_inn",
}


@pytest.mark.parametrize("device", PROFILES)
@pytest.mark.parametrize("answer", WRONG, ids=lambda f: f.__name__)
def test_wrong_answers_are_told_what_is_wrong(device: str, answer: Callable[..., Any]) -> None:
    verdict = check("03-1", answer, on=hl.open_device(device))
    assert verdict.state == "fail", verdict
    assert WRONG[answer] in " ".join(repr(verdict).split()), verdict


@pytest.mark.parametrize("answer", [None, 7, "overlap"])
def test_no_function_is_said(answer: object) -> None:
    assert "needs your function" in check("03-1", answer, on=hl.open_device("sim:h200")).problem


def test_on_a_cpu_the_work_is_checked_and_the_time_is_not() -> None:
    with_cpu = hl.open_device("cpu")
    try:
        assert check("03-1", right, on=with_cpu).state in ("pass", "inconclusive")
        assert check("03-1", not_back, on=with_cpu).state == "fail"
    finally:
        with_cpu.close()


def closes(dev: Device, *rest: Any) -> None:
    dev.close()


def fails_in_a_sum(dev: Device, tasks: list[Sum], queues: Queues) -> None:
    queues[0].launch(FAILING, reads=[tasks[0].d_a], writes=[tasks[0].d_c])


@pytest.mark.parametrize(
    ("name", "answer", "said"),
    [
        ("03-1", fails_unnoticed, "ValueError: no such shape. In the kernel 'failing' on stream"),
        ("03-3", fails_in_a_sum, "ValueError: no such shape. In the kernel 'failing' on stream"),
        ("03-1", closes, "closed"),
        ("03-3", closes, "closed"),
    ],
)
def test_errors_that_come_out_late_are_verdicts_too(name: str, answer: Callable[..., Any], said: str) -> None:
    with_cpu = hl.open_device("cpu")
    try:
        verdict = check(name, answer, on=with_cpu)
    finally:
        with_cpu.close()
    assert verdict.state == "fail"
    assert said in verdict.problem
    assert ". Look at line" in verdict.problem or ". No line of your cell" in verdict.problem


def test_a_closed_device_is_a_verdict() -> None:
    with_cpu = hl.open_device("cpu")
    with_cpu.close()
    assert "closed" in check("03-2", {}, on=with_cpu).problem


# -- exercise 2 --------------------------------------------------------------------------------


def fixed_a(dev: Device, kernel: Any, queues: Queues) -> Job:
    job = streams.job(dev, kernel, memory="pinned")
    for i, part in enumerate(job.parts(8)):
        queue = queues[i % 4]
        queue.copy(job.d[part], job.h_in[part])
        queue.launch(kernel, [job.d[part]], [job.d[part]])
        queue.copy(job.h_out[part], job.d[part])
    return job


def worse_a(dev: Device, kernel: Any, queues: Queues) -> Job:
    job = streams.job(dev, kernel, memory="mapped")
    for i, part in enumerate(job.parts(4)):
        queue = queues[i % 4]
        queue.copy(job.d[part], job.h_in[part])
        queue.launch(kernel, [job.d[part]], [job.d[part]])
        queue.copy(job.h_out[part], job.d[part])
    return job


def no_job_a(dev: Device, kernel: Any, queues: Queues) -> None:
    job = streams.job(dev, kernel, memory="pageable")
    for i, part in enumerate(job.parts(8)):
        queue = queues[i % 4]
        queue.copy(job.d[part], job.h_in[part])
        queue.launch(kernel, [job.d[part]], [job.d[part]])
        queue.copy(job.h_out[part], job.d[part])


def wrong_edit_a(dev: Device, kernel: Any, queues: Queues) -> Job:
    job = streams.job(dev, kernel, memory="pageable")
    for i, part in enumerate(job.parts(16)):
        queue = queues[i % 4]
        queue.copy(job.d[part], job.h_in[part])
        queue.launch(kernel, [job.d[part]], [job.d[part]])
        queue.copy(job.h_out[part], job.d[part])
    return job


fixed_b = fixed_c = fixed_a

GOOD: dict[str, Any] = {
    "a": (fixed_a, "pageable"),
    "b": (fixed_b, "default stream"),
    "c": (fixed_c, "sync"),
    "d": (broken.program_d, "cannot"),
}


@pytest.mark.parametrize("device", PROFILES)
def test_the_repaired_programs_pass(device: str) -> None:
    verdict = check("03-2", GOOD, on=hl.open_device(device))
    assert verdict.passed, verdict


@pytest.mark.parametrize("name", "abc")
@pytest.mark.parametrize("device", PROFILES)
def test_the_programs_are_slow_before_they_are_repaired(device: str, name: str) -> None:
    """Not one of them comes near the bound, whatever the check says of edits."""
    dev = hl.open_device(device)
    k = streams.balanced_rounds(dev)
    one = broken.PROGRAMS[name]
    kernel = streams.rounds(k)
    alone = streams.timed(dev, streams.serial, streams.job(dev, kernel))
    queues = streams.queues(dev, 4, one.non_blocking)
    trace = streams.record(dev, one.program, kernel, queues)
    assert trace.wall_ns > 1.3 * streams.bound_ns(streams.lane_ns(alone), broken.CHUNKS)


@pytest.mark.parametrize("device", PROFILES)
def test_program_d_is_as_good_as_can_be(device: str) -> None:
    dev = hl.open_device(device)
    kernel = streams.rounds(10 * streams.balanced_rounds(dev))
    alone = streams.timed(dev, streams.serial, streams.job(dev, kernel))
    trace = streams.record(dev, broken.program_d, kernel, streams.queues(dev, 4))
    assert trace.wall_ns < 1.1 * streams.bound_ns(streams.lane_ns(alone), broken.CHUNKS)
    assert alone.wall_ns < 1.25 * trace.wall_ns


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"a": (fixed_a, "sync")}, "not what holds it up"),
        ({"a": (fixed_a, "cannot")}, "can be repaired"),
        ({"d": (broken.program_d, "sync")}, "Program d: sync is not what"),
        ({"a": (fixed_a, "…")}, "not one of the causes"),
        ({"a": (broken.program_a, "pageable")}, "as it was"),
        ({"a": (worse_a, "pageable")}, "differs from the original in 2"),
        ({"a": (wrong_edit_a, "pageable")}, "cause is still there"),
        ({"a": (no_job_a, "pageable")}, "does not return its job"),
        ({"a": (None, "pageable")}, "needs your function"),
        ({"a": "pageable"}, "is a pair"),
        ({"e": (fixed_a, "sync")}, "one entry for each program"),
    ],
)
@pytest.mark.parametrize("device", PROFILES)
def test_wrong_repairs_are_told_what_is_wrong(device: str, change: dict[str, Any], said: str) -> None:
    verdict = check("03-2", {**GOOD, **change}, on=hl.open_device(device))
    assert verdict.state == "fail"
    assert said in " ".join(repr(verdict).split()), verdict


@pytest.mark.parametrize("answers", [(), (1, 2)])
def test_an_answer_too_few_or_too_many_is_said(answers: tuple[int, ...]) -> None:
    verdict = check("03-2", *answers, on=hl.open_device("sim:h200"))
    assert f"got {len(answers)}" in verdict.problem


@pytest.mark.parametrize("answers", [None, [], 3, {}])
def test_no_answers_is_said(answers: object) -> None:
    verdict = check("03-2", answers, on=hl.open_device("sim:h200"))
    assert "one entry for each program" in verdict.problem


# -- exercise 3 --------------------------------------------------------------------------------


def add(tasks: list[Sum], queues: Queues, *, b: bool = True, back: bool = True, late: bool = False) -> None:
    for task, queue in zip(tasks, queues, strict=False):
        queue.copy(task.d_a, task.h_a)
        if b and not late:
            queue.copy(task.d_b, task.h_b)
        queue.launch(vector_add(), reads=[task.d_a, task.d_b], writes=[task.d_c])
        if late:
            queue.copy(task.d_b, task.h_b)
        if back:
            queue.copy(task.h_c, task.d_c)


def whole(dev: Device, tasks: list[Sum], queues: Queues) -> None:
    add(tasks, queues)
    dev.synchronize()


def whole_with_events(dev: Device, tasks: list[Sum], queues: Queues) -> None:
    add(tasks, queues)
    for queue in queues:
        queue.synchronize()


def as_in_the_article(dev: Device, tasks: list[Sum], queues: Queues) -> None:
    add(tasks, queues, b=False, back=False)


def without_b(dev: Device, tasks: list[Sum], queues: Queues) -> None:
    add(tasks, queues, b=False)
    dev.synchronize()


def without_the_way_back(dev: Device, tasks: list[Sum], queues: Queues) -> None:
    add(tasks, queues, back=False)
    dev.synchronize()


def without_waiting(dev: Device, tasks: list[Sum], queues: Queues) -> None:
    add(tasks, queues)


def b_too_late(dev: Device, tasks: list[Sum], queues: Queues) -> None:
    add(tasks, queues, late=True)
    dev.synchronize()


def one_queue(dev: Device, tasks: list[Sum], queues: Queues) -> None:
    add(tasks, [queues[0], queues[0]])
    dev.synchronize()


def no_sums(dev: Device, tasks: list[Sum], queues: Queues) -> None: ...


def one_task(dev: Device, tasks: list[Sum], queues: Queues) -> None:
    add(tasks[:1], queues)
    dev.synchronize()


WRONG_SUMS = {
    no_sums: "got no copy and no kernel",
    as_in_the_article: "2 arrays went to the device",
    without_b: "2 arrays went to the device",
    without_the_way_back: "0 arrays came back",
    without_waiting: "returns while copies are under way",
    b_too_late: "2 of 2 sums are wrong",
    one_queue: "Your work ran on 1 of the two streams",
    one_task: "2 arrays went to the device",
}


@pytest.mark.parametrize("device", [*PROFILES, "cpu"])
@pytest.mark.parametrize("answer", [whole, whole_with_events])
def test_whole_sums_pass(device: str, answer: Callable[..., Any]) -> None:
    dev = hl.open_device(device)
    assert check("03-3", answer, on=dev).passed
    dev.close()


@pytest.mark.parametrize("device", PROFILES)
@pytest.mark.parametrize("answer", WRONG_SUMS, ids=lambda f: f.__name__)
def test_sums_that_lack_something_are_told_what(device: str, answer: Callable[..., Any]) -> None:
    verdict = check("03-3", answer, on=hl.open_device(device))
    assert verdict.state == "fail", verdict
    assert WRONG_SUMS[answer] in " ".join(repr(verdict).split()), verdict


# -- on a machine where the exercise proves nothing ------------------------------------------------


def test_where_cpu_and_gpu_share_their_memory_a_pageable_copy_is_no_cause() -> None:
    """Program a is not slow there, so nobody can see its cause, and a wrong one is not held
    against the student. The others' causes show there as well."""
    dev = hl.open_device("sim:one_memory")
    programs = {name: original.program for name, original in broken.PROGRAMS.items()}
    verdict = check("03-2", {name: (program, "cannot") for name, program in programs.items()}, on=dev)
    assert verdict.found[0].state == "inconclusive"
    assert "Program a: on this machine it is not slow" in verdict.found[0].problem


def test_a_serial_answer_fails_also_where_the_courses_own_misses_the_bound() -> None:
    machine = hl.imagined("one engine", copies={"both_speed": 0.5}, faster={"link": 0.25})
    dev = hl.open_device(machine)
    assert check("03-1", right, on=dev).state == "inconclusive"

    def one_after_the_other(dev: Device, job: Job, chunks: int, queues: Queues) -> None:
        for i, part in enumerate(job.parts(chunks)):
            queue, d = queues[i % len(queues)], job.d[part]
            queue.copy(d, job.h_in[part])
            queue.launch(job.kernel, reads=[d], writes=[d])
            queue.copy(job.h_out[part], d)
            if i + 1 < chunks:
                for other in queues:
                    other.wait(queue.record())
        dev.synchronize()

    assert check("03-1", one_after_the_other, on=dev).state == "fail"
