"""The seam, as anything built on it sees it: the same tests on every device."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

import heterolab as hl
from heterolab.device.base import Device, Kernel, Memory, Stream, Work
from heterolab.errors import InputError, OutOfDeviceMemory
from heterolab.trace.trace import API, D2H, DEVICE_KINDS, H2D, HOST_KINDS, KERNEL

HOST_MEMORY = [Memory.PAGEABLE, Memory.PINNED, Memory.MAPPED]


@pytest.fixture(params=["sim:h200", "cpu"])
def simulated_or_cpu(request: pytest.FixtureRequest) -> Iterator[Device]:
    """The devices whose kernels run, and so fail, after their launch has returned."""
    device = hl.open_device(request.param)
    yield device
    device.close()


def kernel(name, run) -> Kernel:
    """A kernel that costs one flop a written element."""
    return Kernel(name, run, lambda reads, writes: Work(flops=sum(len(b) for b in writes), bytes=16))


def _double(xp, reads, writes):
    xp.multiply(reads[0], 2, out=writes[0])


def _fail(xp, reads, writes):
    raise ZeroDivisionError("a kernel that fails")


DOUBLE, FAIL = kernel("double", _double), kernel("fail", _fail)


def wait(device: Device, stream: Stream) -> None:
    event = stream.record()
    assert device.host.wait_any([event]) == [event]
    event.result()


def test_copy_launch_copy_back(device: Device) -> None:
    stream = device.stream()
    here, there, result, back = (
        device.buffer(1000, memory=m) for m in ("pinned", "device", "device", "pinned")
    )
    here.write()[:] = np.arange(1000)
    stream.copy(there, here)
    stream.launch(DOUBLE, [there], [result])
    stream.copy(back, result)
    wait(device, stream)
    np.testing.assert_array_equal(back.read(), 2 * np.arange(1000, dtype=np.float32))


@pytest.mark.parametrize("memory", HOST_MEMORY, ids=lambda m: m.value)
def test_every_host_memory_carries_values_both_ways(device: Device, memory: Memory) -> None:
    stream = device.stream()
    here, back = device.buffer((4, 5), "int32", memory), device.buffer((4, 5), "int32", memory)
    there = device.buffer((4, 5), "int32")
    here.write()[:] = np.arange(20).reshape(4, 5)
    stream.copy(there, here)
    stream.copy(back, there)
    wait(device, stream)
    np.testing.assert_array_equal(back.read(), np.arange(20).reshape(4, 5))


def test_kernels_read_and_write_mapped_memory(device: Device) -> None:
    stream = device.stream()
    here, there = device.buffer(64, memory="mapped"), device.buffer(64, memory="mapped")
    here.write()[:] = 3
    stream.launch(DOUBLE, [here], [there])
    wait(device, stream)
    np.testing.assert_array_equal(there.read(), np.full(64, 6, np.float32))


def test_slices_and_views_share_the_bytes(device: Device) -> None:
    stream = device.stream()
    whole, there = device.buffer((6, 3), memory="pinned"), device.buffer((6, 3))
    whole.write()[:] = 1
    stream.copy(there, whole)
    wait(device, stream)
    whole[2:4].write()[:] = 9
    stream.copy(there[2:4], whole[2:4])
    stream.launch(DOUBLE, [there[0:1]], [there[5:6]])
    stream.copy(whole.view(3, 6), there.view(3, 6))
    wait(device, stream)
    assert whole.read()[:, 0].tolist() == [1, 1, 9, 9, 1, 2]


def test_a_copy_inside_the_device(device: Device) -> None:
    stream = device.stream()
    here, one, two = (device.buffer(8, memory=m) for m in ("pinned", "device", "device"))
    here.write()[:] = 5
    stream.copy(one, here)
    stream.copy(two, one)
    back = device.buffer(8, memory="pinned")
    stream.copy(back, two)
    wait(device, stream)
    assert back.read().tolist() == [5] * 8


def test_an_event_orders_two_streams(device: Device) -> None:
    first, second = device.stream(), device.stream()
    here, there, result, back = (
        device.buffer(1 << 20, memory=m) for m in ("pinned", "device", "device", "pinned")
    )
    here.write()[:] = 21
    first.copy(there, here)
    copied = first.record()
    second.wait(copied)
    launched = second.launch(DOUBLE, [there], [result])
    second.copy(back, result)
    wait(device, second)
    device.collect()
    spans = {s.op: s for s in device.host.recorder.spans if s.kind in DEVICE_KINDS}
    (copy,) = [s for s in spans.values() if s.kind == H2D]
    assert spans[launched].start_ns >= copy.end_ns - 2_000  # CUDA events resolve about 1 µs
    assert back.read()[0] == back.read()[-1] == 42


def test_the_default_stream_waits_for_blocking_streams_and_they_for_it(device: Device) -> None:
    blocking = device.stream(non_blocking=False)
    here, there, result, back = (
        device.buffer(1 << 18, memory=m) for m in ("pinned", "device", "device", "pinned")
    )
    here.write()[:] = 4
    blocking.copy(there, here)
    device.default_stream.launch(DOUBLE, [there], [result])
    blocking.copy(back, result)
    wait(device, blocking)
    assert back.read()[-1] == 8


def test_synchronize_holds_the_host(device: Device) -> None:
    stream = device.stream()
    here, there, back = (device.buffer(1 << 18, memory=m) for m in ("pinned", "device", "pinned"))
    here.write()[:] = 7
    stream.copy(there, here)
    stream.copy(back, there)
    stream.synchronize()
    assert back.read()[-1] == 7
    event = stream.record()
    device.synchronize()
    assert event.done


def test_after_a_pageable_copy_the_host_may_touch_its_side_at_once(device: Device) -> None:
    stream = device.stream()
    here, there = device.buffer(64, memory="pageable"), device.buffer(64)
    here.write()[:] = 5
    stream.copy(there, here)
    here.write()[:] = 0
    stream.copy(here, there)
    assert here.read().tolist() == [5] * 64


def test_wait_any_sleeps_until_the_time_asked_for(device: Device) -> None:
    host = device.host
    until = host.now() + 3_000_000
    assert host.wait_any([], until=until) == []
    assert host.now() >= until
    assert host.wait_any([], until=0) == [], "a time gone by is no reason to wait"


def test_wait_any_gives_what_is_done_of_futures_and_events(device: Device) -> None:
    host, stream = device.host, device.stream()
    pool = host.pool(1)
    here, there = device.buffer(1024, memory="pinned"), device.buffer(1024)
    here.write()[:] = 1
    stream.copy(there, here)
    event = stream.record()
    job = pool.submit("batch", sum, [1, 2, 3], size=3)
    open_waits, seen = [job, event], []
    while open_waits:
        done = host.wait_any(open_waits)
        assert done
        seen += done
        open_waits = [w for w in open_waits if w not in done]
    pool.close()
    assert len(seen) == 2
    assert job.result() == 6
    assert event.result() is None


def test_call_runs_here_and_a_pool_beside(device: Device) -> None:
    host = device.host
    assert host.call("batch", max, 4, 9, size=2, batch=3) == 9
    pool = host.pool(2)
    jobs = [pool.submit("batch", pow, 2, n, size=1) for n in range(6)]
    while not all(job.done for job in jobs):
        host.wait_any([job for job in jobs if not job.done])
    pool.close()
    assert [job.result() for job in jobs] == [1, 2, 4, 8, 16, 32]
    lanes = {s.lane for s in host.recorder.spans if s.kind == "cpu"}
    assert "host" in lanes
    assert lanes - {"host"} <= {"worker 0", "worker 1"}
    assert lanes - {"host"}
    (call,) = [s for s in host.recorder.spans if s.lane == "host" and s.kind == "cpu"]
    assert (call.name, call.batch) == ("batch", 3)


def test_a_failing_job_raises_at_its_result_only(device: Device) -> None:
    host = device.host
    pool = host.pool(1)
    job = pool.submit("batch", int, "not a number")
    assert host.wait_any([job]) == [job]
    with pytest.raises(ValueError, match="not a number"):
        job.result()
    after = pool.submit("batch", int, "7")
    assert host.wait_any([after]) == [after]
    assert after.result() == 7
    pool.close()


def test_a_failing_call_raises_and_is_on_the_timeline(device: Device) -> None:
    with pytest.raises(ValueError, match="not a number"):
        device.host.call("batch", int, "not a number")
    assert [s.name for s in device.host.recorder.spans if s.kind == "cpu"] == ["batch"]


def test_a_failing_kernel_is_told_once_and_the_stream_goes_on(device: Device) -> None:
    stream = device.stream()
    there = device.buffer(4)

    def fail() -> None:
        stream.launch(FAIL, [], [there])
        event = stream.record()
        device.host.wait_any([event])
        event.result()

    with pytest.raises(ZeroDivisionError, match="a kernel that fails"):
        fail()
    stream.synchronize()
    back = device.buffer(4, memory="pinned")
    stream.launch(kernel("ones", lambda xp, reads, writes: writes[0].fill(1)), [], [there])
    stream.copy(back, there)
    wait(device, stream)
    assert back.read().tolist() == [1] * 4


def failing(message: str) -> Kernel:
    def run(xp, reads, writes):
        raise ValueError(message)

    return kernel(message, run)


def told(ask) -> str:
    """The failure that is told, or nothing."""
    try:
        ask()
    except ValueError as error:
        return str(error)
    return ""


def test_synchronize_tells_a_failure_once_and_no_old_one_hides_a_new_one(simulated_or_cpu: Device) -> None:
    device = simulated_or_cpu
    stream = device.stream()
    for message in ("first", "second"):
        stream.launch(failing(message))
        asked = [told(ask) for ask in (device.synchronize, device.synchronize, stream.synchronize)]
        assert asked == [message, "", ""]
    after = stream.record()
    device.host.wait_any([after])
    after.result()


def test_each_of_two_batches_that_fail_tells_its_own_failure(simulated_or_cpu: Device) -> None:
    device = simulated_or_cpu
    stream, events = device.stream(), []
    for messages in (["one", "one more"], ["two"], []):
        for message in messages:
            stream.launch(failing(message))
        stream.launch(DOUBLE, [device.buffer(4)], [device.buffer(4)])
        events.append(stream.record())
    device.host.wait_any(events[-1:])
    assert told(events[0].result) == "one"
    assert told(stream.synchronize) == "two", "the pipeline frees a failed batch's slot like this"
    assert [told(event.result) for event in events] == ["one", "two", ""]


def test_an_event_asked_first_hides_no_failure_from_an_earlier_one(simulated_or_cpu: Device) -> None:
    stream = simulated_or_cpu.stream()
    stream.launch(failing("one"))
    first, second = stream.record(), stream.record()
    simulated_or_cpu.host.wait_any([second])
    assert told(second.result) == told(first.result) == "one"
    assert told(stream.synchronize) == ""


def test_wake_ends_a_wait(device: Device) -> None:
    host = device.host
    if device.source == "simulated":
        # Nothing runs beside a virtual clock, so there is nobody to call it; it must be harmless.
        host.wake()
        assert host.wait_any([], until=host.now() + 1000) == []
        return
    timer = threading.Timer(0.02, host.wake)
    timer.start()
    assert host.wait_any([]) == []
    timer.join()


def test_spawn_runs_the_steps_and_raises_what_they_raise(device: Device) -> None:
    steps = iter([True, True, False])
    loop = device.host.spawn(lambda: next(steps))
    assert loop.join(timeout_s=5)
    assert loop.done
    assert list(steps) == []

    def fail() -> bool:
        raise RuntimeError("the step failed")

    # A host with no threads has run the steps when spawn returns, so it may raise there already.
    with pytest.raises(RuntimeError, match="the step failed"):
        device.host.spawn(fail).join()


def test_an_allocation_beyond_the_limit_is_refused(device: Device) -> None:
    huge = device.limits.memory_bytes // 4 + 1
    with pytest.raises(OutOfDeviceMemory, match="huge"):
        device.buffer(huge * 2, "float32", name="huge")
    with pytest.raises(OutOfDeviceMemory):
        device.buffer(device.limits.pinned_bytes + 1, "uint8", "pinned")
    assert device.buffer(16).nbytes == 64, "and what fits is still given"


def test_memory_that_is_dropped_can_be_had_again(device: Device) -> None:
    device.limits = replace(device.limits, pinned_bytes=1 << 20)
    for _ in range(20):
        part = device.buffer(1 << 19, "uint8", "pinned", name="part")[: 1 << 18]
        part.write()[:] = 1
    with pytest.raises(OutOfDeviceMemory):
        device.buffer(3 << 18, "uint8", "pinned")
    assert part.read().all(), "a slice keeps the whole allocation"


@pytest.mark.parametrize("shape", [0, (4, 0), -1, (2.5,), "many"])
def test_shapes_that_are_none(device: Device, shape: object) -> None:
    with pytest.raises(InputError):
        device.buffer(shape)


def test_the_host_cannot_touch_device_memory(device: Device) -> None:
    there = device.buffer(4, name="weights")
    with pytest.raises(InputError, match=r"weights.*Copy it to a host buffer"):
        there.read()
    with pytest.raises(InputError, match="weights"):
        there.write()


def test_copies_that_make_no_sense_are_refused(device: Device) -> None:
    stream = device.stream()
    with pytest.raises(InputError, match="same size"):
        stream.copy(device.buffer(4), device.buffer(5, memory="pinned"))
    with pytest.raises(InputError, match="host"):
        stream.copy(device.buffer(4, memory="pinned"), device.buffer(4, memory="pageable"))


@pytest.mark.parametrize("memory", ["pageable", "pinned"])
def test_kernels_cannot_reach_ordinary_host_memory(device: Device, memory: str) -> None:
    with pytest.raises(InputError, match="double"):
        device.stream().launch(DOUBLE, [device.buffer(4, memory=memory)], [device.buffer(4)])


def test_what_is_no_buffer_is_refused(device: Device) -> None:
    stream, there = device.stream(), device.buffer(4)
    for other in (None, np.zeros(4, np.float32)):
        with pytest.raises(InputError, match=r"not a buffer.*Make one"):
            stream.copy(there, other)
        with pytest.raises(InputError, match="not a buffer"):
            stream.launch(DOUBLE, [other], [there])


def test_a_kernel_that_was_not_made_is_refused(device: Device) -> None:
    def vector_add() -> Kernel:
        return DOUBLE

    with pytest.raises(InputError, match=r"Call it: stream\.launch\(vector_add\(\)"):
        device.stream().launch(vector_add, [], [device.buffer(4)])
    with pytest.raises(InputError, match="not a kernel"):
        device.stream().launch("double", [], [device.buffer(4)])


@pytest.mark.parametrize("count", [-1, 1.5, "2"])
def test_numbers_of_streams_that_are_none(device: Device, count: object) -> None:
    with pytest.raises(InputError, match="streams"):
        device.streams(count)


@pytest.mark.parametrize("shape", [(-1,), (2, -1), (2.0,), ((2, 2),)], ids=str)
def test_views_that_make_no_sense_are_refused(device: Device, shape: tuple) -> None:
    with pytest.raises(InputError, match="view"):
        device.buffer(8).view(*shape)


def test_an_event_of_another_device_is_refused(device: Device) -> None:
    other = hl.open_device("sim:h200")
    with pytest.raises(InputError, match=r"not an event of this device.*wait_any"):
        device.stream().wait(other.stream().record())
    with pytest.raises(InputError, match="None is not an event"):
        device.stream().wait(None)


def test_an_option_that_there_is_not_is_refused_with_those_there_are() -> None:
    with pytest.raises(InputError, match=r"seeds=.*It has: races, seed, jitter, values"):
        hl.open_device("sim:h200", seeds=1)
    with pytest.raises(InputError, match=r"seed=.*It has: races"):
        hl.open_device("cpu", seed=3)
    with pytest.raises(InputError, match="why="):
        hl.open_device("cpu", why="")
    for number in (5, 0):
        with pytest.raises(InputError, match=f"device='{number}' is not known"):
            hl.open_device(number)


def test_spans_say_what_happened_in_order(device: Device) -> None:
    stream = device.stream()
    here, there, back = (device.buffer(4096, memory=m) for m in ("pinned", "device", "pinned"))
    here.write()[:] = 1
    ops = [
        stream.copy(there, here, batch=5),
        stream.launch(DOUBLE, [there], [there], batch=5),
        stream.copy(back, there, batch=5),
    ]
    wait(device, stream)
    device.collect()
    spans = device.host.recorder.spans
    assert all(s.queued_ns <= s.start_ns <= s.end_ns for s in spans)
    by_op = {s.op: s for s in spans if s.kind in DEVICE_KINDS}
    assert [by_op[op].kind for op in ops] == [H2D, KERNEL, D2H]
    assert [by_op[op].lane for op in ops] == ["h2d", "gpu", "d2h"]
    assert by_op[ops[1]].name == "double"
    assert by_op[ops[0]].bytes == 4096 * 4
    for op in ops:
        span = by_op[op]
        assert (span.stream, span.device, span.batch) == (stream.index, device.index, 5)
        (call,) = [s for s in spans if s.kind == API and s.op == op]
        assert call.lane == "host"
        assert call.start_ns <= span.start_ns
    host = sorted((s.start_ns, s.end_ns) for s in spans if s.kind in HOST_KINDS and s.lane == "host")
    assert all(end <= start for (_, end), (start, _) in pairwise(host)), "the host does one thing at a time"


def test_a_closed_device_says_so() -> None:
    device = hl.open_device("cpu")
    stream = device.stream()
    device.close()
    device.close()
    with pytest.raises(InputError, match="closed"):
        stream.record()
    with pytest.raises(InputError, match="closed"):
        device.buffer(4)
