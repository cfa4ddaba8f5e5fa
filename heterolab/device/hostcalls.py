"""What calls to the device cost the host, from when a real host was in which call.

A call is dear when the caches are cold: after other work, after staging memory, the first time
(see :class:`~heterolab.device.profile.HostCosts`). Each kind of call gets a warm cost and what
it costs more when cold; how fast caches turn cold is the same for all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heterolab.device.programs import Program

Json = dict[str, Any]
Floats = NDArray[np.float64]

#: Coordinate descent: relative steps, each tried until no constant gains by it any more, and
#: what counts as a gain.
STEPS = (0.4, 0.2, 0.1, 0.05)
GAIN = 5e-5


def _call_kind(op: Json) -> str | None:
    """Under which name the simulator keeps how long ago a call was made; None: it blocks."""
    if op["op"] == "kernel":
        return f"gemm.{op['dtype']}" if op["kernel"] == "gemm" else "launch"
    if op["op"] in ("h2d", "d2h"):
        return "copy"
    return op["op"] if op["op"] in ("record", "wait") else None


#: Calls that share a cost, and the constants of it: warm, and more when cold.
_GROUPS = {
    "launch": ("launch",),
    "copy": ("copy",),
    "record": ("record",),
    "wait": ("wait",),
    "gemm.half": ("gemm.float16", "gemm.bfloat16"),
    "gemm.float32": ("gemm.float32",),
}


class Calls:
    """The non-blocking calls of all programs: how long each took, and what came before it."""

    def __init__(self, programs: Sequence[Program]) -> None:
        rows: dict[str, list[tuple[float, float, float, float, float]]] = defaultdict(list)
        between = []
        for program in programs:
            times = np.array([p.host_us for p in program.passes]) * 1000
            took = np.median(times[:, :, 1] - times[:, :, 0], axis=0)
            pause = np.median(times[:, 1:, 0] - times[:, :-1, 1], axis=0)
            counts: dict[str, int] = defaultdict(int)
            last: dict[str, tuple[float, float]] = {}
            work = staged = 0.0
            mine = []
            for i, op in enumerate(program.ops):
                kind = _call_kind(op)
                if kind is not None:
                    first = kind not in last
                    before = last.get(kind, (0.0, 0.0))
                    if op.get("host") != "pageable":
                        counts[kind] += 1
                        mine.append((kind, took[i], work - before[0], staged - before[1], first))
                    last[kind] = work, staged
                if op["op"] == "host":
                    work += op["us"] * 1000
                elif op.get("host") == "pageable":
                    staged += op["bytes"]
                if i:
                    between.append(pause[i - 1])
            for kind, ns, worked, nbytes, first in mine:
                rows[kind].append((ns, worked, nbytes, float(first), counts[kind] ** -0.5))
        self.between_ns = float(np.median(between)) if between else 200.0
        self.groups = {
            name: np.array([row for kind in kinds for row in rows[kind]]).reshape(-1, 5)
            for name, kinds in _GROUPS.items()
        }

    def costs(self, shape: Sequence[float]) -> tuple[float, dict[str, tuple[float, float]]]:
        """For the given (cold_work, cold_start, cold_bytes, cold_bytes_factor): the mean relative
        deviation, and (warm, cold) of each group of calls."""
        work, start, nbytes, factor = shape
        loss, found = 0.0, {}
        for name, rows in self.groups.items():
            if not len(rows):
                continue
            ns, worked, staged, first, weight = rows.T
            cold = 1 - np.exp(-(worked + first * start) / work) + factor * (1 - np.exp(-staged / nbytes))
            line = _warm_and_cold(cold, ns, weight)
            off = np.abs(line[0] + line[1] * cold - ns) / np.median(ns)
            loss += float((weight * np.minimum(off, 1)).sum() / weight.sum())
            found[name] = line
        return loss, found


def _warm_and_cold(cold: Floats, ns: Floats, weight: Floats) -> tuple[float, float]:
    """The line ns = warm + cold × coldness with the least weighted absolute deviations."""
    warm, more = float(np.median(ns)), 0.0
    near = 0.02 * warm
    for _ in range(30):
        w = np.sqrt(weight / np.maximum(np.abs(warm + more * cold - ns), near))
        design = np.stack((w, w * cold), 1)
        warm, more = np.linalg.lstsq(np.vstack((design, [0, 1e-3])), np.append(w * ns, 0), rcond=None)[0]
        if more < 0:
            warm, more = float(np.average(ns, weights=w**2)), 0.0
    return float(warm), float(more)


def fit_calls(data: Json, programs: Sequence[Program]) -> None:
    """What calls cost the host, warm and cold."""
    calls = Calls(programs)
    host = data["host"]
    names = ("cold_work_ns", "cold_start_ns", "cold_bytes", "cold_bytes_factor")
    shape, _ = descend([host[name] or 1.0 for name in names], lambda tried: calls.costs(tried)[0])
    _, found = calls.costs(shape)
    host |= dict(zip(names, shape, strict=True))
    host["between_ns"] = rounded(calls.between_ns)
    for name, (warm, cold) in found.items():
        for kind in _GROUPS[name]:
            if kind.startswith("gemm"):
                data["kernels"][kind] |= {"host_ns": rounded(warm), "cold_host_ns": rounded(cold)}
            else:
                host[f"{kind}_ns"] = rounded(warm)
    host |= {f"cold_{kind}_ns": rounded(found[kind][1]) for kind in ("launch", "copy") if kind in found}
    events = [found[kind][1] for kind in ("record", "wait") if kind in found]
    if events:
        host["cold_event_ns"] = rounded(float(np.mean(events)))


def descend(start: Sequence[float], loss: Callable[[Sequence[float]], float]) -> tuple[list[float], float]:
    """Coordinate descent: each number up and down by :data:`STEPS`, as long as the loss gets
    smaller by :data:`GAIN` or more. Gives the numbers and their loss."""
    found, best = list(start), loss(start)
    for step in STEPS:
        moved = True
        while moved:
            moved = False
            for i in range(len(found)):
                for factor in (1 + step, 1 / (1 + step)):
                    tried = [*found[:i], rounded(found[i] * factor), *found[i + 1 :]]
                    if (off := loss(tried)) < best - GAIN:
                        found, best, moved = tried, off, True
                        break
    return found, best


def rounded(value: float) -> float:
    """Three digits: more would not be known."""
    return float(f"{value:.3g}")
