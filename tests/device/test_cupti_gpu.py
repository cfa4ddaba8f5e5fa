"""Exact spans on a real GPU: what only it can show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import heterolab as hl
from heterolab.device.base import Kernel, Work
from heterolab.device.calibrate.figures import spin
from heterolab.device.cuda import CudaDevice
from heterolab.device.cupti_records import COPY_KINDS, MEMORY_KINDS
from heterolab.trace.trace import API, D2H, DEVICE_KINDS, H2D, KERNEL

pytestmark = pytest.mark.gpu


@pytest.fixture
def gpu() -> Iterator[CudaDevice]:
    device = CudaDevice.open(spans="cupti")
    yield device
    device.close()


def device_spans(device: CudaDevice, *ops: int) -> list[Any]:
    spans = [s for s in device.host.recorder.spans if s.kind in DEVICE_KINDS]
    return [s for s in spans if not ops or s.op in ops]


def test_every_op_has_a_span_where_the_host_knows_it_must_be(gpu: CudaDevice) -> None:
    stream, host = gpu.stream(), gpu.host
    here, there, other = gpu.buffer(1 << 18, memory="pinned"), gpu.buffer(1 << 18), gpu.buffer(1 << 18)
    stream.launch(spin(1_000))
    gpu.synchronize()
    for _ in range(20):
        before = host.now()
        ops = [
            stream.copy(there, here),
            stream.launch(spin(300_000)),
            stream.copy(other, there),
            stream.copy(here, other),
        ]
        stream.synchronize()
        after = host.now()
        gpu.collect()
        spans = device_spans(gpu, *ops)
        assert [(s.op, s.kind) for s in spans] == list(zip(ops, (H2D, KERNEL, KERNEL, D2H), strict=True))
        for span, following in zip(spans, [*spans[1:], None], strict=True):
            assert before <= span.queued_ns <= span.start_ns < span.end_ns <= after + 20_000
            assert following is None or span.end_ns <= following.start_ns, "one stream, one after the other"
        assert 299_000 < spans[1].end_ns - spans[1].start_ns < 330_000
        assert sum(s.end_ns - s.start_ns for s in spans) <= after - before
    assert host.recorder.notes == []


@pytest.mark.parametrize("memory", ["pinned", "pageable"])
def test_copies_have_their_bytes_and_both_memory_kinds(gpu: CudaDevice, memory: str) -> None:
    stream, here, there = gpu.stream(), gpu.buffer(1 << 20, memory=memory), gpu.buffer(1 << 20)
    into, back = stream.copy(there, here), stream.copy(here, there)
    stream.synchronize()
    rows = gpu.spans.records()["memcpy"]  # type: ignore[union-attr]
    kinds = [
        (COPY_KINDS[r["copyKind"]], MEMORY_KINDS[r["srcKind"]], MEMORY_KINDS[r["dstKind"]]) for r in rows
    ]
    assert Counter(kinds).keys() == {("h2d", memory, "device"), ("d2h", "device", memory)}
    for op in (into, back):
        assert sum(s.bytes for s in device_spans(gpu, op)) == here.nbytes


def test_an_eager_forward_pass_is_hundreds_of_kernels_of_one_op(gpu: CudaDevice) -> None:
    pipe = hl.Pipeline(hl.models.encoder(), batch=32, streams=2, memory="pinned")
    load = hl.closed_loop(n=128, in_flight=128, seed=0)
    pipe.run(load, on=gpu)
    run = pipe.run(load, on=gpu)
    kernels = run.trace.kind(KERNEL)
    ops = Counter(kernels["op"].tolist())
    assert max(ops.values()) >= 300
    assert "incomplete" not in run.trace.meta
    assert run.trace.source == "cupti"
    calls = {s.op: s for s in run.trace if s.kind == API}
    for op, count in ops.items():
        mine = [s for s in kernels if s.op == op]
        assert len({(s.name, s.batch, s.stream) for s in mine}) == 1
        assert all(calls[op].start_ns <= s.queued_ns <= s.start_ns <= s.end_ns for s in mine), (op, count)
        assert mine[-1].queued_ns <= calls[op].end_ns + 1_000
    assert {s.batch for s in run.trace if s.kind in DEVICE_KINDS} == set(range(len(run.batch_sizes)))


def test_exact_spans_and_events_agree_on_one_op() -> None:
    lengths: dict[str, list[int]] = {}
    for source in ("events", "cupti", "events", "cupti"):
        device = CudaDevice.open(spans=source)
        stream = device.stream()
        stream.launch(spin(1_000))
        stream.synchronize()
        ops = []
        for _ in range(30):
            ops.append(stream.launch(spin(500_000)))
            stream.synchronize()
        device.collect()
        lengths.setdefault(source, []).extend(s.end_ns - s.start_ns for s in device_spans(device, *ops))
        device.close()
    assert {source: len(found) for source, found in lengths.items()} == {"events": 60, "cupti": 60}
    assert abs(np.median(lengths["events"]) - np.median(lengths["cupti"])) < 15_000


def test_it_can_be_opened_and_closed_again_and_again() -> None:
    for turn in range(5):
        device = CudaDevice.open(spans="cupti")
        stream = device.stream()
        op = stream.launch(spin(10_000 * (turn + 1)))
        stream.synchronize()
        device.collect()
        assert len(device_spans(device, op)) == 1
        device.close()


def test_two_devices_at_once_have_their_own_spans(gpu: CudaDevice) -> None:
    other = CudaDevice.open(spans="cupti")
    mine, theirs = gpu.stream().launch(spin(50_000)), other.stream().launch(spin(150_000))
    for device in (gpu, other):
        device.synchronize()
        device.collect()
    (one,), (two,) = device_spans(gpu, mine), device_spans(other, theirs)
    assert one.end_ns - one.start_ns < 100_000 < two.end_ns - two.start_ns
    other.close()


def test_work_outside_of_ops_has_no_span(gpu: CudaDevice) -> None:
    with gpu.native:
        values = gpu.cupy.zeros(1000, "float32")
        values += 1
    stream, there = gpu.stream(), gpu.buffer(1000)

    def run(xp, reads, writes):
        xp.multiply(writes[0], 2, out=writes[0])

    op = stream.launch(Kernel("mine", run, lambda reads, writes: Work()), [], [there])
    with gpu.native:
        values += 1
    gpu.synchronize()
    gpu.collect()
    assert {s.op for s in device_spans(gpu)} == {op}


def test_more_kinds_for_lessons(gpu: CudaDevice) -> None:
    gpu.spans.also("synchronization", "runtime")  # type: ignore[union-attr]
    stream = gpu.stream()
    stream.launch(spin(2_000_000))
    stream.synchronize()
    records = gpu.spans.records()  # type: ignore[union-attr]
    waited = records["synchronization"]
    assert (waited["end"] - waited["start"]).max() > 1_000_000, "the host was held for the kernel"
    assert "runtime" in records
    assert all(isinstance(n, str) for n in gpu.spans.kernel_names(records["kernel"]))  # type: ignore[union-attr]


def test_it_can_be_opened_again_after_more_kinds_were_traced() -> None:
    for kinds in (("driver", "runtime"), ()):
        device = CudaDevice.open(spans="cupti")
        device.spans.also(*kinds)  # type: ignore[union-attr]
        stream = device.stream()
        op = stream.launch(spin(20_000))
        stream.synchronize()
        device.collect()
        assert len(device_spans(device, op)) == 1
        device.close()
