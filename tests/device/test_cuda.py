"""CUDA: the probe, the checks and the spans without a GPU; on one, what only a GPU can show."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import fake_cupy
import numpy as np
import pytest

import heterolab as hl
from heterolab.device import cuda
from heterolab.device.base import CudaSource, Kernel, Work
from heterolab.device.calibrate.figures import spin
from heterolab.device.cuda import CudaDevice
from heterolab.device.cuda_events import ANCHOR_NS, EventSpans, Pending
from heterolab.device.cuda_kernels import check_arguments, parameters
from heterolab.device.host import RealHost
from heterolab.errors import DeviceUnavailable, HeteroLabError, InputError, OutOfDeviceMemory, RaceError
from heterolab.pipeline import kernels
from heterolab.trace.trace import D2H, DEVICE_KINDS, H2D, KERNEL

# -- is there one? -------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``machine(driver=…, cupy=…)``: pretend that the machine has this driver and this CuPy."""

    def pretend(driver: int, cupy: Any = None) -> None:
        monkeypatch.setattr(cuda, "driver_version", lambda: driver)
        find, load = importlib.util.find_spec, importlib.import_module
        monkeypatch.setattr(importlib.util, "find_spec", lambda n: cupy if n == "cupy" else find(n))

        def import_module(name: str) -> Any:
            if name != "cupy":
                return load(name)
            if isinstance(cupy, Exception):
                raise cupy
            return cupy

        monkeypatch.setattr(importlib, "import_module", import_module)

    return pretend


def test_no_driver(machine) -> None:
    machine(driver=0)
    assert "no NVIDIA driver" in cuda.why_not()
    with pytest.raises(DeviceUnavailable, match="sim:h200"):
        hl.open_device("cuda")
    assert "no NVIDIA driver" in repr(hl.open_device())


@pytest.mark.parametrize(("driver", "extra"), [(13000, "cuda13"), (12040, "cuda12")])
def test_cupy_missing_names_the_extra_for_this_driver(machine, driver: int, extra: str) -> None:
    machine(driver)
    assert f"heterolab[{extra}]" in cuda.why_not()


def test_a_driver_too_old(machine) -> None:
    machine(driver=11080)
    assert "11.8" in cuda.why_not()
    assert "Update the driver" in cuda.why_not()


def test_a_cupy_for_a_newer_cuda_than_the_driver(machine) -> None:
    machine(12040, fake_cupy.make())
    assert "heterolab[cuda12]" in cuda.why_not()
    assert "13.2" in cuda.why_not()


def test_a_cupy_that_does_not_import(machine) -> None:
    machine(13000, ImportError("libsomething.so: not found\nand more"))
    assert "libsomething.so: not found" in cuda.why_not()
    assert "and more" not in cuda.why_not()


def test_no_device_is_visible(machine, monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = fake_cupy.make()
    cupy.cuda.runtime.devices = 0
    machine(13000, cupy)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "CUDA_VISIBLE_DEVICES=''" in cuda.why_not()


def test_the_name_of_a_device_has_to_be_one() -> None:
    with pytest.raises(InputError, match="cuda:NUMBER"):
        hl.open_device("cuda:first")


def test_the_driver_version_is_a_number_everywhere() -> None:
    assert cuda.driver_version() >= 0


def test_cupy_is_not_imported_before_it_is_needed() -> None:
    if "no NVIDIA driver" in cuda.why_not():
        assert "cupy" not in sys.modules


# -- kernels' arguments --------------------------------------------------------------------


def source(signature: str, entry: str = "f") -> CudaSource:
    code = f'extern "C" __global__ void {entry}({signature}) {{ }}'
    return CudaSource(code, entry, lambda reads, writes: (), lambda reads, writes: (1, 1))


@pytest.mark.parametrize(
    ("signature", "expected"),
    [
        ("", []),
        ("const float* a, float *b", [("a", "float", True), ("b", "float", True)]),
        ("const int* __restrict__ a", [("a", "int", True)]),
        ("unsigned int n, long long m", [("n", "unsigned int", False), ("m", "long long", False)]),
        ("float x /* a * b, c */, // )\n int k", [("x", "float", False), ("k", "int", False)]),
    ],
)
def test_parameters_are_read_from_the_source(signature: str, expected: list) -> None:
    assert parameters(source(signature)) == expected


@pytest.mark.parametrize("entry", kernels.SOURCES)
def test_every_kernel_of_the_course_has_a_readable_signature(entry: str) -> None:
    found = parameters(CudaSource(kernels.SOURCES[entry], entry, lambda r, w: (), lambda r, w: (1, 1)))
    assert all(name.isidentifier() for name, _, _ in found)
    assert bool(found) == (entry != "empty")


def test_an_entry_that_is_not_in_the_source() -> None:
    wrong = CudaSource("__global__ void other() {}", "f", lambda r, w: (), lambda r, w: (1, 1))
    with pytest.raises(InputError, match="no entry 'f'"):
        parameters(wrong)


def test_arguments_of_the_right_types_pass() -> None:
    a = fake_cupy.Array(np.zeros(4, np.float32))
    check_arguments("k", source("const float* a, int n, float s"), (a, np.int32(4), np.float32(2)))


@pytest.mark.parametrize(
    ("signature", "argument", "message"),
    [
        ("float* a", fake_cupy.Array(np.zeros(4)), r"a is an array of float64.*float\*"),
        ("int n", 4, r"Python int.*np\.int32"),
        ("int n", np.int64(4), "n is a scalar of int64.*says int"),
        ("float x", np.float64(4), "float64"),
        ("float* a", np.float32(4), "a is a scalar"),
        ("int n", fake_cupy.Array(np.zeros(4, np.int32)), "n is an array"),
    ],
)
def test_arguments_of_wrong_types_are_refused(signature: str, argument: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_arguments("k", source(signature), (argument,))


def test_too_few_arguments_are_refused() -> None:
    with pytest.raises(InputError, match="takes 2 arguments, got 1"):
        check_arguments("k", source("int a, int b"), (np.int32(1),))


# -- spans, with made-up event times -------------------------------------------------------


@pytest.fixture
def spans() -> Any:
    """An EventSpans over a fake CUDA whose clock is set by hand, and ``run(kind, began, ended)``."""
    cupy, host = fake_cupy.make(), RealHost()
    made = EventSpans(cupy, host, device_index=0, timed=True)
    runtime, zero = cupy.cuda.runtime, host._zero_ns
    ops = iter(range(1000))

    def run(kind: str, began_ns: int, ended_ns: int, queued_ns: int = 0) -> None:
        began = made.begin(1)
        op = Pending(next(ops), kind, kind, 0, queued_ns, 4, -1, None, began)
        made.end(1, op)
        runtime.times[op.began.ptr], runtime.times[op.ended.ptr] = zero + began_ns, zero + ended_ns

    def collected() -> list[tuple[int, int, int]]:
        made.collect()
        return [(s.op, s.start_ns, s.end_ns) for s in host.recorder.spans]

    return SimpleNamespace(run=run, collected=collected, runtime=runtime, host=host, source=made)


def near(found: list, expected: list) -> bool:
    """Times go through float32 milliseconds and the anchor's midpoint: a few µs at most."""
    return len(found) == len(expected) and all(
        a[0] == b[0] and abs(a[1] - b[1]) < 100_000 and abs(a[2] - b[2]) < 100_000
        for a, b in zip(found, expected, strict=True)
    )


def test_a_copy_starts_when_the_one_before_it_on_its_engine_ended(spans) -> None:
    ms = 1_000_000
    spans.run(H2D, 10 * ms, 14 * ms)
    spans.run(H2D, 11 * ms, 18 * ms)
    spans.run(D2H, 11 * ms, 13 * ms)
    spans.run(KERNEL, 12 * ms, 16 * ms)
    found = sorted(spans.collected())
    assert near(
        found, [(0, 10 * ms, 14 * ms), (1, 14 * ms, 18 * ms), (2, 11 * ms, 13 * ms), (3, 12 * ms, 16 * ms)]
    )
    assert found[1][1] == found[0][2]


def test_no_op_starts_before_it_was_enqueued(spans) -> None:
    spans.run(KERNEL, 10_000_000, 12_000_000, queued_ns=11_000_000)
    ((_, start, end),) = spans.collected()
    assert start == pytest.approx(11_000_000, abs=1_000)
    assert end - start == pytest.approx(2_000_000, abs=1_000), "it took as long as it took"


def test_what_has_not_ended_is_collected_later(spans) -> None:
    spans.runtime.busy = True
    spans.run(H2D, 10_000_000, 11_000_000)
    assert spans.collected() == []
    spans.runtime.busy = False
    assert len(spans.collected()) == 1
    assert len(spans.collected()) == 1, "and only once"


def test_events_are_used_again(spans) -> None:
    for _ in range(50):
        spans.run(KERNEL, 10, 20)
        spans.collected()
    assert len(spans.source._free) == 2


def test_the_anchor_is_renewed_by_its_own_clock(spans) -> None:
    clock = spans.source._clock
    before = clock._anchor
    clock.renew()
    assert clock._anchor is before, "it is fresh"
    clock._anchor_ns -= 2 * ANCHOR_NS
    clock.renew()
    assert clock._anchor is not before
    assert abs(clock._anchor_ns - spans.host.now()) < 50_000_000


# -- the device, over a fake CuPy ----------------------------------------------------------


@pytest.fixture
def fake(machine) -> Iterator[CudaDevice]:
    machine(13000, fake_cupy.make())
    device = CudaDevice.open(races="raise", spans="events")
    yield device
    device.close()


def double() -> Kernel:
    def run(xp, reads, writes):
        xp.multiply(reads[0], 2, out=writes[0])

    return Kernel("double", run, lambda reads, writes: Work())


@pytest.mark.parametrize("memory", ["pageable", "pinned", "mapped"])
def test_a_round_trip_makes_cudas_calls(fake: CudaDevice, memory: str) -> None:
    stream, other = fake.stream(), fake.stream(non_blocking=False)
    here, there, back = (
        fake.buffer((4, 8), memory=memory),
        fake.buffer((4, 8)),
        fake.buffer((4, 8), memory=memory),
    )
    here.write()[:] = np.arange(32).reshape(4, 8)
    stream.copy(there[1:3], here[1:3], batch=4)
    stream.launch(double(), [there], [there], batch=4)
    other.wait(stream.record())
    other.copy(back, there, batch=4)
    done = other.record()
    fake.runtime.busy = True
    assert fake.host.wait_any([done], until=fake.host.now() + 1_000_000) == []
    fake.runtime.busy = False
    assert fake.host.wait_any([done]) == [done]
    done.result()
    assert back.read()[1].tolist() == [2.0 * n for n in range(8, 16)]
    assert back.read()[0].tolist() == [0.0] * 8
    assert [c[:2] for c in fake.runtime.calls if c[0] == "memcpyAsync"] == [
        ("memcpyAsync", 1),
        ("memcpyAsync", 2),
    ]
    fake.collect()
    recorded = [s for s in fake.host.recorder.spans if s.kind in DEVICE_KINDS]
    assert [(s.kind, s.name, s.batch) for s in recorded] == [
        (H2D, "copy", 4),
        (KERNEL, "double", 4),
        (D2H, "copy", 4),
    ]
    assert all(s.queued_ns <= s.start_ns <= s.end_ns for s in fake.host.recorder.spans)


def test_the_order_is_checked_when_asked_for(fake: CudaDevice) -> None:
    one, two = fake.stream(), fake.stream()
    here, there = fake.buffer(8, memory="pinned"), fake.buffer(8)
    one.copy(there, here)
    with pytest.raises(RaceError, match="missing event"):
        two.copy(here, there)
    fake.synchronize()
    two.copy(here, there)
    two.synchronize()
    here.read()


def test_a_mapped_buffer_is_given_to_kernels_as_the_same_bytes(fake: CudaDevice) -> None:
    stream = fake.stream()
    here, there = fake.buffer(8, memory="mapped"), fake.buffer(8, memory="mapped")
    here.write()[:] = 5
    stream.launch(double(), [here[2:6]], [there[2:6]])
    stream.synchronize()
    assert there.read().tolist() == [0, 0, 10, 10, 10, 10, 0, 0]


def test_raw_kernels_get_grid_threads_and_shared_memory(fake: CudaDevice) -> None:
    cuda_source = CudaSource(
        source("float* a, int n").code,
        "f",
        lambda reads, writes: (writes[0], np.int32(8)),
        lambda reads, writes: (3, 64),
        lambda reads, writes: 256,
    )
    kernel = Kernel("raw", double().run, double().work, cuda_source)
    for _ in range(2):
        fake.stream().launch(kernel, [], [fake.buffer(8)])
    assert [c for c in fake.runtime.calls if c[0] == "f"] == [("f", (3,), (64,), 2, 256)] * 2


def test_errors_of_a_launch_name_the_kernel(fake: CudaDevice) -> None:
    stream = fake.stream()
    broken = CudaSource('extern "C" __global__ void f() { error }', "f", lambda r, w: (), lambda r, w: (1, 1))
    with pytest.raises(HeteroLabError, match=r"kernel 'broken'.*stream 0.*line 1: error"):
        stream.launch(Kernel("broken", double().run, double().work, broken))

    def fail(xp, reads, writes):
        raise ZeroDivisionError("in Python")

    with pytest.raises(ZeroDivisionError) as caught:
        stream.launch(Kernel("python", fail, double().work))
    assert "kernel 'python'" in "".join(caught.value.__notes__)

    def hungry(xp, reads, writes):
        raise fake_cupy.OutOfMemoryError("Out of memory allocating 5 bytes.")

    with pytest.raises(OutOfDeviceMemory, match=r"kernel 'hungry'.*1 GiB"):
        stream.launch(Kernel("hungry", hungry, double().work))
    stream.synchronize()
    fake.collect()
    assert not [s for s in fake.host.recorder.spans if s.kind == KERNEL]


def test_a_device_that_has_failed_is_told_by_the_event(fake: CudaDevice) -> None:
    done = fake.stream().record()
    fake.runtime.status = 700
    assert fake.host.wait_any([done]) == [done]
    with pytest.raises(RuntimeError, match="700"):
        done.result()


def test_memory_is_refused_with_what_is_free(fake: CudaDevice) -> None:
    with pytest.raises(OutOfDeviceMemory, match=r"weights.*needs 4 GiB.*1 GiB free"):
        fake.buffer(1 << 30, name="weights")
    with pytest.raises(OutOfDeviceMemory, match="2 arrays"):
        fake.upload({"a": np.zeros(1 << 27, np.float32), "b": np.broadcast_to(np.float32(0), 1 << 28)})


def test_a_number_beyond_the_devices_there_are(machine) -> None:
    machine(13000, fake_cupy.make())
    with pytest.raises(DeviceUnavailable, match="cuda:3 does not exist"):
        CudaDevice.open(3)


def test_meta_says_what_ran(fake: CudaDevice) -> None:
    meta = fake.meta()
    assert (meta["gpu"], meta["driver"], meta["runtime"], meta["cupy"]) == (
        "Fake GPU",
        "13.0",
        "13.2",
        "14.2.0",
    )
    assert fake.source == "cuda-events"


# -- on a real GPU -------------------------------------------------------------------------


@pytest.fixture
def gpu() -> Iterator[CudaDevice]:
    device = CudaDevice.open(spans="events")  # exact ones: test_cupti_gpu.py
    yield device
    device.close()


@pytest.mark.gpu
def test_spans_lie_where_the_host_knows_they_must(gpu: CudaDevice) -> None:
    stream, host = gpu.stream(), gpu.host
    kernel = spin(2_000_000)
    stream.launch(kernel)
    stream.synchronize()
    for _ in range(20):
        before = host.now()
        op = stream.launch(kernel)
        stream.synchronize()
        after = host.now()
        gpu.collect()
        (span,) = [s for s in host.recorder.spans if s.op == op and s.kind == KERNEL]
        assert before <= span.start_ns
        assert span.end_ns <= after + 20_000
        assert 1_990_000 < span.end_ns - span.start_ns < 2_200_000


@pytest.mark.gpu
def test_both_copy_engines_and_kernels_run_beside_each_other(gpu: CudaDevice) -> None:
    streams = [gpu.stream() for _ in range(3)]
    here, back = (gpu.buffer(16 << 20, memory="pinned") for _ in range(2))
    there, result = gpu.buffer(16 << 20), gpu.buffer(16 << 20)
    kernel = spin(1_000_000)
    streams[2].launch(kernel)
    gpu.synchronize()
    streams[0].copy(there, here)
    streams[1].copy(back, result)
    streams[2].launch(kernel)
    gpu.synchronize()
    gpu.collect()
    last = {s.kind: s for s in gpu.host.recorder.spans if s.kind in DEVICE_KINDS}
    assert max(s.start_ns for s in last.values()) < min(s.end_ns for s in last.values())


@pytest.mark.gpu
def test_pinned_copies_return_at_once_and_pageable_ones_hold_the_host(gpu: CudaDevice) -> None:
    stream, there = gpu.stream(), gpu.buffer(64 << 20, "uint8")
    held = {}
    for memory in ("pinned", "pageable"):
        here = gpu.buffer(64 << 20, "uint8", memory)
        here.write()[:] = 1
        for _ in range(3):
            start = gpu.host.now()
            stream.copy(there, here)
            held[memory] = gpu.host.now() - start
            stream.synchronize()
    assert held["pinned"] < 200_000
    assert held["pageable"] > 2_000_000


@pytest.mark.gpu
@pytest.mark.parametrize("timed", [True, False])
def test_buffers_that_are_dropped_live_until_their_copy_has_ended(timed: bool) -> None:
    device = CudaDevice.open(spans=timed)
    stream, there = device.stream(), device.buffer(1 << 20)
    stream.launch(spin(20_000_000))
    here = device.buffer(1 << 20, memory="pinned")
    here.write()[:] = 3
    stream.copy(there, here)
    del here
    for _ in range(4):  # memory of the same size, from the same pool, written at once
        device.buffer(1 << 20, memory="pinned").write()[:] = 9
    back = device.buffer(1 << 20, memory="pinned")
    stream.copy(back, there)
    stream.synchronize()
    assert (back.read() == 3).all()
    device.collect()
    assert bool([s for s in device.host.recorder.spans if s.kind in DEVICE_KINDS]) == timed
    device.close()


@pytest.mark.gpu
@pytest.mark.parametrize("k", [0, 1, 7, 1000])
def test_rounds_equal_the_reference_bit_by_bit(gpu: CudaDevice, k: int) -> None:
    stream, kernel = gpu.stream(), kernels.rounds(k)
    here, back = (gpu.buffer(100_003, "uint32", "pinned") for _ in range(2))
    there, result = gpu.buffer(100_003, "uint32"), gpu.buffer(100_003, "uint32")
    here.write()[:] = np.arange(100_003, dtype=np.uint32) * 40_503
    stream.copy(there, here)
    stream.launch(kernel, [there], [result])
    stream.copy(back, result)
    stream.synchronize()
    expected = np.empty(100_003, np.uint32)
    kernel.run(np, [here.read()], [expected])
    np.testing.assert_array_equal(back.read(), expected)


@pytest.mark.gpu
def test_out_of_memory_names_what_was_asked_and_what_is_free(gpu: CudaDevice) -> None:
    with pytest.raises(OutOfDeviceMemory, match=r"weights.*free"):
        gpu.buffer(gpu.limits.memory_bytes, "uint8", name="weights")


@pytest.mark.gpu
def test_a_source_that_does_not_compile_names_its_kernel(gpu: CudaDevice) -> None:
    broken = CudaSource(
        'extern "C" __global__ void f() { no such thing; }', "f", lambda r, w: (), lambda r, w: (1, 1)
    )
    with pytest.raises(HeteroLabError, match="kernel 'broken'"):
        gpu.stream().launch(Kernel("broken", double().run, double().work, broken))
    gpu.synchronize()


@pytest.mark.gpu
def test_spans_come_while_the_run_goes_on(gpu: CudaDevice) -> None:
    stream = gpu.stream()
    stream.launch(spin(1_000))
    first = stream.record()
    stream.launch(spin(200_000_000))
    gpu.host.wait_any([first])
    gpu.collect()
    assert len([s for s in gpu.host.recorder.spans if s.kind == KERNEL]) == 1
    stream.synchronize()
    gpu.collect()
    assert len([s for s in gpu.host.recorder.spans if s.kind == KERNEL]) == 2


@pytest.mark.gpu
def test_event_times_stay_true_over_seconds(gpu: CudaDevice) -> None:
    stream, host = gpu.stream(), gpu.host
    end = host.now() + 5_000_000_000
    while host.now() < end:
        host.wait_any([], until=host.now() + 100_000_000)
        before = host.now()
        op = stream.launch(spin(100_000))
        stream.synchronize()
        after = host.now()
        gpu.collect()
        (span,) = [s for s in host.recorder.spans if s.op == op and s.kind == KERNEL]
        assert before <= span.start_ns <= span.end_ns <= after + 20_000
