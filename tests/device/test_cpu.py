"""The CPU that plays the device: a GPU's rules, in real time."""

from __future__ import annotations

import sys
import threading
import time
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

from heterolab.device.base import Kernel, Work
from heterolab.device.cpu import CpuDevice, blas_threads
from heterolab.errors import InputError, RaceError
from heterolab.trace.trace import H2D, KERNEL


def nap(seconds: float) -> Kernel:
    return Kernel("nap", lambda xp, reads, writes: time.sleep(seconds), lambda reads, writes: Work())


def failing(message: str) -> Kernel:
    def run(xp, reads, writes):
        raise ValueError(message)

    return Kernel("failing", run, lambda reads, writes: Work())


def overlaps(spans) -> bool:
    rows = sorted(spans, key=lambda s: s.start_ns)
    return any(b.start_ns < a.end_ns for a, b in pairwise(rows))


def test_one_copy_a_direction_and_one_kernel_at_a_time(cpu_device: CpuDevice) -> None:
    streams = [cpu_device.stream() for _ in range(3)]
    here = [cpu_device.buffer(1 << 20, memory="pinned") for _ in streams]
    there = [cpu_device.buffer(1 << 20) for _ in streams]
    for _ in range(3):
        for stream, src, dst in zip(streams, here, there, strict=True):
            stream.copy(dst, src)
            stream.launch(nap(0.002))
    cpu_device.synchronize()
    for kind in (H2D, KERNEL):
        spans = [s for s in cpu_device.host.recorder.spans if s.kind == kind]
        assert len(spans) == 9
        assert not overlaps(spans)


def test_a_stream_does_not_hold_the_host_nor_another_stream(cpu_device: CpuDevice) -> None:
    host, busy, free = cpu_device.host, cpu_device.stream(), cpu_device.stream()
    here, there = cpu_device.buffer(1024, memory="pinned"), cpu_device.buffer(1024)
    start = host.now()
    busy.launch(nap(0.2))
    slow = busy.record()
    free.copy(there, here)
    assert host.now() - start < 100_000_000
    copied = free.record()
    assert host.wait_any([slow, copied]) == [copied]
    busy.synchronize()


def test_pinned_copies_return_at_once_and_pageable_ones_hold_the_host(cpu_device: CpuDevice) -> None:
    host, stream = cpu_device.host, cpu_device.stream()
    there = cpu_device.buffer(1024)
    held = {}
    for memory in ("pinned", "pageable"):
        here = cpu_device.buffer(1024, memory=memory)
        stream.launch(nap(0.1))
        start = host.now()
        stream.copy(here, there)
        held[memory] = host.now() - start
        stream.synchronize()
    assert held["pinned"] < 50_000_000
    assert held["pageable"] >= 90_000_000


def test_a_span_tells_what_it_waited_for(cpu_device: CpuDevice) -> None:
    first, second = cpu_device.stream(), cpu_device.stream()
    slow = first.launch(nap(0.02))
    second.wait(first.record())
    after = second.launch(nap(0))
    second.synchronize()
    alone = second.launch(nap(0))
    second.synchronize()
    spans = {s.op: s for s in cpu_device.host.recorder.spans if s.kind == KERNEL}
    assert spans[after].after == slow
    assert spans[alone].after == -1, "nothing was under way"


def test_a_failure_is_told_to_the_first_who_asks_and_only_to_him(cpu_device: CpuDevice) -> None:
    stream = cpu_device.stream()
    before = stream.record()
    stream.launch(failing("first"))
    told, later = stream.record(), stream.record()
    cpu_device.host.wait_any([later])
    before.result()
    for _ in range(2):
        with pytest.raises(ValueError, match="first") as caught:
            told.result()
    assert "failing" in "".join(caught.value.__notes__)
    later.result()
    stream.synchronize()
    stream.launch(failing("second"))
    with pytest.raises(ValueError, match="second"):
        stream.synchronize()
    stream.synchronize()


def test_synchronize_of_the_device_tells_failures_of_any_stream(cpu_device: CpuDevice) -> None:
    one, two = cpu_device.stream(), cpu_device.stream()
    one.launch(nap(0))
    two.launch(failing("in the second stream"))
    with pytest.raises(ValueError, match="in the second stream"):
        cpu_device.synchronize()
    cpu_device.synchronize()


def test_the_default_stream_is_a_barrier_for_blocking_streams_only(cpu_device: CpuDevice) -> None:
    blocking, free = cpu_device.stream(non_blocking=False), cpu_device.stream()
    order: list[str] = []

    def note(name: str, seconds: float = 0) -> Kernel:
        def run(xp, reads, writes):
            time.sleep(seconds)
            order.append(name)

        return Kernel(name, run, lambda reads, writes: Work())

    blocking.launch(note("blocking before", 0.05))
    cpu_device.default_stream.launch(note("default"))
    blocking.launch(note("blocking after"))
    cpu_device.synchronize()
    assert order == ["blocking before", "default", "blocking after"]

    order.clear()
    here, there = cpu_device.buffer(16, memory="pinned"), cpu_device.buffer(16)
    cpu_device.default_stream.launch(note("default", 0.1))
    free.copy(there, here)
    done = free.record()
    cpu_device.host.wait_any([done])
    assert order == [], "a non-blocking stream does not wait for the default stream"
    cpu_device.synchronize()


def test_races_are_off_unless_asked_for() -> None:
    for races in ("off", "raise"):
        device = CpuDevice.open(races=races)
        first, second = device.stream(), device.stream()
        here, there = device.buffer(16, memory="pinned"), device.buffer(16)
        first.copy(there, here)
        if races == "off":
            second.copy(here, there)
        else:
            with pytest.raises(RaceError, match="missing event"):
                second.copy(here, there)
        device.synchronize()
        device.close()


def test_the_order_check_sees_events_and_synchronisation() -> None:
    device = CpuDevice.open(races="raise")
    first, second = device.stream(), device.stream()
    here, there, back = (
        device.buffer(16, memory="pinned"),
        device.buffer(16),
        device.buffer(16, memory="pinned"),
    )
    here.write()[:] = 1
    first.copy(there, here)
    second.wait(first.record())
    second.copy(back, there)
    done = second.record()
    with pytest.raises(RaceError, match="read"):
        back.read()
    device.host.wait_any([done])
    assert back.read()[0] == 1
    second.copy(back, there)
    second.synchronize()
    here.write()[:] = 2
    device.close()


def test_streams_have_a_limit(cpu_device: CpuDevice) -> None:
    for _ in range(cpu_device.limits.streams):
        cpu_device.stream()
    with pytest.raises(InputError, match="128"):
        cpu_device.stream()


def test_close_ends_all_threads() -> None:
    before = set(threading.enumerate())
    device = CpuDevice.open()
    for _ in range(3):
        device.stream().launch(nap(0))
    assert set(threading.enumerate()) - before
    device.close()
    assert not set(threading.enumerate()) - before


def test_two_devices_share_one_clock() -> None:
    one = CpuDevice.open()
    two = CpuDevice.open(host=one.host)
    assert (one.index, two.index) == (0, 1)
    with pytest.raises(InputError, match="another device"):
        one.stream().copy(one.buffer(4, memory="pinned"), two.buffer(4))
    two.close()
    one.close()


def test_it_says_what_it_is(cpu_device: CpuDevice) -> None:
    import platform

    asked = CpuDevice.open(why="asked for by name")
    assert "asked for by name" in repr(asked)
    asked.close()
    assert cpu_device.source == "cpu-clock"
    assert cpu_device.name.startswith("CPU (")
    assert platform.node() not in f"{cpu_device.name}{cpu_device.meta()}"


def test_blas_is_held_to_one_thread_while_the_device_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []

    def limits(count, user_api):
        told.append((count, user_api))
        return SimpleNamespace(restore_original_limits=lambda: told.append("restored"))

    monkeypatch.setitem(sys.modules, "threadpoolctl", SimpleNamespace(threadpool_limits=limits))
    device = CpuDevice.open()
    assert device.meta()["blas_threads"] == "1"
    device.close()
    device.close()
    assert told == [(1, "blas"), "restored"]


def test_without_threadpoolctl_the_trace_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "threadpoolctl", None)
    for name in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    device = CpuDevice.open()
    assert device.meta()["blas_threads"] == "not limited"
    device.close()
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    assert blas_threads(limited=False) == "1 (environment)"


def test_weights_are_not_copied(cpu_device: CpuDevice) -> None:
    weights = np.ones(4, np.float32)
    assert cpu_device.upload({"w": weights})["w"] is weights
