"""Each effect of the simulator's physics can be switched off, and matters where it should."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import heterolab as hl
from heterolab.device import score, worth
from heterolab.device.base import Kernel, Work
from heterolab.device.physics import EFFECTS, Physics
from heterolab.device.profile import CpuCost, DeviceProfile, Table
from heterolab.device.programs import load_programs
from heterolab.device.sim import SimDevice
from heterolab.errors import InputError
from heterolab.trace.trace import D2H, H2D, KERNEL, Span, Trace

H200 = DeviceProfile.load("h200")
MIB = 1 << 20
PROGRAMS = Path(__file__).parent.parent / "data" / "h200-open.json.gz"

#: The H200 with a cache that shows, and a CPU stage that holds the interpreter lock all the time.
CACHE = Table((0.0, 1e6, 2e6), (0.0, 1e3, 1e6))
JOB = CpuCost(Table.constant(100_000), Table.constant(1.0), Table.constant(1.0))
MACHINE = dataclasses.replace(
    H200, compute=dataclasses.replace(H200.compute, memory=CACHE), cpu_costs={"job": JOB}
)

Program = Callable[[SimDevice], int]


def machine(*without: str) -> SimDevice:
    return SimDevice.open(MACHINE, without=without, races="off")


def kernel(name: str = "spin", **work: Any) -> Kernel:
    cost = Work(**work)
    return Kernel(name, lambda xp, reads, writes: None, lambda reads, writes: cost)


def spin(us: float, blocks: int = 1) -> Kernel:
    return kernel(blocks=blocks, block_ns=round(us * 1000))


def spans(device: SimDevice) -> list[Span]:
    """Device spans in the order in which they were issued."""
    device.synchronize()
    return sorted((s for s in device.host.recorder.spans if s.kind in (H2D, D2H, KERNEL)), key=lambda s: s.op)


def wall(*, streams: int, memory: str = "pinned", steps: str) -> Program:
    """The wall of copies (">" in, "<" out) and kernels ("k"), each step on the next stream."""

    def run(device: SimDevice) -> int:
        queues = [device.stream() for _ in range(streams)]
        here, there = device.buffer(MIB, "uint8", memory), device.buffer(MIB, "uint8")
        for i, step in enumerate(steps):
            stream = queues[i % streams]
            if step == "k":
                stream.launch(spin(100))
            elif step == ">":
                stream.copy(there, here)
            else:
                stream.copy(here, there)
        device.synchronize()
        return device.host.now()

    return run


def starts_after(stream: int) -> Program:
    """When a ready copy of a stream starts, behind one of stream 0 that a kernel holds up."""

    def run(device: SimDevice) -> int:
        queues = [device.stream() for _ in range(stream + 1)]
        here, there = device.buffer(MIB, "uint8", "pinned"), device.buffer(MIB, "uint8")
        queues[0].launch(spin(1000))
        queues[0].copy(there, here)
        queues[stream].copy(there, here)
        return spans(device)[2].start_ns

    return run


def second_start(steps: str, streams: int) -> Program:
    """When the second of two ops starts."""

    def run(device: SimDevice) -> int:
        wall(streams=streams, steps=steps)(device)
        return spans(device)[1].start_ns

    return run


def calls(device: SimDevice) -> int:
    """The host's time in five launches."""
    stream = device.stream()
    for _ in range(5):
        stream.launch(spin(1))
    return device.host.now()


def own_work(device: SimDevice) -> int:
    device.host.work(100_000)
    return device.host.now()


def launch_after(work_ns: float) -> Program:
    """How long a launch takes after another one and so much of the host's own work."""

    def run(device: SimDevice) -> int:
        stream = device.stream()
        stream.launch(spin(1))
        device.host.work(work_ns)
        before = device.host.now()
        stream.launch(spin(1))
        return device.host.now() - before

    return run


def reads(memory: str, **work: Any) -> Program:
    """How long a kernel takes that reads a MiB."""

    def run(device: SimDevice) -> int:
        device.stream().launch(kernel("reads", **work), [device.buffer(MIB, "uint8", memory)])
        (span,) = spans(device)
        return span.end_ns - span.start_ns

    return run


def chain(event: bool) -> Program:
    """Two kernels, one behind the other: on two streams by an event, or on one."""

    def run(device: SimDevice) -> int:
        first, second = device.stream(), device.stream()
        first.launch(spin(100))
        if event:
            second.wait(first.record())
        (second if event else first).launch(spin(100))
        device.synchronize()
        return device.host.now()

    return run


def beside_the_default_stream(non_blocking: bool) -> Program:
    def run(device: SimDevice) -> int:
        device.stream(non_blocking).launch(spin(100))
        device.default_stream.launch(spin(100))
        device.synchronize()
        return device.host.now()

    return run


def jobs(count: int) -> Program:
    def run(device: SimDevice) -> int:
        pool = device.host.pool(2)
        for _ in range(count):
            pool.submit("job", lambda: None)
        pool.close()
        return device.host.now()

    return run


def waits(us: float) -> Program:
    """The host waits for an event behind a kernel: it steps through its loop, then sleeps if it must."""

    def run(device: SimDevice) -> int:
        stream = device.stream()
        stream.launch(spin(us))
        device.host.wait_any([stream.record()])
        return device.host.now()

    return run


LESS, MORE = -1, 1
#: effect → what it does to a program to leave it out, that program, and one that it does not touch.
CASES: dict[str, tuple[int, Program, Program]] = {
    "concurrent_kernels": (MORE, wall(streams=2, steps="kk"), wall(streams=2, steps="k>")),
    "host_calls": (LESS, calls, own_work),
    "cold_calls": (LESS, launch_after(1e6), launch_after(0)),
    "pageable_holds_host": (
        LESS,
        wall(streams=2, steps="><", memory="pageable"),
        wall(streams=2, steps="><"),
    ),
    "zero_copy_reads": (LESS, reads("mapped", bytes=1e3), reads("device", bytes=1e3)),
    "one_engine_a_direction": (LESS, second_start(">>", 2), second_start("><", 2)),
    "directions_share_link": (LESS, wall(streams=2, steps="><"), wall(streams=2, steps=">>")),
    "queued_copies_pipeline": (MORE, wall(streams=1, steps=">>"), wall(streams=1, steps=">k<")),
    "managed_faults": (LESS, reads("managed", block_ns=1000), reads("mapped", block_ns=1000)),
    "gaps_in_a_stream": (LESS, wall(streams=1, steps=">k<"), wall(streams=1, steps="k")),
    "event_latency": (LESS, chain(event=True), chain(event=False)),
    "copy_channels": (LESS, starts_after(stream=4), starts_after(stream=1)),
    "legacy_default_stream": (LESS, beside_the_default_stream(False), beside_the_default_stream(True)),
    "sync_and_start_latency": (LESS, wall(streams=1, steps="k"), own_work),
    "l2_regime": (MORE, reads("device", bytes=1e6), reads("device", block_ns=1000)),
    "interpreter_lock": (LESS, jobs(2), jobs(1)),
    "loop_step": (LESS, waits(us=1), wall(streams=1, steps="k")),
    "wake_lateness": (LESS, waits(us=1000), wall(streams=1, steps="k")),
}


def test_every_effect_has_a_case() -> None:
    assert set(CASES) == set(EFFECTS)
    assert all(effect.what.count(".") >= 1 and "without, " in effect.what for effect in EFFECTS.values())


@pytest.mark.parametrize("effect", CASES)
def test_leaving_an_effect_out_changes_what_it_should(effect: str) -> None:
    direction, program, other = CASES[effect]

    def change(program: Program) -> int:
        with_it = program(machine())
        return program(machine(effect)) - with_it

    assert change(program) * direction > 0
    assert change(other) == 0


@pytest.mark.parametrize("effect", EFFECTS)
def test_an_effect_that_is_off_stays_off(effect: str) -> None:
    once = Physics.of(H200, effect)
    assert Physics.of(once.profile, effect) == once


def test_without_any_effect_only_the_work_is_left() -> None:
    device = machine(*EFFECTS)
    wall(streams=1, steps=">k<")(device)
    copy_in, copy_out = H200.copies.h2d.at(MIB), H200.copies.d2h.at(MIB)
    assert device.host.now() == round(copy_in) + round(100_000 + H200.compute.fixed_ns) + round(copy_out)


def test_without_an_engine_copies_share_the_link() -> None:
    device = machine("one_engine_a_direction")
    wall(streams=2, steps=">>")(device)
    first, second = spans(device)
    assert second.start_ns < first.end_ns
    alone = H200.copies.h2d.at(MIB)
    assert first.end_ns - first.start_ns > 1.5 * alone, "neither has the link to itself"
    assert second.end_ns - first.start_ns == pytest.approx(2 * alone, rel=0.01)


def test_grids_end_where_an_op_starts_at_once() -> None:
    """The first op starts at 0 ns: that is a time as good as any."""
    device = machine(*EFFECTS)
    stream = device.stream()
    stream.launch(spin(100, blocks=3000))  # in waves
    stream.launch(spin(100, blocks=3000))
    first, second = spans(device)
    assert first.start_ns == 0
    assert second.start_ns == first.end_ns


def test_an_unknown_effect_is_refused_with_the_nearest_names() -> None:
    with pytest.raises(InputError, match=r"'pageable holds the host'.*Did you mean 'pageable_holds_host'"):
        hl.open_device("sim:h200", without=["pageable holds the host"])
    with pytest.raises(InputError, match="a list of effects"):
        hl.open_device("sim:h200", without=3)
    with pytest.raises(InputError, match="no such option"):
        hl.open_device("cpu", without=["loop_step"])


def test_a_device_and_its_trace_say_what_is_off() -> None:
    device = hl.open_device("sim:h200", without=["loop_step", "copy_channels", "loop_step"])
    assert isinstance(device, SimDevice)
    assert "without copy_channels, loop_step" in repr(device)
    wall(streams=1, steps="k")(device)
    trace = Trace.from_spans(device.host.recorder.spans, device.source, device.name, device.meta())
    assert trace.stamp == "simulated · NVIDIA H200, without copy_channels, loop_step"
    assert trace.meta["without"] == ["copy_channels", "loop_step"]


def test_with_all_effects_nothing_is_said() -> None:
    device = SimDevice.open("h200")
    assert "without" not in repr(device) + json.dumps(device.meta())


def test_what_each_effect_is_worth_on_measured_programs() -> None:
    """The family that an effect is about suffers without it."""
    programs = load_programs(PROGRAMS)
    suffers = {
        "concurrent_kernels": ("concurrent", 0.5),
        "pageable_holds_host": ("copies", 0.2),
        "zero_copy_reads": ("zerocopy", 0.15),
        "host_calls": ("tiny", 0.3),
        "gaps_in_a_stream": ("pipeline", 0.03),
    }
    whole, *others = worth.worth(programs, effects=suffers)
    assert whole.without == "all effects"
    assert [w.without for w in others] == list(suffers)
    for w in others:
        family, more = suffers[w.without]
        assert w.by_family()[family] > whole.by_family()[family] + more
        assert w.mean > whole.mean


def test_the_table_of_effects() -> None:
    programs = load_programs(PROGRAMS)[:8]
    table = worth.worth(programs, effects=["host_calls", "wake_lateness"])
    text = list(worth.lines(table))
    assert text[1].startswith("all effects")
    assert text[2].startswith("host_calls"), "what matters most comes first"
    assert "→" in text[2]
    assert "→" not in text[3], "nothing in these programs sleeps"
    figures = worth.as_dict(table)["host_calls"]
    assert figures["what"] == EFFECTS["host_calls"].what
    assert figures["error"]["median"] == table[1].median


def test_the_score_without_an_effect_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score, "SPEED_NS", 0)
    whole = json.loads(score.main(PROGRAMS, as_json=True))
    without = json.loads(score.main(PROGRAMS, as_json=True, without=["concurrent_kernels"]))
    assert "without" not in whole
    assert without["without"] == ["concurrent_kernels"]
    errors = [report["by_family"]["concurrent"]["error"]["median"] for report in (whole, without)]
    assert errors[1] > errors[0] + 0.5
    assert score.main(PROGRAMS, without=["loop_step"]).startswith("without loop_step:")
