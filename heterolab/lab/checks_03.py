"""The checks of lab 03."""

from __future__ import annotations

import ast
import difflib
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

from heterolab.device.base import Device, Kernel
from heterolab.errors import RaceError
from heterolab.lab import broken
from heterolab.lab.check import NOISE, Found, Stopped, attempt, holds, needs_function, ratio
from heterolab.lab.messages import text
from heterolab.lab.streams import (
    MIB,
    Job,
    balanced_rounds,
    bound_ns,
    in_chunks,
    job,
    lane_ns,
    moved,
    queues,
    record,
    serial,
    sums,
    timed,
)
from heterolab.pipeline.kernels import rounds
from heterolab.trace import metrics
from heterolab.trace.trace import D2H, DEVICE_KINDS, H2D, KERNEL, SYNC, WAIT, Trace

#: Chunks and streams that exercise 1 is run with; the first pair is also timed.
SHAPES = ((8, 4), (6, 3))


# -- exercise 1: chunk and stream a job ------------------------------------------------------


def chunked_job(dev: Device, program: Any) -> Iterator[Found]:
    """``program(dev, job, chunks, streams)`` does the job, overlapped."""
    work = job(dev, rounds(balanced_rounds(dev)))
    alone = timed(dev, serial, work)
    for chunks, streams in SHAPES:
        work.clear()
        trace, waits = run_once(dev, program, work, chunks, queues(dev, streams))
        yield from _whole_work(trace, work, alone, f"chunks={chunks}, streams={streams}")
        yield _as_many_chunks(trace, chunks)
        yield _on_streams(trace, streams)
        problem = "" if waits == 1 else "03.waits.none" if waits == 0 else "03.waits.many"
        yield holds("03.waits", problem, waits=waits)
    chunks, streams = SHAPES[0]
    trace = attempt(timed, dev, program, work, chunks, queues(dev, streams))
    yield from _overlapped(
        trace, alone, chunks, lambda: timed(dev, in_chunks, work, chunks, queues(dev, streams))
    )


def run_once(dev: Device, program: Any, *args: Any) -> tuple[Trace, int]:
    """The trace of one run of a student's program, and how often the program waited.

    An error becomes Stopped: also one of a kernel, which comes out only as the device is waited
    for, and that may be after the program has returned.
    """
    needs_function(program)
    waits: list[int] = []

    def watched(dev: Device) -> None:
        before = len(dev.host.recorder.spans)
        program(dev, *args)
        waits.append(sum(span.kind in (SYNC, WAIT) for span in dev.host.recorder.since(before)))

    return attempt(record, dev, watched), waits[0]


def _whole_work(trace: Trace, work: Job, alone: Trace, case: str) -> Iterator[Found]:
    """Everything is moved, computed and right: no speed by doing less."""
    total = f"{work.nbytes / MIB:.0f}"
    idle = not len(trace.kind(*DEVICE_KINDS))
    yield holds("03.work.some", "03.work.none" if idle else "", case=case)
    for kind, key in ((H2D, "03.work.in"), (D2H, "03.work.out")):
        bytes_ = moved(trace, kind)
        problem = "" if bytes_ == work.nbytes else f"{key}.{'few' if bytes_ < work.nbytes else 'many'}"
        yield holds(key, problem, moved=f"{bytes_ / MIB:.1f}", total=total, case=case)
    share = moved(trace, KERNEL) / moved(alone, KERNEL)
    others = sorted(set(trace.kind(KERNEL)["name"].tolist()) - {work.kernel.name})
    problem = "" if share == 1 else "03.work.kernel.few" if share < 1 else "03.work.kernel.many"
    told = {"share": f"{share:.0%}", "other": ", ".join(others), "case": case}
    yield holds("03.work.kernel", "03.work.kernel.other" if others else problem, **told)
    first = work.first_wrong()
    if first is None:
        yield holds("03.work.right")
        return
    got, expected = int(work.h_out.read()[first]), int(work.expected(slice(first, first + 1))[0])
    yield holds("03.work.right", "03.work.wrong", first=first, got=got, expected=expected, case=case)


def _as_many_chunks(trace: Trace, chunks: int) -> Found:
    kernels = len(trace.kind(KERNEL))
    return holds("03.chunks", "" if kernels == chunks else "03.chunks.other", asked=chunks, got=kernels)


def _on_streams(trace: Trace, streams: int) -> Found:
    used = len(set(trace.kind(*DEVICE_KINDS)["stream"].tolist()))
    return holds("03.streams", "" if used == streams else "03.streams.other", asked=streams, got=used)


def _overlapped(trace: Trace, alone: Trace, chunks: int, reference: Callable[[], Trace]) -> Iterator[Found]:
    """Close to the least time, and not below it; copies run while kernels run."""
    best = bound_ns(lane_ns(alone), chunks)
    yield ratio(
        "03.speed",
        trace.wall_ns / best,
        0.9,
        1.2,
        below="03.speed.skipped",
        above="03.speed.slow",
        source=trace.source,
        reference=lambda: reference().wall_ns / best,
        wall=f"{trace.wall_ns / 1e6:.2f}",
        best=f"{best / 1e6:.2f}",
    )

    def overlap(trace: Trace) -> float:
        possible = metrics.busy_ns(trace, "gpu") * (chunks - 1) / chunks
        return metrics.overlap_ns(trace, "link", "gpu") / possible

    yield ratio(
        "03.overlap",
        overlap(trace),
        0.8,
        chunks / (chunks - 1) + 0.01,
        below="03.overlap.low",
        above="03.overlap.high",
        source=trace.source,
        reference=lambda: overlap(reference()),
    )


# -- exercise 2: repair four programs ----------------------------------------------------------


def repairs(dev: Device, answers: Any) -> Iterator[Found]:
    """``{"a": (program_a, cause), …}``: one edit each, and the cause by name."""
    if not isinstance(answers, dict) or set(answers) != set(broken.PROGRAMS):
        raise Stopped(text("03.repair.shape", got=_names(answers), wanted=", ".join(broken.PROGRAMS)))
    k = balanced_rounds(dev)
    for name, original in broken.PROGRAMS.items():
        answer = answers[name]
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise Stopped(text("03.repair.pair", name=name))
        yield from _repaired(dev, name, original, *answer, k)


def _repaired(
    dev: Device, name: str, original: broken.Broken, program: Any, cause: Any, k: int
) -> Iterator[Found]:
    if cause not in broken.CAUSES:
        yield holds(
            "03.repair.cause", "03.repair.unknown", name=name, cause=cause, known=", ".join(broken.CAUSES)
        )
        return
    kernel = rounds(k * original.work)
    if cause != original.cause and _is_not_slow(dev, original, kernel):
        yield Found(text("03.repair.cause"), text("03.repair.not_here", name=name), "inconclusive")
        return
    key = "" if cause == original.cause else f"03.repair.not_{'cannot' if cause == 'cannot' else 'that'}"
    yield holds("03.repair.cause", key, name=name, cause=cause)
    edits = changed_lines(original.program, program)
    allowed = 0 if original.cause == "cannot" else 1
    problem = "" if edits == allowed else "03.repair.untouched" if edits == 0 else "03.repair.edits"
    yield holds("03.repair.one_edit", problem, name=name, edits=edits, allowed=allowed)
    four = queues(dev, 4, original.non_blocking)
    alone = timed(dev, serial, job(dev, kernel))
    made: list[Any] = []
    trace = attempt(record, dev, lambda dev: made.append(program(dev, kernel, four)))
    if not isinstance(made[0], Job):
        raise Stopped(text("03.repair.no_job", name=name))
    yield from _whole_work(trace, made[0], alone, f"program {name}")
    if original.cause == "cannot":
        return
    made.clear()  # its buffers are large
    trace = attempt(timed, dev, program, kernel, four)
    best = bound_ns(lane_ns(alone), broken.CHUNKS)
    yield ratio(
        "03.repair.speed",
        trace.wall_ns / best,
        0.9,
        1.2,
        below="03.speed.skipped",
        above="03.repair.slow",
        source=trace.source,
        reference=lambda: _repaired_ns(dev, kernel) / best,
        name=name,
        wall=f"{trace.wall_ns / 1e6:.2f}",
        best=f"{best / 1e6:.2f}",
    )


def _repaired_ns(dev: Device, kernel: Kernel) -> int:
    """How long a program takes that nothing holds up."""
    return timed(dev, in_chunks, job(dev, kernel), broken.CHUNKS, queues(dev, 4)).wall_ns


def _is_not_slow(dev: Device, original: broken.Broken, kernel: Kernel) -> bool:
    """Whether what is wrong with a program costs nothing on this machine: where CPU and GPU share
    their memory, a pageable copy holds nobody."""
    if original.cause == "cannot":
        return False
    four = queues(dev, 4, original.non_blocking)
    wall = timed(dev, original.program, kernel, four).wall_ns
    return wall <= NOISE * _repaired_ns(dev, kernel)


def _names(answers: Any) -> str:
    return ", ".join(map(str, answers)) if isinstance(answers, dict) else type(answers).__name__


def changed_lines(original: Callable[..., Any], program: Any) -> int:
    """Statements that differ between two functions; comments and spacing do not count."""
    needs_function(program)
    try:
        before, after = _statements(original), _statements(program)
    except (OSError, TypeError, SyntaxError) as error:
        raise Stopped(text("03.repair.no_source", error=error)) from error
    opcodes = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    return sum(max(a2 - a1, b2 - b1) for tag, a1, a2, b1, b2 in opcodes if tag != "equal")


def _statements(function: Callable[..., Any]) -> list[str]:
    """The body's statements, one a line, as Python itself would write them."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    if not isinstance(tree, ast.FunctionDef):
        raise TypeError("not a function")
    body = tree.body
    if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        body = body[1:]  # the docstring
    return "\n".join(ast.unparse(statement) for statement in body).split("\n")


# -- exercise 3: what the article's code leaves out -------------------------------------------


def whole_sum(dev: Device, program: Any) -> Iterator[Found]:
    """``program(dev, tasks, queues)`` leaves both sums in host memory, ready to be read."""
    needs_function(program)
    tasks, found = sums(dev), list[bool]()

    def run_and_look(dev: Device) -> None:
        program(dev, tasks, queues(dev, 2))
        try:
            found.extend(task.right() for task in tasks)
        except RaceError:
            found.clear()

    trace = attempt(record, dev, run_and_look)
    yield holds("03.work.some", "" if len(trace.kind(*DEVICE_KINDS)) else "03.sum.none")
    one = tasks[0].h_a.nbytes
    arrays = moved(trace, H2D) // one
    yield holds("03.sum.in", "" if arrays == 4 else "03.sum.in.other", arrays=arrays)
    arrays = moved(trace, D2H) // one
    yield holds("03.sum.out", "" if arrays == 2 else "03.sum.out.other", arrays=arrays)
    yield holds("03.sum.ready", "" if found else "03.sum.early")
    yield holds("03.sum.right", "" if all(found) else "03.sum.wrong", wrong=found.count(False))
    used = len(set(trace.kind(*DEVICE_KINDS)["stream"].tolist()))
    yield holds("03.sum.streams", "" if used == 2 else "03.sum.streams.other", got=used)
