"""Exact spans: the records' layouts, the join to ops, what goes missing, and why CUPTI cannot be had."""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import itertools
import json
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_cupy
import numpy as np
import pytest
from fake_cupti import GRAPH_LAUNCH, LAUNCH_KERNEL, FakeCupti

import heterolab as hl
from heterolab.device import cuda, cupti, cupti_library, cupti_session
from heterolab.device.base import Kernel, Work
from heterolab.device.cuda import CudaDevice
from heterolab.device.cupti import FLUSH_NS
from heterolab.device.cupti_library import Library
from heterolab.device.cupti_records import (
    DRIVER_CALLS,
    FIELDS,
    RUNTIME_CALLS,
    CuptiUnavailable,
    Parser,
    layouts,
    release,
)
from heterolab.device.cupti_session import CuptiClock
from heterolab.device.host import RealHost
from heterolab.errors import DeviceUnavailable, InputError
from heterolab.trace.trace import API, D2H, DEVICE_KINDS, H2D, KERNEL, Trace

HEADERS: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data" / "cupti-layouts.json").read_text())

# -- layouts -------------------------------------------------------------------------------


@pytest.mark.parametrize("package", HEADERS)
def test_layouts_are_those_of_nvidias_headers(package: str) -> None:
    header = HEADERS[package]
    made = layouts(header["version"])
    assert set(made) == set(header["records"])
    for name, record in header["records"].items():
        assert (FIELDS[name][0], made[name].itemsize) == (record["kind"], record["size"]), name
        assert made[name].fields is not None
        for field, (dtype, offset, *_) in made[name].fields.items():
            if field != "kind":
                assert [offset, dtype.itemsize] == record[field], f"{name}.{field}"


def test_calls_have_the_headers_numbers() -> None:
    ours = {n for calls in (DRIVER_CALLS, RUNTIME_CALLS) for pair in calls.values() for n in pair}
    for header in HEADERS.values():
        for name, number in header.get("calls", {}).items():
            bare = name.split("_v")[0].split("_pt")[0]
            assert number in ours, name
            calls = DRIVER_CALLS if name.startswith("cu") and not name.startswith("cuda") else RUNTIME_CALLS
            assert any(number in pair for known, pair in calls.items() if known.startswith(bare)), name


@pytest.mark.parametrize(("version", "says"), [(17, "too old"), (140000, "14.0.0 is newer"), (12, "too old")])
def test_an_unknown_version_is_refused_by_name(version: int, says: str) -> None:
    with pytest.raises(CuptiUnavailable, match=says):
        layouts(version)


def test_releases_in_words() -> None:
    assert [release(n) for n in (130001, 26, 18)] == ["13.0.1", "12.8", "12.1"]


def parse(fake: FakeCupti, data: bytes) -> tuple[dict[str, Any], Parser]:
    parser = Parser(fake.version, Library(fake).following)
    buffer = np.zeros(len(data) + 64, np.uint8)
    buffer[: len(data)] = np.frombuffer(data, np.uint8)
    parts: dict[str, Any] = {}
    parser.parse(buffer, len(data), parts)
    return {name: np.concatenate(arrays) for name, arrays in parts.items()}, parser


@pytest.mark.parametrize("version", [18, 22, 24, 26, 130001])
def test_a_buffer_of_mixed_records_is_read(version: int) -> None:
    fake = FakeCupti(version)
    data = b"".join(
        fake.made(name, start=10 * n, end=10 * n + 5) for n in range(1, 50) for name in sorted(FIELDS)
    )
    records, parser = parse(fake, data)
    assert set(records) == set(FIELDS)
    assert not parser.problems
    for rows in records.values():
        assert rows["start"].tolist() == [10 * n for n in range(1, 50)]
        assert (rows["end"] == rows["start"] + 5).all()


def test_a_record_of_another_size_than_the_headers_is_told_and_not_read() -> None:
    fake = FakeCupti()
    data = b"".join(fake.made(name, start=1, end=2) for name in ("kernel", "memcpy", "memcpy"))
    newer = Parser(24, Library(fake).following)  # thinks that copies have 88 bytes, kernels 208
    parts: dict[str, Any] = {}
    newer.parse(np.frombuffer(data, np.uint8).copy(), len(data), parts)
    assert "kernel" not in parts
    assert "kernel records have 216 bytes here and 208 in the headers" in newer.problems[0]


def test_an_unfinished_record_ends_a_buffer_and_is_told() -> None:
    fake = FakeCupti()
    records, parser = parse(fake, fake.made("memset", start=1, end=2) * 2 + bytes(96))
    assert len(records["memset"]) == 2
    assert parser.problems == ["a buffer ended in an unfinished record"]


# -- the device over fakes -----------------------------------------------------------------


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """``world.open(…)`` opens a device over a fake CuPy and a fake libcupti (`world.cupti`)."""
    cupy = fake_cupy.make()
    monkeypatch.setattr(cuda, "driver_version", lambda: 13000)
    find, load = importlib.util.find_spec, importlib.import_module
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: cupy if n == "cupy" else find(n))
    monkeypatch.setattr(importlib, "import_module", lambda n: cupy if n == "cupy" else load(n))
    monkeypatch.setattr(cupti_session, "_session", None)
    made = SimpleNamespace(cupy=cupy, cupti=FakeCupti(), opened=[])
    monkeypatch.setattr(cupti_session, "find", lambda driver: Library(made.cupti))

    def open_device(spans: Any = "auto", kernels: int = 1, **options: Any) -> CudaDevice:
        if not made.opened:
            made.cupti.attach(cupy, kernels)
        made.opened.append(CudaDevice.open(spans=spans, **options))
        return made.opened[-1]

    made.open = open_device
    yield made
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for device in made.opened:
            device.close()
    if cupti_session._session is not None:
        atexit.unregister(cupti_session._session._end)


def double(name: str = "double") -> Kernel:
    def run(xp, reads, writes):
        xp.multiply(reads[0], 2, out=writes[0])

    return Kernel(name, run, lambda reads, writes: Work())


def device_spans(device: CudaDevice) -> list[Any]:
    return [s for s in device.host.recorder.spans if s.kind in DEVICE_KINDS]


def program(device: CudaDevice, batch: int = 4) -> list[int]:
    """Copy in, double, copy out; the op numbers."""
    stream = device.stream()
    here, there = device.buffer(64, memory="pinned"), device.buffer(64)
    return [
        stream.copy(there, here, batch=batch),
        stream.launch(double(), [there], [there], batch=batch),
        stream.copy(here, there, batch=batch),
    ]


def test_spans_carry_their_ops_number_name_bytes_and_batch(world) -> None:
    device = world.open()
    assert device.source == "cupti"
    assert "spans from CUPTI 13.0.1" in repr(device)
    assert device.meta()["spans"] == "spans from CUPTI 13.0.1"
    ops = program(device)
    device.synchronize()
    device.collect()
    spans = device_spans(device)
    assert [(s.op, s.kind, s.name, s.lane, s.bytes, s.batch, s.stream) for s in spans] == [
        (ops[0], H2D, "copy", "h2d", 256, 4, 0),
        (ops[1], KERNEL, "double", "gpu", 512, 4, 0),
        (ops[2], D2H, "copy", "d2h", 256, 4, 0),
    ]
    issued = {s.op: s for s in device.host.recorder.spans if s.kind == API}
    for span in spans:
        assert issued[span.op].start_ns == span.queued_ns <= span.start_ns
        assert abs(span.end_ns - span.start_ns - 3000) < 2, "as long as CUPTI said"
        assert span.start_ns - issued[span.op].end_ns < 1_000_000
    assert (device.spans.joined, device.spans.slips) == (3, 0)


def test_an_op_of_many_launches_has_a_span_a_kernel(world) -> None:
    device = world.open(kernels=379)
    ops = program(device)
    device.collect()
    kernels = [s for s in device_spans(device) if s.kind == KERNEL]
    assert len(kernels) == 379
    assert {(s.op, s.name, s.batch) for s in kernels} == {(ops[1], "double", 4)}
    assert [s.bytes for s in kernels] == [512] + [0] * 378
    issued = next(s for s in device.host.recorder.spans if s.op == ops[1] and s.kind == API)
    assert kernels[0].queued_ns == issued.start_ns
    queued = [s.queued_ns for s in kernels]
    assert queued == sorted(queued)
    assert queued[-1] > queued[1], "each by its own launch"
    assert queued[-1] <= issued.end_ns + 1000


def test_what_runs_outside_of_ops_has_no_span(world) -> None:
    device = world.open()
    world.cupti.work("kernel", "driver", LAUNCH_KERNEL)
    program(device)
    world.cupti.work("kernel", "driver", LAUNCH_KERNEL)
    device.collect()
    assert len(device_spans(device)) == 3
    # Two launches, and the zeros of one device buffer.
    assert device.spans.unjoined == 3


def test_a_call_on_another_thread_does_not_belong_to_the_op(world) -> None:
    device = world.open()

    def run(xp, reads, writes):
        other = threading.Thread(target=lambda: world.cupti.work("kernel", "driver", LAUNCH_KERNEL))
        other.start()
        other.join()
        xp.multiply(reads[0], 2, out=writes[0])

    there = device.buffer(8)
    device.stream().launch(Kernel("mine", run, lambda reads, writes: Work()), [there], [there])
    device.collect()
    assert len(device_spans(device)) == 1
    assert device.spans.unjoined == 2


def test_two_devices_share_the_one_client(world) -> None:
    one = world.open()
    two = world.open(host=one.host)
    assert len([call for call in world.cupti.log if call[0] == "cuptiActivityRegisterCallbacks"]) == 1
    first, second = program(one, 1), program(two, 2)
    for device in (one, two):
        device.collect()
    spans = device_spans(one)
    assert sorted((s.device, s.op) for s in spans) == [(0, op) for op in first] + [(1, op) for op in second]
    one.close()
    assert world.cupti.enabled, "the other device still listens"
    program(two, 3)
    two.collect()
    assert len(device_spans(two)) == 9
    two.close()
    assert not world.cupti.enabled
    assert not world.cupti.calls_traced
    program(world.open())
    world.opened[-1].collect()
    assert len(device_spans(world.opened[-1])) == 3, "and it can be opened again"


def test_a_device_nobody_closed_does_not_keep_the_client_busy(world) -> None:
    world.open()
    session = cupti_session._session
    assert session is not None
    world.opened.clear()
    import gc

    gc.collect()
    assert len(session._subscribers) == 0
    device = CudaDevice.open()
    world.opened.append(device)
    assert device.source == "cupti"


@pytest.mark.parametrize(("version", "lacks"), [(22, ("EnableDriverApi", "EnableRuntimeApi")), (28, ())])
def test_older_versions_trace_all_calls_where_they_cannot_choose(world, version: int, lacks: tuple) -> None:
    world.cupti = FakeCupti(version, tuple(f"cuptiActivity{name}" for name in lacks))
    device = world.open("cupti")
    assert ({4, 5} <= world.cupti.enabled) == bool(lacks)
    program(device)
    device.collect()
    assert len(device_spans(device)) == 3


def test_all_calls_are_traced_where_the_chosen_ones_are_not(world) -> None:
    world.cupti.forgets_calls = True
    device = world.open("cupti")
    assert {4, 5} <= world.cupti.enabled
    program(device)
    device.collect()
    assert len(device_spans(device)) == 3


# -- while the run goes on -----------------------------------------------------------------


def flushes(world: Any) -> list[int]:
    return [call[1] for call in world.cupti.log if call[0] == "cuptiActivityFlushAll"]


def test_while_work_is_under_way_finished_buffers_are_asked_for_now_and_then(world, monkeypatch) -> None:
    device = world.open()
    ticks = itertools.count(device.host.now(), 2_000)
    ahead = 0
    monkeypatch.setattr(device.host, "now", lambda: next(ticks) + ahead)
    world.cupti.clock = lambda: next(ticks) + ahead + 10**18
    device.spans._clock = CuptiClock(Library(world.cupti), device.host)
    device.spans._flushed_ns = device.host.now()
    world.cupti.log.clear()
    program(device)
    world.cupti.unfinished = 2  # the last call and its copy
    device.runtime.busy = True
    for _ in range(21):
        ahead += FLUSH_NS // 10
        device.collect()
    assert flushes(world) == [0, 0], "every 150 ms, and not by force"
    assert len(device_spans(device)) == 2
    device.runtime.busy = False
    device.collect()
    assert flushes(world) == [0, 0, 1]
    assert len(device_spans(device)) == 3
    for _ in range(20):
        ahead += FLUSH_NS
        device.collect()
    assert flushes(world) == [0, 0, 1], "nothing more to learn"


def test_arrays_are_let_go_when_their_op_has_ended(world) -> None:
    device = world.open()
    program(device)
    device.collect()
    assert not device.spans._open
    assert not device.spans._pending
    for _ in range(20):
        program(device)
        device.collect()
    assert len(device.spans._free) == 3, "events are used again"


def test_an_endless_run_settles_its_old_ops(world, monkeypatch) -> None:
    device = world.open()
    program(device)
    spans = device.spans
    spans._let_go()
    stream, there = device.stream(), device.buffer(8)
    device.runtime.busy = True
    stream.launch(double(), [there], [there])
    later = device.host.now() + 6_000_000_000
    monkeypatch.setattr(device.host, "now", lambda: later)
    spans._clock.read = lambda: 0
    device.collect()
    assert len(spans._open) == 1, "only what is under way"
    assert {op.op for op, _ in spans._launched.values()} == {spans._open[0].op}
    assert len(device_spans(device)) == 4


# -- what goes missing is said -------------------------------------------------------------


def test_lost_records_are_said_and_stamped(world) -> None:
    device = world.open()
    trace_notes = device.host.recorder.notes
    program(device)
    world.cupti.dropped = 12
    with pytest.warns(UserWarning, match=r"lost 12 records.*spans='events'"):
        device.collect()
    assert trace_notes == ["CUPTI lost 12 records for lack of buffers"]
    meta = device.meta() | {"incomplete": trace_notes}
    trace = Trace.from_spans(device.host.recorder.spans, device.source, device.name, meta)
    assert (
        trace.stamp == "measured (CUPTI) · Fake GPU · INCOMPLETE: CUPTI lost 12 records for lack of buffers"
    )


def test_a_trace_without_gpu_rows_is_said(world) -> None:
    device = world.open()
    world.cupti.silent = True
    program(device)
    with pytest.warns(UserWarning, match="none of 3 device ops has a record"):
        device.collect()
    device.collect()  # once


def test_some_ops_without_records_are_named(world) -> None:
    device = world.open()
    program(device)
    world.cupti.silent = True
    there = device.buffer(8)
    device.stream().launch(double("lost one"), [there], [there])
    with pytest.warns(UserWarning, match=r"1 of 4 device ops have no record of the GPU \(lost one\)"):
        device.collect()


def test_operations_that_could_not_be_timed_are_said(world) -> None:
    device = world.open()
    program(device)
    world.cupti.record("kernel", start=0, end=0, correlationId=5)
    with pytest.warns(UserWarning, match="could not time 1 operations"):
        device.collect()
    assert len(device_spans(device)) == 3


def test_a_run_is_stamped_with_what_its_own_spans_lack(world, monkeypatch) -> None:
    device = world.open()
    device.host.recorder.notes.append("of an earlier run")
    trace = hl.lab.streams.record(device, lambda dev: program(dev))
    assert "incomplete" not in trace.meta

    def loses(dev: CudaDevice) -> None:
        program(dev)
        world.cupti.dropped = 3

    with pytest.warns(UserWarning, match="lost 3"):
        trace = hl.lab.streams.record(device, loses)
    assert trace.meta["incomplete"] == ["CUPTI lost 3 records for lack of buffers"]


def test_what_came_before_a_run_is_collected_before_it(cpu_device, monkeypatch) -> None:
    notes = cpu_device.host.recorder.notes
    lacks = iter(["of the warm-up", "of the run"])
    monkeypatch.setattr(cpu_device, "collect", lambda: notes.append(next(lacks)))
    run = hl.Pipeline(hl.models.encoder(), batch=2).run(
        hl.closed_loop(n=2, in_flight=2, seed=0), on=cpu_device
    )
    assert run.trace.meta["incomplete"] == ["of the run"]
    assert run.stamp.endswith("INCOMPLETE: of the run")


def test_when_buffers_run_out_cupti_is_told(world, monkeypatch) -> None:
    device = world.open()
    monkeypatch.setattr(cupti_session, "MOST_BUFFERS", 0)
    session = cupti_session._session
    assert session is not None
    session._free.clear()
    program(device)
    with pytest.warns(UserWarning, match="lost 1 records|none of 3"):
        device.collect()


def test_the_time_of_day_being_set_is_said(world) -> None:
    device = world.open()
    program(device)
    real, world.cupti.clock = world.cupti.clock, lambda: real() + 10**9
    with pytest.warns(UserWarning, match=r"was set by -1000\.\d ms"):
        device.collect()
    assert len(device_spans(device)) == 3


# -- the clock -----------------------------------------------------------------------------


def test_cuptis_times_become_the_hosts() -> None:
    fake, host = FakeCupti(), RealHost()
    clock = CuptiClock(Library(fake), host)
    before, stamp, after = host.now(), fake.clock(), host.now()
    (found,) = clock.host_ns(np.array([stamp], np.uint64))
    assert before - 100_000 <= found <= after + 100_000
    assert clock.width_ns < 10_000_000


def test_a_drift_between_two_readings_is_interpolated() -> None:
    fake, host = FakeCupti(), SimpleNamespace(now=lambda: now)
    now, shift = 0, 10**18
    fake.clock = lambda: now + shift
    clock = CuptiClock(Library(fake), host)  # type: ignore[arg-type]
    now, shift = 2_000_000, 10**18 - 1000
    assert clock.read() == 1000
    stamps = np.array([10**18, 10**18 + 999_500, 10**18 + 1_999_000], np.uint64)
    assert clock.host_ns(stamps).tolist() == [0, 1_000_000, 2_000_000]


# -- lessons that look closer --------------------------------------------------------------


def test_raw_records_with_memory_kinds_names_and_more_kinds(world) -> None:
    device = world.open()
    device.spans.also("synchronization", "unified_memory")
    assert {38, 25} <= world.cupti.enabled
    assert ("cuptiActivityEnableAllSyncRecords", 0) in world.cupti.log
    program(device)
    world.cupti.record("synchronization", type=3, start=5, end=9)
    world.cupti.record("unified_memory", counterKind=1, value=4096)
    records = device.spans.records()
    assert records["memcpy"]["bytes"].tolist() == [256, 256]
    assert records["memcpy"]["copyKind"].tolist() == [1, 2]
    assert records["synchronization"]["type"].tolist() == [3]
    assert records["unified_memory"]["value"].tolist() == [4096]
    assert device.spans.kernel_names(records["kernel"]) == ["a_kernel"]
    assert len(records["driver"]) == 1
    assert device.spans.records()["memcpy"].shape == (2,), "asking twice does not double them"
    with pytest.raises(InputError, match=r"also\('power'\).*synchronization"):
        device.spans.also("power")


def test_only_the_latest_raw_records_are_kept(world, monkeypatch) -> None:
    monkeypatch.setattr(cupti, "MOST_KEPT", 10)
    device = world.open()
    for _ in range(40):
        program(device)
        device.collect()
    assert 10 <= len(device.spans.records()["memcpy"]) < 14


def test_a_whole_graph_is_a_kernel_span(world) -> None:
    device = world.open()
    device.spans.also("graph")

    def run(xp, reads, writes):
        world.cupti.work("graph", "runtime", GRAPH_LAUNCH, lasts_ns=9000)

    there = device.buffer(8)
    op = device.stream().launch(Kernel("graph", run, lambda r, w: Work()), [there], [there])
    device.collect()
    ((number, kind, length),) = [(s.op, s.kind, s.end_ns - s.start_ns) for s in device_spans(device)]
    assert (number, kind) == (op, KERNEL)
    assert abs(length - 9000) < 2


# -- why not -------------------------------------------------------------------------------

HELD = {"cuptiActivityRegisterCallbacks": 39}


@pytest.mark.parametrize(
    ("refuse", "says"),
    [
        (HELD, "another profiler holds it"),
        ({"cuptiActivityEnable": 35}, "only administrators"),
        ({"cuptiActivityEnable": 14}, "another profiler may hold it"),
        ({"cuptiActivityEnable": 15}, "CUPTI newer than the driver"),
        ({"cuptiActivityEnable": 33}, "virtualised"),
        ({"cuptiActivityFlushAll": 999}, "cuptiActivityFlushAll said CUPTI_ERROR_FAKE"),
    ],
)
def test_a_refusal_falls_back_to_events_and_says_why(world, refuse: dict, says: str) -> None:
    world.cupti.refuse = refuse
    device = world.open()
    assert device.source == "cuda-events"
    assert "spans from CUDA events, since exact ones cannot be had" in repr(device)
    assert says in repr(device)
    assert not world.cupti.enabled, "nothing is left on"
    program(device)
    device.collect()
    assert len(device_spans(device)) == 3


def test_cupti_asked_for_by_name_is_not_replaced(world) -> None:
    world.cupti.refuse = HELD
    with pytest.raises(DeviceUnavailable, match=r"spans='cupti'.*another profiler.*spans='auto'"):
        world.open("cupti")


def test_a_cupti_that_records_nothing_is_not_used(world) -> None:
    world.cupti.silent = True
    device = world.open()
    assert device.source == "cuda-events"
    assert "gave no record of an operation made to try it" in repr(device)
    assert not world.cupti.enabled


@pytest.mark.parametrize(
    ("asked", "source"), [(True, "cupti"), ("events", "cuda-events"), ("cupti", "cupti")]
)
def test_the_source_can_be_chosen(world, asked: Any, source: str) -> None:
    assert world.open(asked).source == source
    assert bool(world.cupti.log) == (source == "cupti")


@pytest.mark.parametrize("asked", ["off", False])
def test_off_times_nothing(world, asked: Any) -> None:
    device = world.open(asked)
    program(device)
    device.collect()
    assert device_spans(device) == []
    assert not world.cupti.log


def test_an_unknown_source_is_refused(world) -> None:
    with pytest.raises(InputError, match=r"spans='nsys'.*auto"):
        world.open("nsys")


def test_no_library_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cupti_library, "candidates", lambda major: iter(["libcupti-that-is-not-there.so"]))
    with pytest.raises(CuptiUnavailable, match=r"not on this machine.*nvidia-cuda-cupti-cu12\."):
        cupti_library.find(12040)


def test_a_library_that_lacks_a_function_is_too_old() -> None:
    with pytest.raises(CuptiUnavailable, match="lacks cuptiActivityFlushAll"):
        Library(FakeCupti(lacks=("cuptiActivityFlushAll",)))


def test_libraries_are_tried_by_version_and_none_beyond_the_driver(monkeypatch, tmp_path) -> None:
    for name in ("libcupti.so.12", "libcupti.so.13", "libcupti.so.2025.3.1", "libcupti.so.2024.1"):
        (tmp_path / name).touch()
    monkeypatch.setattr(cupti_library, "loaded", lambda: ["/loaded/libcupti.so.12"])
    monkeypatch.setattr(cupti_library, "_wheels", lambda: [tmp_path])
    monkeypatch.setattr(cupti_library, "_toolkits", list)
    names = [Path(path).name for path in cupti_library.candidates(13)]
    assert names[0] == "libcupti.so.12", "what is loaded already comes first"
    assert names.index("libcupti.so.13", 1) < names.index("libcupti.so.12", 1)
    older = [Path(path).name for path in cupti_library.candidates(12)]
    assert not {"libcupti.so.13", "libcupti.so.2025.3.1"} & set(older)
    assert "libcupti.so.2024.1" in older


def test_looking_for_it_imports_nothing() -> None:
    before = set(sys.modules)
    list(cupti_library.candidates(13))
    assert not {name for name in set(sys.modules) - before if name.startswith(("torch", "nvidia", "cupti"))}


# -- the callbacks -------------------------------------------------------------------------


def test_callbacks_come_from_any_thread(world) -> None:
    device = world.open()
    program(device)
    thread = threading.Thread(target=world.cupti._ActivityFlushAll, args=(1,))
    thread.start()
    thread.join()
    device.collect()
    assert len(device_spans(device)) == 3


def test_another_profilers_buffer_is_left_alone(world) -> None:
    device = world.open()
    program(device)
    _, complete = world.cupti.callbacks
    complete(None, 0, 4096, 100, 100)
    device.collect()
    assert len(device_spans(device)) == 3


def test_at_the_interpreters_end_all_is_off(world) -> None:
    device = world.open()
    session = cupti_session._session
    assert session is not None
    program(device)
    session._end()
    assert not world.cupti.enabled
    device.collect()
    device.close()
    session._end()
