"""The copy engines and the pauses between ops."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from heterolab.device.calibrate.bench import Lane
from heterolab.device.calibrate.calls import SMALL
from heterolab.device.calibrate.figures import Json, Recorded, median, spin
from heterolab.device.calibrate.noise import ON_DEVICE, table_of, wanted
from heterolab.device.calibrate.rig import Arena, Rig, Step, medians
from heterolab.pipeline.kernels import empty

#: Copies in both directions at once: beyond these bytes they slow each other down more.
BOTH_LARGE = 1 << 26
#: Where the next stream that shares a copy channel is looked for.
MOST_CHANNELS = 16
BEHIND_NS = 400_000


def octaves(first: int, most: int, factor: int = 2) -> list[int]:
    """Sizes from `first` to `most`, each `factor` times the one before."""
    sizes = [first]
    while sizes[-1] * factor <= most:
        sizes.append(sizes[-1] * factor)
    return sizes


# -- copies ----------------------------------------------------------------------------------


def copies(rig: Rig) -> Json:
    """Tables of pinned copies in both directions, and of copies inside the device."""
    most = rig.arena.most_bytes

    def into(arena: Arena, nbytes: int) -> Step:
        here, there = arena.bytes("pinned", nbytes), arena.bytes("device", nbytes)
        return lambda stream: stream.copy(there, here)

    def back(arena: Arena, nbytes: int) -> Step:
        here, there = arena.bytes("pinned", nbytes), arena.bytes("device", nbytes)
        return lambda stream: stream.copy(here, there)

    def inside(arena: Arena, nbytes: int) -> Step:
        one, other = arena.bytes("device", nbytes), arena.bytes("device", nbytes, 1)
        return lambda stream: stream.copy(other, one)

    out = {}
    for name, make, sizes in (
        ("h2d", into, octaves(256, most)),
        ("d2h", back, octaves(256, most)),
        ("inside", inside, octaves(1 << 10, most, 4)),
    ):
        out[name] = table_of(rig.durations(f"copies {name}", sizes, make), rig.noise, f"copies {name}")
    return out


def both_directions(rig: Rig) -> Json:
    """The speed of copies while the other direction is busy too, by size.

    Two streams copy K times each; the shorter of the two alone (a) runs beside the other all the
    time, so both together take a / speed + (b - a).
    """
    up, down = rig.lanes[:2]
    arena = rig.arena
    sizes = [n for n in (1 << 20, 1 << 22, 1 << 24, 1 << 26, 1 << 28) if n <= arena.most_bytes]

    def thousandths(nbytes: int) -> list[float]:
        count = int(np.clip((1 << 27) // nbytes, 2, 16))
        here, there = arena.bytes("pinned", nbytes), arena.bytes("device", nbytes)
        back, gone = arena.bytes("pinned", nbytes, 1), arena.bytes("device", nbytes, 1)

        def issue(ups: int, downs: int) -> Callable[[], None]:
            def go() -> None:
                down.wait(up.record())
                for i in range(max(ups, downs)):
                    if i < ups:
                        up.copy(there, here)
                    if i < downs:
                        down.copy(back, gone)

            return go

        hold = rig.hold_ns(issue(count, count))
        found = []
        for _ in range(2):
            nothing, one, other, both = (
                rig.wall(up, hold, issue(*counts))
                for counts in ((0, 0), (count, 0), (0, count), (count, count))
            )
            a, b = sorted((one - nothing, other - nothing))
            found.append(1000 * float(np.clip(a / max(both - nothing - (b - a), 1.0), 0.05, 1.0)))
        return found

    def measure(keys: Collection[int] | None) -> dict[int, list[float]]:
        return {nbytes: thousandths(nbytes) for nbytes in wanted(keys, sizes)}

    rows = rig.noise.samples("both directions at once", measure, ON_DEVICE, floor=50)
    speeds = {nbytes: round(row["median"] / 1000, 3) for nbytes, row in rows.items()}
    small = [speed for nbytes, speed in speeds.items() if nbytes <= BOTH_LARGE]
    large = [speed for nbytes, speed in speeds.items() if nbytes > BOTH_LARGE]
    usual = round(median(small), 3)
    return {
        "both_speed": usual,
        "both_large_bytes": BOTH_LARGE,
        "both_large_speed": min(large[0], usual) if large else usual,
        "measured": {f"{nbytes} bytes, thousandths": row for nbytes, row in rows.items()},
    }


def channels(rig: Rig) -> Json:
    """How many copy channels there are: a copy that waits holds up those behind it in its channel,
    other streams' included. So the first stream that a waiting copy of stream 0 holds up tells."""
    lanes, arena, first = rig.lanes, rig.arena, rig.lanes[0]
    here, there = arena.bytes("pinned", SMALL), arena.bytes("device", SMALL)
    back = arena.bytes("device", SMALL, 1)
    hold = spin(BEHIND_NS)

    def held(lane: Lane) -> bool:
        walls = []
        for _ in range(4):
            rig.bench.synchronize()
            start = rig.bench.now()
            first.launch(hold)
            first.copy(there, here)
            lane.copy(back, here)
            lane.synchronize()
            walls.append(rig.bench.now() - start)
        return min(walls) > 0.8 * BEHIND_NS

    behind = [i for i in range(1, min(MOST_CHANNELS + 1, len(lanes))) if held(lanes[i])]
    return {
        "channels": behind[0] if behind else rig.bench.device.limits.streams,
        "measured": {"held up by stream 0": behind},
    }


# -- pauses ----------------------------------------------------------------------------------


def pauses(rig: Rig) -> dict[str, Json]:
    """By how much one more of each kind of step makes a chain longer, ns."""
    one, other = rig.lanes[:2]
    blocking, default = rig.blocking, rig.bench.default
    arena, nothing = rig.arena, empty()
    here, there = arena.bytes("pinned", SMALL), arena.bytes("device", SMALL)
    back, gone = arena.bytes("pinned", SMALL, 1), arena.bytes("device", SMALL, 1)

    def through_events() -> None:
        for ahead, behind in ((one, other), (other, one)):
            ahead.launch(nothing)
            behind.wait(ahead.record())

    def alternating(*steps: Callable[[], Any]) -> Callable[[], None]:
        def go() -> None:
            for step in steps:
                step()

        return go

    chains: dict[str, tuple[Lane, Callable[[], Any]]] = {
        "kernels": (one, lambda: one.launch(nothing)),
        "copies h2d": (one, lambda: one.copy(there, here)),
        "copies d2h": (one, lambda: one.copy(back, gone)),
        "copy and kernel": (one, alternating(lambda: one.copy(there, here), lambda: one.launch(nothing))),
        "h2d and d2h": (one, alternating(lambda: one.copy(there, here), lambda: one.copy(back, gone))),
        "two kernels through events": (one, through_events),
        "two kernels, default stream": (
            blocking,
            alternating(lambda: blocking.launch(nothing), lambda: default.launch(nothing)),
        ),
    }

    def measure(keys: Collection[str] | None) -> dict[str, list[float]]:
        return {name: rig.increments(*chains[name]) for name in wanted(keys, chains)}

    return rig.noise.samples("pauses", measure)


def copy_share(rig: Rig) -> float | None:
    """Of the pauses copy → kernel and kernel → copy together, the part before the kernel.

    None where spans are not exact: then it cannot be seen.
    """
    if not rig.exact:
        return None
    device, arena = rig.traced, rig.traced_arena
    here, there = arena.bytes("pinned", SMALL), arena.bytes("device", SMALL)
    stream, nothing, hold = device.streams(1)[0], empty(), spin(BEHIND_NS)
    ops: list[tuple[int, int, int]] = []
    with Recorded(device) as recorded:
        for _ in range(rig.repeats * 3):
            stream.launch(hold)
            ops.append((stream.copy(there, here), stream.launch(nothing), stream.copy(there, here)))
            stream.synchronize()
    spans = recorded.on_device()
    before = [spans[b].start_ns - spans[a].end_ns for a, b, _ in ops]
    behind = [spans[c].start_ns - spans[b].end_ns for _, b, c in ops]
    total = max(median(before), 0.0) + max(median(behind), 0.0)
    return max(median(before), 0.0) / total if total else 0.5


def gaps_section(
    chains: dict[str, Json], copied: Json | None, fixed_ns: float | None, share: float | None
) -> Json:
    """The profile's ``gaps``, from chains and from what one op lasts.

    Parameters
    ----------
    copied, fixed_ns
        Tables of single copies, and the time of an empty kernel, from exact spans. None: an op lasts
        as long as its chain says, the pause between two of a kind included.
    """
    each = medians(chains)
    into, back, kernel = each["copies h2d"], each["copies d2h"], each["kernels"]
    exact = copied is not None and fixed_ns is not None
    if exact:
        assert copied is not None
        into, back = (float(np.interp(SMALL, copied[k]["sizes"], copied[k]["ns"])) for k in ("h2d", "d2h"))
        kernel = float(fixed_ns or 0.0)
    between = max(each["copy and kernel"] - into - kernel, 0.0)
    part = 0.5 if share is None else share
    kernel_kernel = max(each["kernels"] - kernel, 0.0)
    through_event = each["two kernels through events"] / 2 - kernel
    legacy = each["two kernels, default stream"] / 2 - kernel - kernel_kernel
    how = (
        "chains of ops behind a spinning kernel by the host's clock, less what each op lasts"
        if exact
        else "chains of ops behind a spinning kernel by the host's clock; pauses between ops of one kind are "
        "counted with the ops, copy → kernel and back half each (no exact spans)"
    )
    copy_copy = median([each["copies h2d"] - into, each["copies d2h"] - back])
    return {
        "copy_kernel_ns": round(part * between, 1),
        "kernel_copy_ns": round((1 - part) * between, 1),
        "kernel_kernel_ns": round(kernel_kernel, 1),
        "copy_copy_ns": round(max(copy_copy, 0.0), 1),
        "turn_ns": round(max((each["h2d and d2h"] - into - back) / 2, 0.0), 1),
        "event_ns": round(max(through_event, 0.0), 1),
        "legacy_ns": round(max(legacy, 0.0), 1),
        "measured": chains,
        "source": f"measured: {how}",
    }
