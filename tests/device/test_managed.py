"""Managed memory: pages move to where they are touched, and whoever touches them waits."""

from __future__ import annotations

import dataclasses
import gc
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import fake_cupy
import numpy as np
import pytest

import heterolab as hl
from heterolab.device import cuda
from heterolab.device.base import Buffer, Device, Kernel, Work
from heterolab.device.cuda import CudaDevice
from heterolab.device.profile import DeviceProfile, Managed
from heterolab.device.sim import SimDevice
from heterolab.errors import InputError, OutOfDeviceMemory, ProfileError, RaceError
from heterolab.trace.trace import D2H, H2D, KERNEL, Span

H200 = DeviceProfile.load("h200")
assert H200.managed is not None
COSTS: Managed = H200.managed
MIB = 1 << 20


def reader(us: float = 0.001) -> Kernel:
    """A kernel that adds one to what it is given."""

    def run(xp: Any, reads: Any, writes: Any) -> None:
        writes[0][...] = writes[0] + 1

    return Kernel("add one", run, lambda reads, writes: Work(block_ns=round(us * 1000), blocks=1))


def machine(**changes: Any) -> SimDevice:
    return SimDevice.open(dataclasses.replace(H200, managed=dataclasses.replace(COSTS, **changes)))


@pytest.fixture
def device() -> SimDevice:
    return SimDevice.open("h200")


def managed(device: Device, nbytes: int = 64 * MIB) -> Buffer:
    return device.buffer(nbytes // 4, "float32", "managed")


def touch(device: SimDevice, buffer: Buffer) -> int:
    """How long a short kernel takes that touches the buffer."""
    device.stream().launch(reader(), [], [buffer])
    device.synchronize()
    return length(spans(device, KERNEL)[-1])


def spans(device: SimDevice, *kinds: str) -> list[Span]:
    return sorted((s for s in device.host.recorder.spans if s.kind in kinds), key=lambda s: s.op)


def length(span: Span) -> int:
    return span.end_ns - span.start_ns


def test_the_first_touch_faults_and_the_second_is_free(device: SimDevice) -> None:
    buffer = managed(device)
    assert touch(device, buffer) == pytest.approx(11.118e6, rel=0.01), "as measured: 64 MiB by faults"
    assert touch(device, buffer) < 10_000


def test_faults_are_slower_than_a_pinned_copy(device: SimDevice) -> None:
    assert touch(device, managed(device)) > 5 * H200.copies.h2d.at(64 * MIB)


def test_a_prefetch_recovers_most_of_it(device: SimDevice) -> None:
    buffer, stream = managed(device), device.stream()
    stream.prefetch(buffer)
    stream.launch(reader(), [], [buffer])
    stream.synchronize()
    (move,) = spans(device, H2D)
    assert (move.name, move.bytes) == ("prefetch", 64 * MIB)
    assert length(move) == pytest.approx(1.421e6, rel=0.01), "as measured"
    assert length(spans(device, KERNEL)[0]) < 10_000


def test_a_prefetch_holds_nobody_and_moves_only_what_is_elsewhere(device: SimDevice) -> None:
    buffer, stream = managed(device), device.stream()
    touch(device, buffer[: buffer.shape[0] // 2])
    before = device.host.now()
    stream.prefetch(buffer)
    assert device.host.now() - before < 20_000
    stream.prefetch(buffer)
    stream.prefetch(buffer, to="host")
    stream.synchronize()
    assert [s.bytes for s in spans(device, H2D, D2H)] == [32 * MIB, 0, 64 * MIB]
    assert length(spans(device, H2D)[1]) == 0


def test_only_the_groups_that_are_touched_move(device: SimDevice) -> None:
    buffer = managed(device)
    one = touch(device, buffer[:1])
    assert one == pytest.approx(COSTS.fault_ns + COSTS.group_bytes / COSTS.bytes_per_ns, abs=1000)
    assert touch(device, buffer[:2]) < one / 5, "the same group"
    across = buffer[COSTS.group_bytes // 4 * 3 - 1 : COSTS.group_bytes // 4 * 3 + 1]
    assert touch(device, across) == pytest.approx(2 * one, abs=2000)


def test_the_host_is_held_while_pages_come_back(device: SimDevice) -> None:
    buffer = managed(device)
    buffer.write()[:] = 1
    assert device.host.now() == 0, "they are there already"
    touch(device, buffer)
    before = device.host.now()
    assert (buffer.read() == 2).all()
    assert device.host.now() - before == pytest.approx(11.1e6, rel=0.01)
    (migration,) = [s for s in device.host.recorder.spans if s.name == "migrate"]
    assert length(migration) == device.host.now() - before


def test_ping_pong_costs_each_time(device: SimDevice) -> None:
    buffer, times = managed(device), []
    for _ in range(3):
        times.append(touch(device, buffer))
        before = device.host.now()
        buffer.write()[:] = 0
        times.append(device.host.now() - before)
    assert min(times) > 10e6


def test_the_way_back_has_a_price_of_its_own_where_it_was_measured() -> None:
    device = machine(host_fault_ns=0.0)
    buffer = managed(device)
    touch(device, buffer)
    before = device.host.now()
    buffer.read()
    assert device.host.now() - before == pytest.approx(64 * MIB / COSTS.bytes_per_ns, rel=0.001)


def test_a_kernel_shares_the_link_with_copies_while_it_faults(device: SimDevice) -> None:
    buffer = managed(device)
    here, there = device.buffer(64 * MIB, "uint8", "pinned"), device.buffer(64 * MIB, "uint8")
    device.stream().launch(reader(), [], [buffer])
    device.stream().copy(there, here)
    device.synchronize()
    (copy,) = spans(device, H2D)
    assert length(copy) > 1.2 * H200.copies.h2d.at(64 * MIB)


def test_pages_move_when_an_op_runs_and_not_when_it_is_issued(device: SimDevice) -> None:
    buffer, stream = managed(device), device.stream()
    stream.launch(reader(us=1000), [], [managed(device, 4)])
    stream.prefetch(buffer)
    stream.launch(reader(), [], [buffer])
    assert device.managed is not None
    assert device.managed.touched_by_host_ns(buffer) == 0
    stream.synchronize()
    assert device.managed.touched_by_host_ns(buffer) > 0


def test_an_access_that_nothing_orders_is_a_race(device: SimDevice) -> None:
    buffer, stream = managed(device), device.stream()
    stream.launch(reader(), [], [buffer])
    with pytest.raises(RaceError, match="a read by the host"):
        buffer.read()
    stream.synchronize()
    assert (buffer.read() == 1).all()
    stream.launch(reader(), [], [buffer])
    with pytest.raises(RaceError, match="stream 1 writes"):
        device.stream().launch(reader(), [], [buffer])


def test_a_gpu_that_cannot_fault() -> None:
    """All managed memory goes to it before each kernel, and the host must leave it alone then."""
    device = machine(concurrent=False)
    one, other = managed(device), managed(device)
    move = 64 * MIB / COSTS.bytes_per_ns
    assert touch(device, one) == pytest.approx(2 * move, rel=0.01)
    other.read()
    device.stream().launch(reader(us=100), [], [one])
    with pytest.raises(RaceError, match=r"while NVIDIA H200 works.*synchronize"):
        other.read()
    device.synchronize()
    other.read()
    with pytest.raises(InputError, match="concurrentManagedAccess"):
        device.stream().prefetch(one)


def test_it_must_fit_the_device() -> None:
    limits = dataclasses.replace(H200.limits, memory_bytes=10**6)
    device = SimDevice.open(dataclasses.replace(H200, limits=limits))
    held = device.buffer(600_000, "uint8", "managed")
    with pytest.raises(OutOfDeviceMemory, match=r"managed memory needs 488 KiB.*391 KiB free of 977"):
        device.buffer(500_000, "uint8", "managed")
    with pytest.raises(OutOfDeviceMemory):
        device.buffer(500_000, "uint8")
    del held
    gc.collect()
    device.buffer(500_000, "uint8", "managed")


def test_a_profile_without_its_costs_says_what_would_measure_them() -> None:
    with pytest.raises(ProfileError, match=r"no costs of managed memory.*heterolab calibrate"):
        SimDevice.open("t4").buffer(4, memory="managed")


def test_one_memory_for_cpu_and_gpu_has_no_faults() -> None:
    device = SimDevice.open("one_memory")
    buffer = managed(device)
    assert touch(device, buffer) < 10_000


def test_what_managed_memory_is_not_for(device: SimDevice) -> None:
    buffer, there = managed(device, 64), device.buffer(16)
    with pytest.raises(InputError, match=r"managed memory is not copied.*prefetch"):
        device.stream().copy(there, buffer)
    with pytest.raises(InputError, match="only the pages of managed memory"):
        device.stream().prefetch(there)
    with pytest.raises(InputError, match="'disk'"):
        device.stream().prefetch(buffer, to="disk")


@pytest.mark.parametrize("name", ["cpu", "sim:h200"])
def test_values_are_the_same_on_every_device(name: str) -> None:
    device = hl.open_device(name, races="raise")
    buffer, stream = device.buffer(4, "float32", "managed"), device.stream()
    buffer.write()[:] = [1, 2, 3, 4]
    stream.prefetch(buffer)
    stream.launch(reader(), [], [buffer])
    stream.prefetch(buffer, to="host")
    stream.synchronize()
    assert buffer.read().tolist() == [2, 3, 4, 5]
    device.close()


@pytest.mark.parametrize("name", ["cpu", "sim:h200"])
def test_a_pipeline_gives_the_same_answers_from_managed_memory(name: str) -> None:
    answers = {}
    for memory in ("pinned", "managed"):
        device = hl.open_device(name)
        pipeline = hl.Pipeline(hl.models.encoder(), batch=4, memory=memory)
        run = pipeline.run(hl.poisson(rate=500, n=8, seed=3), on=device)
        answers[memory] = [answer.answer for answer in run.answers]
        kinds = set(run.trace.columns["kind"].tolist())
        assert (H2D in kinds) == (memory == "pinned")
        device.close()
    assert answers["managed"] == answers["pinned"]


# -- CUDA's own ----------------------------------------------------------------------------


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaDevice]:
    """A CUDA device over a pretended CuPy that has managed memory."""
    cupy = fake_cupy.make()
    runtime = cupy.cuda.runtime
    blocks = []

    def malloc(size: int) -> Any:
        blocks.append(np.ones(size, np.uint8))
        return SimpleNamespace(ptr=blocks[-1].__array_interface__["data"][0])

    def prefetch(pointer: int, size: int, device: int, stream: int) -> None:
        runtime.calls.append(("memPrefetchAsync", pointer, size, device, stream))

    runtime.concurrent = 1
    runtime.deviceGetAttribute = lambda attribute, device: runtime.concurrent if attribute == 89 else 0
    runtime.memPrefetchAsync = prefetch
    cupy.cuda.malloc_managed = malloc
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(cuda, "why_not", lambda: "")
    device = CudaDevice.open(races="raise", spans="events")
    yield device
    device.close()


def test_managed_memory_makes_cudas_calls(pretended: CudaDevice) -> None:
    buffer, stream = pretended.buffer((2, 4), "float32", "managed"), pretended.stream()
    assert (buffer.read() == 0).all()
    buffer.write()[:] = 1
    first, then = stream.prefetch(buffer), stream.prefetch(buffer[1:], to="host", batch=3)
    calls = [call[1:] for call in pretended.runtime.calls if call[0] == "memPrefetchAsync"]
    assert calls == [(buffer.address, 32, 0, stream.ptr), (buffer.address + 16, 16, -1, stream.ptr)]
    told = [s for s in pretended.host.recorder.spans if s.name == "prefetch"]
    assert [(s.op, s.kind, s.batch) for s in told] == [(first, "api", -1), (then, "api", 3)]
    assert pretended.array(buffer).values.tolist() == buffer.read().tolist()
    with pytest.raises(InputError, match="managed memory is not copied"):
        stream.copy(pretended.buffer((2, 4)), buffer)


def test_a_gpu_where_the_host_must_not_touch_it_offers_none(pretended: CudaDevice) -> None:
    pretended.runtime.concurrent = 0
    with pytest.raises(InputError, match=r"concurrentManagedAccess is 0.*pinned or mapped"):
        pretended.buffer(4, memory="managed")


def test_managed_memory_beyond_the_gpus_is_refused(pretended: CudaDevice) -> None:
    with pytest.raises(OutOfDeviceMemory, match="free of"):
        pretended.buffer(fake_cupy.MEMORY + 1, "uint8", "managed")
    pretended.cupy.cuda.malloc_managed = full
    with pytest.raises(OutOfDeviceMemory, match="CUDA does not give"):
        pretended.buffer(4, memory="managed")


def full(size: int) -> Any:
    raise fake_cupy.OutOfMemoryError("no more")


@pytest.mark.gpu
def test_on_a_gpu_a_prefetch_beats_faults() -> None:
    device = hl.open_device("cuda")
    kernel = Kernel(
        "add one", lambda xp, r, w: xp.add(w[0], 1, out=w[0]), lambda r, w: Work(bytes=w[0].nbytes)
    )
    buffer, stream = device.buffer(16 * MIB, "float32", "managed"), device.stream()
    times = {}
    for how in ("warm", "faults", "prefetch"):
        buffer.write()[:] = 1
        before = device.host.now()
        if how == "prefetch":
            stream.prefetch(buffer)
        stream.launch(kernel, [], [buffer])
        stream.synchronize()
        times[how] = device.host.now() - before
        assert (buffer.read() == 2).all()
    assert times["faults"] > 2 * times["prefetch"]
    device.close()
