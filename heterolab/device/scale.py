"""How fast the simulator is, and whether that holds for long runs.

The program is a *plain pipeline*: copy in, vector add, copy out, 64 Ki float32 at a time, on each
stream in turn, and a synchronize after every 16 such chunks. All effects of the physics are on;
values, jitter and the check for races are off, as they are when programs are replayed. On one
stream nothing contends with anything; on four, directions share the link and kernels the device.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from heterolab.device.base import Kernel, Work
from heterolab.device.host import cpu_time_ns
from heterolab.device.profile import DeviceProfile
from heterolab.device.sim import SimDevice

ELEMENTS, CHUNKS = 65536, 16
SIZES = (10**3, 10**4, 10**5, 10**6)
#: Each size is repeated for at least so much CPU time, and the fastest repeat counts.
REPEAT_NS = 1_000_000_000


@dataclass(frozen=True)
class Speed:
    """Ops (copies and kernels) simulated, and the CPU time of one core that took."""

    streams: int
    ops: int
    cpu_ns: int

    @property
    def ops_per_s(self) -> float:
        return self.ops * 1e9 / self.cpu_ns

    @property
    def us_per_op(self) -> float:
        return self.cpu_ns / self.ops / 1000


def plain(ops: int, streams: int = 1, profile: DeviceProfile | None = None) -> Speed:
    """Simulate a plain pipeline of at least `ops` copies and kernels, once."""
    device = SimDevice.open(profile or "h200", races="off", values=False)
    work = Work(flops=ELEMENTS, bytes=12 * ELEMENTS, blocks=ELEMENTS // 256, threads=256, size=ELEMENTS)
    kernel = Kernel("vector_add", lambda xp, reads, writes: None, lambda reads, writes: work)
    lanes = [
        (stream, device.buffer(ELEMENTS, "float32", "pinned"), (device.buffer(ELEMENTS),))
        for stream in device.streams(streams)
    ]
    chunks = -(-ops // 3)
    began = cpu_time_ns()
    for chunk in range(chunks):
        stream, here, there = lanes[chunk % streams]
        stream.copy(there[0], here)
        stream.launch(kernel, there, there)
        stream.copy(here, there[0])
        if chunk % CHUNKS == CHUNKS - 1:
            device.synchronize()
    device.synchronize()
    return Speed(streams, 3 * chunks, max(cpu_time_ns() - began, 1))


def scale(sizes: Sequence[int] = SIZES, streams: int = 1, repeat_ns: int = REPEAT_NS) -> list[Speed]:
    """The best speed of repeated plain pipelines, for each number of ops."""
    found = []
    for ops in sizes:
        began = cpu_time_ns()
        tries: list[Speed] = []
        while not tries or cpu_time_ns() - began < repeat_ns:
            tries.append(plain(ops, streams))
        found.append(min(tries, key=lambda speed: speed.cpu_ns))
    return found


def main(as_json: bool = False) -> str:
    """What ``heterolab bench scale`` prints: a table, or JSON."""
    speeds = [*scale(), *scale(SIZES[1:2], streams=4)]
    if as_json:
        rows = [vars(s) | {"ops_per_s": round(s.ops_per_s), "us_per_op": s.us_per_op} for s in speeds]
        return json.dumps(rows, indent=1)
    lines = [f"{'plain pipeline':16} {'ops':>9} {'ops/s':>9} {'µs an op':>9}"]
    for s in speeds:
        name = f"{s.streams} stream{'s' if s.streams > 1 else ''}"
        lines.append(f"{name:16} {s.ops:9,} {s.ops_per_s:9,.0f} {s.us_per_op:9.2f}")
    return "\n".join([*lines, "measured on this machine: CPU time of one core, the best of repeats"])
