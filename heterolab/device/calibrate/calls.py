"""What CUDA's own calls cost the host: warm, and cold after other work."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from heterolab.device.calibrate.bench import Lane
from heterolab.device.calibrate.figures import Json, Recorded, median, spin
from heterolab.device.calibrate.noise import ON_HOST, wanted
from heterolab.device.calibrate.rig import Rig, medians
from heterolab.pipeline.kernels import empty

#: Bytes of the copies that are timed on the host: their call does not depend on it.
SMALL = 4096
#: The device has an op after this share of the call. Only the sum of this and of the time until
#: the op starts can be seen, so it is the same in every profile.
SUBMIT_SHARE = 0.9
#: How long the host works before a call, ns; how much pageable memory it stages, bytes.
WORK_NS = (5_000, 10_000, 20_000, 40_000, 80_000, 160_000, 480_000)
STAGED = (1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
#: What came before ("work", "staged" or, with 0, "warm"), how much of it, and the call.
Sample = tuple[str, int, str]
#: The kernel whose end is waited for, to see how long a start and a return take.
PROBE_NS = 50_000


def host_calls(rig: Rig) -> dict[str, Json]:
    """How long the host is inside each kind of call, warm, and between two calls.

    Calls are timed among other calls: in a tight loop of one kind they are a third cheaper.
    """
    bench, (one, other, *_) = rig.bench, rig.lanes
    here, there = rig.arena.bytes("pinned", SMALL), rig.arena.bytes("device", SMALL)
    nothing = empty()

    def go() -> None:
        one.copy(there, here)
        one.launch(nothing)
        other.wait(one.record())
        other.copy(here, there)
        other.synchronize()
        one.synchronize()  # nothing to wait for

    def measure(names: object) -> dict[str, list[float]]:
        for _ in range(3):
            go()
        with bench.logged() as calls:
            for _ in range(rig.repeats * 12):
                go()
        found: dict[str, list[float]] = defaultdict(list)
        for call in calls:
            found[call.name].append(call.ns)
        found["sync_idle"] = found.pop("synchronize")[1::2]
        found["between"] = [b.entered_ns - a.left_ns for a, b in pairwise(calls)]
        return found

    return rig.noise.samples("host calls", measure, ON_HOST)


def latency(rig: Rig) -> Json:
    """From a kernel's submission to its start, and from its end to the return of a synchronize:
    both together, and the kernel's fixed time with them."""
    bench, lane, probe = rig.bench, rig.lanes[0], spin(PROBE_NS)

    def measure() -> list[float]:
        with bench.logged() as calls:
            for _ in range(rig.repeats * 3):
                lane.launch(probe)
                lane.synchronize()
        return [
            sync.left_ns - (launch.entered_ns + SUBMIT_SHARE * launch.ns) - PROBE_NS
            for launch, sync in zip(calls[0::2], calls[1::2], strict=True)
        ]

    return rig.noise.one("start and synchronize", measure, ON_HOST)


def returns(rig: Rig) -> Json | None:
    """From a kernel's end to the return of a synchronize; None where spans are not exact."""
    if not rig.exact:
        return None
    device, probe = rig.traced, spin(PROBE_NS)
    stream = device.streams(1)[0]

    def measure() -> list[float]:
        with Recorded(device) as recorded:
            ops = []
            for _ in range(rig.repeats * 3):
                ops.append(stream.launch(probe))
                stream.synchronize()
        spans, syncs = recorded.on_device(), recorded.calls("synchronize")
        return [
            float(sync.end_ns - spans[op].end_ns) for op, sync in zip(ops, syncs, strict=False) if op in spans
        ]

    return rig.noise.one("return of a synchronize", measure, ON_HOST)


# -- cold calls ------------------------------------------------------------------------------


def cold_calls(rig: Rig, more: Mapping[str, Callable[[Lane], Any]] | None = None) -> Json:
    """Calls after the host has worked, and after it has staged pageable memory.

    Parameters
    ----------
    more
        Other calls to be timed likewise, by name.

    Returns
    -------
    ``work``, ``staged``: {call: {ns worked or bytes staged: spread}}; ``warm``: {call: spread};
    ``first``: a launch after the program has paused.
    """
    bench, (one, other, *_) = rig.bench, rig.lanes
    arena, nothing = rig.arena, empty()
    here, there = arena.bytes("pinned", SMALL), arena.bytes("device", SMALL)
    event = one.record()
    kinds: dict[str, Callable[[], Any]] = {
        "copy": lambda: one.copy(there, here),
        "launch": lambda: one.launch(nothing),
        "record": one.record,
        "wait": lambda: other.wait(event),
    }
    kinds |= {name: partial(call, one) for name, call in (more or {}).items()}
    names = list(kinds)

    def after(before: Callable[[], Any], turn: int) -> dict[str, float]:
        """Each kind of call once after `before`, each time another one first."""
        order = names[turn % len(names) :] + names[: turn % len(names)]
        for _ in range(2):
            for name in order:
                kinds[name]()
        bench.synchronize()
        before()
        with bench.logged() as calls:
            for name in order:
                kinds[name]()
            bench.synchronize()
        return {name: call.ns for name, call in zip(order, calls, strict=False)}

    def gather(before: Callable[[], Any]) -> dict[str, list[float]]:
        found: dict[str, list[float]] = defaultdict(list)
        for turn in range(rig.repeats * 3):
            for name, ns in after(before, turn).items():
                found[name].append(ns)
        return found

    def stage(nbytes: int) -> Callable[[], None]:
        source = arena.bytes("pageable", nbytes)
        return lambda: one.copy(arena.bytes("device", nbytes), source)

    befores: dict[tuple[str, int], Callable[[], Any]] = {("warm", 0): lambda: None}
    befores |= {("work", ns): partial(bench.work, ns) for ns in WORK_NS}
    befores |= {("staged", n): stage(n) for n in STAGED if n <= arena.most_bytes}

    def measure(keys: Collection[Sample] | None) -> dict[Sample, list[float]]:
        again = None if keys is None else {(kind, size) for kind, size, _ in keys}
        return {
            (*key, name): values
            for key in wanted(again, befores)
            for name, values in gather(befores[key]).items()
        }

    rows = rig.noise.samples("cold calls", measure, 2 * ON_HOST)
    out: Json = {"warm": {}, "work": {name: {} for name in names}, "staged": {name: {} for name in names}}
    for (kind, size, name), row in rows.items():
        if kind == "warm":
            out["warm"][name] = row
        else:
            out[kind][name][str(size)] = row
    out["first"] = rig.noise.one("a first launch", lambda: _first(rig), 2 * ON_HOST)
    return out


def _first(rig: Rig) -> list[float]:
    nothing, found = empty(), []
    for _ in range(rig.repeats * 2):
        bench = rig.bench.rest()
        lane = rig.lanes[0] if bench is rig.bench else bench.stream()
        with bench.logged() as calls:
            lane.launch(nothing)
        found.append(float(calls[0].ns))
        lane.synchronize()
    return found


def fit_cold(measured: Json) -> Json:
    """The constants of :class:`~heterolab.device.profile.HostCosts` from :func:`cold_calls`.

    A call after `w` ns of work costs warm + cold × (1 - exp(-w / cold_work)): `cold_work` is tried,
    the rest is linear. Likewise with the bytes staged.
    """
    warm = medians(measured["warm"])
    scales = np.geomspace(2_000, 2_000_000, 61)
    cold, work_ns = _saturating(measured["work"], warm, scales)
    # After staging, the same calls are dearer by a common factor of what work makes them.
    names = [name for name in ("copy", "launch", "record", "wait") if cold[name] > 100]
    factor, nbytes = 0.0, 1e6
    if names:
        scaled = {
            name: {size: (row["median"] - warm[name]) / cold[name] for size, row in sizes.items()}
            for name, sizes in measured["staged"].items()
            if name in names
        }
        sizes = [int(size) for size in scaled[names[0]]]
        weights = np.array([cold[name] for name in names])
        table = np.array([[scaled[name][str(size)] for size in sizes] for name in names])
        shares = (weights[:, None] * table).sum(axis=0) / weights.sum()
        factor, nbytes = _one_saturating(np.array(sizes, float), shares, np.geomspace(1e4, 1e8, 61))
    first = 0.0
    if cold["launch"] > 100:
        share = (measured["first"]["median"] - warm["launch"]) / cold["launch"]
        first = -work_ns * float(np.log(1 - np.clip(share, 0.0, 0.95)))
    return {
        "cold": {name: round(ns, 1) for name, ns in cold.items()},
        "cold_work_ns": round(work_ns, 1),
        "cold_start_ns": round(first, 1),
        "cold_bytes": round(nbytes, 1),
        "cold_bytes_factor": round(max(factor, 0.0), 4),
    }


def _saturating(
    rows: Mapping[str, Mapping[str, Json]], warm: Mapping[str, float], scales: Any
) -> tuple[dict[str, float], float]:
    """The scale that fits all kinds of call best, and how much dearer each gets in the end."""
    found: list[tuple[float, dict[str, float], float]] = []
    for scale in scales:
        loss, ends = 0.0, {}
        for name, by_size in rows.items():
            sizes = np.array([int(size) for size in by_size], float)
            dearer = np.array([row["median"] for row in by_size.values()]) - warm[name]
            share = 1 - np.exp(-sizes / scale)
            end = max(float(share @ dearer / (share @ share)), 0.0)
            loss += float(np.abs(dearer - end * share).sum()) / warm[name]
            ends[name] = end
        found.append((loss, ends, float(scale)))
    _, ends, scale = min(found, key=lambda row: row[0])
    return ends, scale


def _one_saturating(sizes: Any, values: Any, scales: Any) -> tuple[float, float]:
    found = []
    for scale in scales:
        share = 1 - np.exp(-sizes / scale)
        end = float(share @ values / (share @ share))
        found.append((float(np.abs(values - end * share).sum()), end, float(scale)))
    _, end, scale = min(found)
    return end, scale


def host_section(
    calls: Mapping[str, Json], late: Json, returned: Json | None, fixed_ns: float, cold: Json, cores: float
) -> Json:
    """The profile's ``host``, from :func:`host_calls`, :func:`latency`, :func:`returns`, the time of an
    empty kernel, :func:`cold_calls`, and the number of cores."""
    both = max(late["median"] - fixed_ns, 0.0)
    if returned is not None:
        sync = float(np.clip(returned["median"], 0.0, both))
        split = "start and sync: their sum by the host's clock, sync from exact spans"
    else:
        sync = both / 2
        split = "start and sync: only their sum is measured (no exact spans), half for each"
    fitted = fit_cold(cold)
    ends = fitted.pop("cold")
    return {
        "cores": cores,
        "launch_ns": calls["launch"]["median"],
        "copy_ns": calls["copy"]["median"],
        "record_ns": calls["record"]["median"],
        "wait_ns": calls["wait"]["median"],
        "between_ns": max(calls["between"]["median"], 0.0),
        "sync_ns": round(sync, 1),
        "sync_idle_ns": calls["sync_idle"]["median"],
        "start_ns": round(both - sync, 1),
        "submit_share": SUBMIT_SHARE,
        "cold_launch_ns": ends["launch"],
        "cold_copy_ns": ends["copy"],
        "cold_event_ns": round(median([ends["record"], ends["wait"]]), 1),
        **fitted,
        "measured": {"calls": dict(calls), "latency": late, "returns": returned, "cold": cold},
        "source": f"measured: bare calls among others, and after work and staging; {split}",
    }
