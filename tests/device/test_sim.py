"""The simulated device: its physics, its clock, and the values that it computes."""

from __future__ import annotations

import dataclasses
import gc
import json
import threading
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import heterolab as hl
from heterolab.device.base import Buffer, Kernel, Memory, Work
from heterolab.device.order import RaceWarning
from heterolab.device.prices import Looked
from heterolab.device.processor import shared_speeds
from heterolab.device.profile import CpuCost, DeviceProfile, Table
from heterolab.device.sim import SimDevice
from heterolab.device.simhost import SimHost, SimRecorder
from heterolab.errors import InputError, OutOfDeviceMemory, ProfileError, RaceError, StalledError
from heterolab.trace.trace import D2H, H2D, KERNEL, Span, Trace

H200 = DeviceProfile.load("h200")
SMS, THREADS = H200.compute.sms, H200.compute.threads_per_sm
MIB = 1 << 20


def spin(block_us: float, blocks: int = 1, threads: int = 256) -> Kernel:
    """A kernel whose blocks each take that long, and that touches nothing."""
    work = Work(blocks=blocks, threads=threads, block_ns=round(block_us * 1000))
    return Kernel("spin", lambda xp, reads, writes: None, lambda reads, writes: work)


def fill(value: float, us: float = 1.0) -> Kernel:
    def run(xp: Any, reads: Any, writes: Any) -> None:
        writes[0][...] = value

    return Kernel("fill", run, lambda reads, writes: Work(block_ns=round(us * 1000)))


def add_one(us: float = 1.0) -> Kernel:
    def run(xp: Any, reads: Any, writes: Any) -> None:
        writes[0][...] = reads[0] + 1

    return Kernel("add one", run, lambda reads, writes: Work(block_ns=round(us * 1000)))


def with_cost(ns: float, gil: float = 1.0, cores: float = 16, **changes: Any) -> DeviceProfile:
    """The H200's profile with one CPU stage, "job", and free calls to workers."""
    job = CpuCost(Table.constant(ns), Table.constant(gil), Table.constant(gil))
    workers = dataclasses.replace(H200.workers, submit_ns=0, start_ns=0)
    host = dataclasses.replace(H200.host, cores=cores)
    return dataclasses.replace(H200, cpu_costs={"job": job}, workers=workers, host=host, **changes)


def ops(device: SimDevice, *kinds: str) -> list[Span]:
    """Device spans in the order in which they were issued."""
    device.synchronize()
    wanted = kinds or (H2D, D2H, KERNEL)
    return sorted((s for s in device.host.recorder.spans if s.kind in wanted), key=lambda s: s.op)


def overlap(a: Span, b: Span) -> int:
    return max(0, min(a.end_ns, b.end_ns) - max(a.start_ns, b.start_ns))


def length(span: Span) -> int:
    return span.end_ns - span.start_ns


@pytest.fixture
def device() -> SimDevice:
    return SimDevice.open("h200")


# -- copies --------------------------------------------------------------------------------


def pair(device: SimDevice, nbytes: int, memory: str = "pinned") -> tuple[Buffer, Buffer]:
    return device.buffer(nbytes, "uint8", memory), device.buffer(nbytes, "uint8")


def test_a_pinned_copy_returns_at_once_and_a_pageable_one_holds_the_host(device: SimDevice) -> None:
    times = {}
    for memory in ("pinned", "pageable"):
        here, there = pair(device, 64 * MIB, memory)
        before = device.host.now()
        device.stream().copy(there, here)
        times[memory] = device.host.now() - before
        device.synchronize()
    assert times["pinned"] < 20_000
    assert times["pageable"] > 5_000_000


def test_to_pageable_memory_the_host_is_held_until_the_bytes_are_there(device: SimDevice) -> None:
    here, there = pair(device, MIB, "pageable")
    stream = device.stream()
    stream.launch(fill(7, us=500), [], [there])
    stream.copy(here, there)
    assert (here.read() == 7).all(), "no wait is needed, and none is asked for"
    assert device.host.now() > 500_000


def test_one_copy_a_direction_at_a_time(device: SimDevice) -> None:
    for _ in range(3):
        here, there = pair(device, 4 * MIB)
        device.stream().copy(there, here)
    spans = ops(device)
    assert all(overlap(a, b) == 0 for a, b in pairwise(spans))
    assert spans[1].after == spans[0].op, "the second waited for the engine"


def test_both_directions_run_at_once_and_slow_each_other(device: SimDevice) -> None:
    (here, there), (back, result) = pair(device, 16 * MIB), pair(device, 16 * MIB)
    device.stream().copy(there, here)
    device.stream().copy(back, result)
    both = ops(device)
    assert overlap(*both) > 0.9 * length(both[0])
    alone = H200.copies.h2d.at(16 * MIB)
    assert 1.05 * alone < length(both[0]) < 1.3 * alone


def test_a_copy_takes_what_the_profile_says(device: SimDevice) -> None:
    here, there = pair(device, 4 * MIB)
    device.stream().copy(there, here)
    assert length(ops(device)[0]) == pytest.approx(H200.copies.h2d.at(4 * MIB), abs=2)


# -- kernels -------------------------------------------------------------------------------


@pytest.mark.parametrize(("waves", "blocks"), [(1, SMS * 8), (2, SMS * 8 + 1), (3, SMS * 24)])
def test_a_grid_that_does_not_fit_runs_in_waves(device: SimDevice, waves: int, blocks: int) -> None:
    device.stream().launch(spin(100, blocks, THREADS // 8))
    assert length(ops(device)[0]) == pytest.approx(waves * 100_000, rel=0.02)


def test_small_kernels_of_two_streams_run_together_and_large_ones_do_not(device: SimDevice) -> None:
    for blocks in (1, SMS * 8):
        for _ in range(2):
            device.stream().launch(spin(200, blocks, 256))
        device.synchronize()
    small, small_too, large, large_too = ops(device)
    assert overlap(small, small_too) > 0.9 * length(small)
    assert overlap(large, large_too) == 0
    assert large_too.after == large.op


def test_a_later_kernel_waits_until_the_earlier_one_has_placed_all_its_blocks(device: SimDevice) -> None:
    kernels = [spin(100, SMS * 8), spin(100, SMS * 8), spin(1, 1)]
    for kernel in kernels:
        device.stream().launch(kernel)
    first, second, tiny = ops(device)
    assert second.start_ns >= first.end_ns
    assert tiny.start_ns >= second.start_ns, "though there is room for one block all the time"


def test_blocks_go_to_the_emptiest_sm(device: SimDevice) -> None:
    """Half the SMs are full: as many blocks as the other half holds still fit at once."""
    device.stream().launch(spin(500, SMS // 2, 1024))
    device.stream().launch(spin(500, SMS // 2, 1024))
    device.stream().launch(spin(100, SMS, 1024))
    *halves, rest = ops(device)
    assert overlap(*halves) > 0
    assert length(rest) == pytest.approx(100_000, rel=0.02)
    assert overlap(rest, halves[0]) == length(rest)


def test_a_kernel_without_a_price_costs_its_roofline(device: SimDevice) -> None:
    bound_by_memory = Kernel("m", lambda *_: None, lambda reads, writes: Work(flops=1, bytes=1e9))
    bound_by_arithmetic = Kernel("a", lambda *_: None, lambda reads, writes: Work(flops=1e12, bytes=8))
    for kernel in (bound_by_memory, bound_by_arithmetic):
        device.stream().launch(kernel)
        device.synchronize()
    memory, arithmetic = ops(device)
    assert length(memory) == pytest.approx(1e9 / 3200, rel=0.1)
    assert length(arithmetic) == pytest.approx(1e12 / H200.compute.flops_per_ns["float32"], rel=0.1)


def test_a_kernel_that_finds_nearly_all_of_the_device_free_is_not_held_up(device: SimDevice) -> None:
    everything = Kernel("e", lambda *_: None, lambda reads, writes: Work(bytes=1e9))
    device.stream().launch(spin(1000, 1))
    device.stream().launch(everything)
    tiny, large = ops(device)
    assert overlap(tiny, large) == length(large)
    assert length(large) == pytest.approx(1e9 / 3200, rel=0.1)


def test_a_type_without_a_rate_is_refused(device: SimDevice) -> None:
    kernel = Kernel("odd", lambda *_: None, lambda reads, writes: Work(flops=1, dtype="float8"))
    with pytest.raises(ProfileError, match=r"float8.*heterolab calibrate"):
        device.stream().launch(kernel)


def test_zero_copy_reads_go_at_the_speed_of_the_link(device: SimDevice) -> None:
    far, near = device.buffer(16 * MIB, "uint8", "mapped"), device.buffer(16 * MIB, "uint8")
    kernel = Kernel("read", lambda *_: None, lambda reads, writes: Work(bytes=16 * MIB))
    for buffer in (near, far):
        device.stream().launch(kernel, [buffer])
        device.synchronize()
    at_home, over_link = ops(device)
    assert length(over_link) > 20 * length(at_home)
    assert length(over_link) == pytest.approx(16 * MIB / 51.3, rel=0.05)


def test_a_composite_holds_the_host_for_all_its_launches(device: SimDevice) -> None:
    eager = Kernel("eager", lambda *_: None, lambda reads, writes: Work(flops=1e6, launches=300))
    graph = Kernel("graph", lambda *_: None, lambda reads, writes: Work(flops=1e6, launches=1))
    held = []
    for kernel in (eager, graph):
        before = device.host.now()
        device.stream().launch(kernel)
        held.append(device.host.now() - before)
        device.synchronize()
    assert held[0] > 100 * held[1]
    *pulses, second = ops(device)
    lasted = pulses[-1].end_ns - pulses[0].start_ns
    assert lasted > 0.9 * held[0], "the device waits for the host between the launches"
    assert length(second) < 10_000


# -- order ---------------------------------------------------------------------------------


def test_an_event_holds_the_other_stream(device: SimDevice) -> None:
    first, second = device.stream(), device.stream()
    first.launch(spin(300))
    second.wait(first.record())
    second.launch(spin(10))
    a, b = ops(device)
    assert b.start_ns >= a.end_ns
    assert b.after == a.op


def test_an_event_of_a_stream_that_only_waits_passes_the_wait_on(device: SimDevice) -> None:
    first, second, third = (device.stream() for _ in range(3))
    first.launch(spin(300))
    second.wait(first.record())
    third.wait(second.record())
    third.launch(spin(10))
    a, b = ops(device)
    assert b.start_ns >= a.end_ns


@pytest.mark.parametrize("non_blocking", [True, False])
def test_the_legacy_default_stream_is_a_barrier_for_blocking_streams(non_blocking: bool) -> None:
    device = SimDevice.open("h200")
    stream = device.stream(non_blocking)
    stream.launch(spin(100))
    device.default_stream.launch(spin(100))
    stream.launch(spin(100))
    a, b, c = ops(device)
    assert (b.start_ns >= a.end_ns) == (not non_blocking)
    assert (c.start_ns >= b.end_ns) == (not non_blocking)


def lost_update(races: str) -> tuple[SimDevice, Buffer]:
    """A kernel reads on one stream what a copy on another stream has not brought yet."""
    device = SimDevice.open("h200", races=races)
    copying, computing = device.stream(), device.stream()
    here, there, result = device.buffer(MIB, memory="pinned"), device.buffer(MIB), device.buffer(MIB)
    here.write()[:] = 5
    copying.copy(there, here)
    computing.launch(add_one(), [there], [result])
    back = device.buffer(MIB, memory="pinned")
    computing.copy(back, result)
    computing.synchronize()
    return device, back


def test_a_missing_event_raises_and_names_it() -> None:
    with pytest.raises(RaceError, match=r"stream 0\.record\(\).*stream 1\.wait"):
        lost_update("raise")


def test_a_missing_event_gives_wrong_values_where_they_are_let_through() -> None:
    with pytest.warns(RaceWarning, match="add one on stream 1"):
        device, back = lost_update("show")
    assert (back.read() == 1).all(), "it read the old zeros"
    assert device.order is not None
    assert len(device.order.found) == 1
    _, unchecked = lost_update("off")
    assert (unchecked.read() == 1).all()


def test_a_pinned_source_overwritten_too_early_is_copied_wrong() -> None:
    device = SimDevice.open("h200", races="show")
    here, there = device.buffer(4 * MIB, memory="pinned"), device.buffer(4 * MIB)
    here.write()[:] = 1
    stream = device.stream()
    stream.copy(there, here)
    with pytest.warns(RaceWarning, match="a write by the host"):
        here.write()[:] = 2
    stream.copy(here, there)
    stream.synchronize()
    assert (here.read() == 2).all()


def test_a_pageable_source_may_be_overwritten_at_once(device: SimDevice) -> None:
    here, there = device.buffer(4 * MIB, memory="pageable"), device.buffer(4 * MIB)
    back = device.buffer(4 * MIB, memory="pinned")
    here.write()[:] = 1
    stream = device.stream()
    stream.copy(there, here)
    here.write()[:] = 2
    stream.copy(back, there)
    stream.synchronize()
    assert (back.read() == 1).all()


def test_values_land_when_the_op_ends(device: SimDevice) -> None:
    stream, mapped = device.stream(), device.buffer(4, memory="mapped")
    stream.launch(fill(3, us=100), [], [mapped])
    event = stream.record()
    assert mapped.array.tolist() == [0] * 4
    device.host.wait_any([event])
    assert mapped.read().tolist() == [3] * 4


def test_recall_stands_for_run(device: SimDevice) -> None:
    def run(*_: Any) -> None:
        raise AssertionError("remembered values need no run")

    def recall(reads: Any, writes: Any) -> None:
        writes[0][...] = 8

    there = device.buffer(2, memory="mapped")
    device.stream().launch(Kernel("k", run, lambda r, w: Work(), recall=recall), [], [there])
    device.synchronize()
    assert there.read().tolist() == [8, 8]


def test_without_values_nothing_is_computed_and_time_is_the_same() -> None:
    def never(*_: Any) -> None:
        raise AssertionError("no values, no run")

    walls = []
    for values in (True, False):
        device = SimDevice.open("h200", values=values)
        here, there = pair(device, MIB)
        stream = device.stream()
        stream.copy(there, here)
        kernel = spin(50) if values else Kernel("spin", never, spin(50).work)
        stream.launch(kernel, [there], [])
        stream.synchronize()
        walls.append(device.host.now())
    assert walls[0] == walls[1]
    assert "no values" in repr(device)


# -- the host ------------------------------------------------------------------------------


def test_a_call_costs_what_the_profile_says() -> None:
    device = SimDevice.open(with_cost(70_000))
    assert device.host.call("job", lambda: 42) == 42
    assert device.host.now() == 70_000


def test_a_stage_without_a_price_is_refused(device: SimDevice) -> None:
    for charge in (device.host.call, device.host.pool(1).submit):
        with pytest.raises(ProfileError, match=r"'parse'.*heterolab calibrate"):
            charge("parse", lambda: None)


def jobs_wall(profile: DeviceProfile, workers: int, jobs: int, kind: Any = "thread") -> int:
    host = SimHost(profile)
    pool = host.pool(workers, kind)
    started = [pool.submit("job", lambda: None) for _ in range(jobs)]
    pool.close()
    assert all(job.done for job in started)
    return host.now()


@pytest.mark.parametrize(("gil", "slowdown"), [(1.0, 2.0), (0.0, 1.0), (0.43, 1.18)])
def test_threads_share_the_interpreter_lock(gil: float, slowdown: float) -> None:
    alone = jobs_wall(with_cost(100_000, gil), 1, 1)
    assert jobs_wall(with_cost(100_000, gil), 2, 2) == pytest.approx(slowdown * alone, rel=0.01)


@pytest.mark.parametrize(
    ("jobs", "speeds"),
    [
        ([(1.0, 1.0)], [1.0]),
        ([(1.0, 1.0), (1.0, 1.0)], [0.5, 0.5]),
        # rows of a picture beside a tokeniser: it hardly holds the lock, but comes back for it
        ([(0.02, 1.0), (0.4, 0.4)], [0.6, 1.0]),
        # plain Python beside a tokeniser: nobody takes the lock from it
        ([(1.0, 0.1), (0.4, 0.4)], [0.97, 0.61]),
    ],
)
def test_who_waits_for_the_lock_and_who_makes_others_wait(
    jobs: list[tuple[float, float]], speeds: list[float]
) -> None:
    assert shared_speeds(jobs) == pytest.approx(speeds, abs=0.02)


def test_more_jobs_than_cores_share_the_cores() -> None:
    profile = with_cost(100_000, gil=0.0, cores=2)
    assert jobs_wall(profile, 4, 4) == pytest.approx(2 * jobs_wall(profile, 1, 1), rel=0.01)


def test_the_host_thread_contends_with_its_workers() -> None:
    host = SimHost(with_cost(100_000))
    pool = host.pool(1)
    job = pool.submit("job", lambda: None)
    host.call("job", lambda: None)
    assert host.now() == pytest.approx(200_000, rel=0.01)
    pool.close()
    assert job.done


def test_processes_have_a_lock_each_and_pay_for_pickling() -> None:
    profile = with_cost(100_000)
    pickling = profile.workers.process_job_ns
    assert pickling is not None
    assert jobs_wall(profile, 2, 2, "process") == pytest.approx(100_000 + pickling, rel=0.02)
    unmeasured = dataclasses.replace(profile.workers, process_job_ns=None)
    with pytest.raises(ProfileError, match="pickling"):
        SimHost(dataclasses.replace(profile, workers=unmeasured)).pool(2, "process")


def test_a_job_starts_when_a_worker_is_free_and_computes_then() -> None:
    host, seen = SimHost(with_cost(10_000_000)), []
    pool = host.pool(1)
    jobs = [pool.submit("job", seen.append, i) for i in range(3)]
    host.wait_any([jobs[0]])
    assert seen == [0, 1], "the first is done, the second has begun"
    host.wait_any([jobs[2]])
    assert seen == [0, 1, 2]
    assert {s.lane for s in host.recorder.spans if s.kind == "cpu"} == {"worker 0"}


def test_wait_any_charges_its_step_and_its_lateness(device: SimDevice) -> None:
    stream, host = device.stream(), device.host
    stream.launch(spin(1000))
    event = stream.record()
    before = host.now()
    assert host.wait_any([event]) == [event]
    (kernel,) = [s for s in host.recorder.spans if s.kind == KERNEL]
    assert host.now() == kernel.end_ns + round(H200.waiting.event_ns)
    (wait,) = [s for s in host.recorder.spans if s.kind == "wait"]
    assert (wait.start_ns, wait.end_ns) == (before + round(H200.waiting.loop_step_ns), host.now())
    until = host.now() + 10**6
    host.wait_any([], until=until)
    assert host.now() == until + round(H200.waiting.timer_ns)


def test_waiting_for_nothing_is_an_error_and_no_hang(device: SimDevice) -> None:
    with pytest.raises(StalledError, match="nothing is in flight"):
        device.host.wait_any([])


def test_cold_calls_cost_more_than_warm_ones(device: SimDevice) -> None:
    stream = device.stream()

    def launch_ns() -> int:
        before = device.host.now()
        stream.launch(spin(1))
        return device.host.now() - before

    first, warm = launch_ns(), launch_ns()
    device.host.work(1e6)
    cold = launch_ns()
    assert warm < first < cold
    assert cold - warm == pytest.approx(H200.host.cold_launch_ns, rel=0.05)


def test_two_devices_share_one_host() -> None:
    host = SimHost(H200)
    one, two = SimDevice.open("h200", host=host), SimDevice.open("t4", host=host)
    assert (one.index, two.index) == (0, 1)
    events = []
    for device in (one, two):
        stream = device.stream()
        stream.launch(spin(1000))
        events.append(stream.record())
    while events:
        done = host.wait_any(events)
        events = [event for event in events if event not in done]
    first, second = (s for s in host.recorder.spans if s.kind == KERNEL)
    assert {first.device, second.device} == {0, 1}
    assert overlap(first, second) > 900_000


def test_spawn_runs_to_the_end_at_once(device: SimDevice) -> None:
    steps = iter([True, True, False])
    loop = device.host.spawn(lambda: next(steps))
    assert loop.done
    assert list(steps) == []
    assert loop.join()


def test_a_price_is_looked_up_once_and_only_so_many_are_kept() -> None:
    table = Table((0.0, 100.0), (0.0, 1e4))
    looked = Looked(table)
    assert [looked[size] for size in range(2 * Looked.MOST)] == [
        table.at(size) for size in range(2 * Looked.MOST)
    ]
    assert len(looked) <= Looked.MOST


def test_rows_become_spans_when_somebody_looks() -> None:
    recorder = SimRecorder()
    row = (recorder.next_op(), "cpu", "step", "host", -2, -1, 0, 0, 5, 0, -1, -1)
    recorder.rows.append(row)
    recorder.add(Span(*row)._replace(op=recorder.next_op()))
    assert [type(span) for span in recorder.spans] == [Span, Span]
    assert [span.op for span in recorder.since(0)] == [0, 1]
    assert recorder.ops == 2


# -- the same again ------------------------------------------------------------------------


def busy_run(**options: Any) -> bytes:
    """A program with a bit of everything, and its trace as bytes."""
    device = SimDevice.open("h200", **options)
    host, pool = device.host, device.host.pool(2)
    streams = [device.stream() for _ in range(3)]
    jobs = [pool.submit("preprocess", lambda: None, size=n) for n in (1, 5, 9)]
    for i, stream in enumerate(streams * 3):
        here, there = pair(device, (i + 1) * 100_000, "pageable" if i % 4 == 0 else "pinned")
        stream.copy(there, here)
        stream.launch(spin(20, 1 + 100 * i), [there], [])
        stream.copy(here, there)
    events = [stream.record() for stream in streams]
    while not all(wait.done for wait in (*jobs, *events)):
        host.wait_any([wait for wait in (*jobs, *events) if not wait.done])
    pool.close()
    trace = Trace.from_spans(host.recorder.spans, device.source, device.name, device.meta())
    return json.dumps(trace.to_json(), sort_keys=True).encode()


def test_the_same_seed_gives_the_same_bytes() -> None:
    assert busy_run() == busy_run()
    assert busy_run(jitter=0.1, seed=3) == busy_run(jitter=0.1, seed=3)
    assert busy_run(jitter=0.1, seed=3) != busy_run(jitter=0.1, seed=4)


def test_jitter_is_off_by_default_and_moderate() -> None:
    walls = []
    for seed in range(20):
        device = SimDevice.open("h200", seed=seed, jitter=0.05)
        device.host.work(10**6)
        walls.append(device.host.now())
    assert 0.02 < np.std(walls) / 10**6 < 0.09
    assert np.mean(walls) == pytest.approx(10**6, rel=0.05)
    with pytest.raises(InputError, match="jitter=-1"):
        SimDevice.open("h200", jitter=-1)


def test_it_starts_no_thread(device: SimDevice) -> None:
    before = threading.active_count()
    pool = device.host.pool(4)
    pool.submit("batch", lambda: None)
    pool.close()
    assert threading.active_count() == before


# -- memory and names ----------------------------------------------------------------------


def test_out_of_memory_names_what_was_asked_and_what_is_free(device: SimDevice) -> None:
    with pytest.raises(OutOfDeviceMemory, match=r"'weights'.*needs 1 TiB; NVIDIA H200 has 140 GiB free"):
        device.buffer(1 << 40, "uint8", name="weights")
    with pytest.raises(OutOfDeviceMemory, match="pinned"):
        device.buffer(1 << 37, "uint8", "pinned")


def test_memory_is_given_back() -> None:
    device = SimDevice.open("t4")
    for _ in range(3):
        held = device.buffer(9_000_000_000, "uint8")
        with pytest.raises(OutOfDeviceMemory):
            device.buffer(9_000_000_000, "uint8")
        del held
        gc.collect()


def test_uploaded_arrays_are_read_only_views(device: SimDevice) -> None:
    weights = np.arange(6.0)
    there = device.upload({"w": weights})["w"]
    assert np.shares_memory(there, weights)
    assert weights.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        there[0] = 1


def test_its_repr_says_that_it_is_simulated_and_why() -> None:
    device = hl.open_device("sim:t4")
    assert repr(device).startswith("<simulated NVIDIA T4, costs datasheet estimate")
    assert "no GPU here" in repr(SimDevice.open("h200", why="no GPU here"))
    assert "measured" in repr(SimDevice.open("h200"))
    assert device.name == "NVIDIA T4 (datasheet estimate)"


def test_a_foreign_event_is_refused(device: SimDevice) -> None:
    cpu = hl.open_device("cpu")
    event = cpu.stream().record()
    with pytest.raises(InputError, match="not an event of this device"):
        device.stream().wait(event)
    cpu.close()


def test_parts_keep_memory_that_holds_no_values() -> None:
    device = SimDevice.open("h200", values=False)
    part = device.buffer(8)[0:4]
    gc.collect()
    assert device._taken[False] == 32, "a part keeps the whole allocation"
    del part
    gc.collect()
    assert device._taken[False] == 0


def test_values_that_this_machine_cannot_hold_are_no_bare_memory_error(
    device: SimDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def zeros(*args: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(np, "zeros", zeros)
        with pytest.raises(OutOfDeviceMemory, match=r"80 GiB fits.*cannot hold.*values=False"):
            device.buffer(80 << 30, "uint8")
    assert device._taken[False] == 0


def test_a_launch_refused_for_want_of_a_cost_has_touched_nothing(device: SimDevice) -> None:
    there, here = device.buffer(4), device.buffer(4, memory="pinned")
    unpriced = Kernel("odd", lambda xp, r, w: None, lambda r, w: Work(flops=1.0, dtype="float8"))
    with pytest.raises(ProfileError, match="float8"):
        device.stream().launch(unpriced, [], [there])
    device.stream().copy(here, there)


def test_a_refused_pageable_copy_has_touched_nothing(device: SimDevice) -> None:
    one, two = device.stream(), device.stream()
    here, there, back = (device.buffer(4, memory=m) for m in ("mapped", "device", "pinned"))
    here.memory = Memory.PAGEABLE  # written by a kernel, and staged by the host
    device.order.device_op(one.index, "a kernel", writes=[here])
    with pytest.raises(RaceError, match="a copy by the host"):
        two.copy(there, here)
    one.copy(back, there)


@pytest.mark.parametrize("options", [{"jitter": "x"}, {"seed": "x"}, {"seed": [1]}], ids=str)
def test_noise_is_given_as_numbers(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(InputError, match=f"{name}="):
        hl.open_device("sim:h200", **options)


# -- whatever the program ------------------------------------------------------------------

steps = st.one_of(
    st.tuples(st.just("h2d"), st.integers(0, 3), st.integers(1, 1 << 22), st.booleans()),
    st.tuples(st.just("d2h"), st.integers(0, 3), st.integers(1, 1 << 22), st.booleans()),
    st.tuples(st.just("spin"), st.integers(0, 3), st.integers(1, 3000), st.sampled_from([32, 256, 1024])),
    st.tuples(st.just("event"), st.integers(0, 3), st.integers(0, 3)),
    st.tuples(st.just("work"), st.integers(0, 50_000)),
    st.tuples(st.just("sync"), st.integers(0, 3)),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(steps, max_size=40), st.lists(st.booleans(), min_size=3, max_size=3))
def test_no_program_breaks_the_rules(program: list[tuple], kinds: list[bool]) -> None:
    """Streams keep their order, engines do one copy at a time, events hold, all of it ends."""
    device = SimDevice.open("h200", races="off", values=False)
    streams = [*(device.stream(non_blocking) for non_blocking in kinds), device.default_stream]
    device_memory = device.buffer(1 << 22, "uint8")
    host_memory = [device.buffer(1 << 22, "uint8", memory) for memory in ("pinned", "pageable")]
    chains: dict[int, list[int]] = {}  # stream → ops, in order; and what must end before what
    before: list[tuple[int, int]] = []
    pending: dict[int, list[int]] = {}
    for step, *args in program:
        stream = streams[args[0]] if step != "work" else None
        if step == "work":
            device.host.work(args[0])
        elif step == "sync":
            assert stream is not None
            stream.synchronize()
        elif step == "event":
            other = streams[args[1]]
            assert stream is not None
            other.wait(stream.record())
            behind = chains.get(args[0], [])[-1:] + pending.get(args[0], [])
            pending.setdefault(args[1], []).extend(behind)
        else:
            assert stream is not None
            if step == "spin":
                op = stream.launch(spin(10, args[1], args[2]))
            else:
                here, there = host_memory[args[2]].view(args[1]), device_memory.view(args[1])
                op = stream.copy(there, here) if step == "h2d" else stream.copy(here, there)
            before += [(other, op) for other in chains.get(args[0], [])[-1:] + pending.pop(args[0], [])]
            chains.setdefault(args[0], []).append(op)
    spans = {s.op: s for s in ops(device)}
    assert len(spans) == sum(map(len, chains.values())), "every op has ended"
    assert all(s.queued_ns <= s.start_ns <= s.end_ns for s in spans.values())
    assert all(spans[first].end_ns <= spans[then].start_ns for first, then in before)
    for kind in (H2D, D2H):
        lane = sorted((s.start_ns, s.end_ns) for s in spans.values() if s.kind == kind)
        assert all(end <= start for (_, end), (start, _) in pairwise(lane))
    host = sorted((s.start_ns, s.end_ns) for s in device.host.recorder.spans if s.lane == "host")
    assert all(end <= start for (_, end), (start, _) in pairwise(host))


def test_a_composite_launched_too_slowly_shows_the_gpu_idle_between_its_kernels() -> None:
    def composite(work_ns: int) -> list[Span]:
        machine = SimDevice.open("h200")
        kernel = Kernel(
            "many", lambda xp, r, w: None, lambda r, w: Work(block_ns=work_ns, blocks=1, launches=100)
        )
        op = machine.stream().launch(kernel)
        machine.synchronize()
        spans = [s for s in machine.host.recorder.spans if s.kind == KERNEL]
        assert {s.op for s in spans} == {op}
        return spans

    slow, fast = composite(50_000_000), composite(100_000)
    assert len(slow) == 1, "the GPU is busy all the time"
    work = sum(s.end_ns - s.start_ns for s in fast)
    assert work == pytest.approx(100_000, rel=0.01)
    assert fast[-1].end_ns - fast[0].start_ns > 5 * work
    assert all(a.end_ns <= b.start_ns for a, b in pairwise(fast))
