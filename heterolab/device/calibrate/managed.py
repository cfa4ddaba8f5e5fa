"""Managed memory: what a page fault costs a kernel and the host, and how fast pages move."""

from __future__ import annotations

from heterolab.device.base import Buffer
from heterolab.device.calibrate.figures import Json
from heterolab.device.calibrate.noise import ON_HOST
from heterolab.device.calibrate.rig import Rig, medians
from heterolab.pipeline.kernels import vector_add

#: Managed memory that is touched; more would take from others who use the GPU.
MANAGED_BYTES = 1 << 26
#: Page faults are answered for so many bytes at a time: the driver's rule, not measured.
GROUP_BYTES = 1 << 16


def managed(rig: Rig) -> Json | None:
    """The profile's ``managed``; None where host and device cannot share managed memory.

    A kernel adds a managed vector that the host has touched: by faults, and after a prefetch. Then
    the host touches it again.
    """
    if not rig.attributes.get("concurrent_managed_access"):
        return None
    bench, lane, add = rig.bench, rig.lanes[0], vector_add()
    count = min(MANAGED_BYTES // 4, rig.arena.most_elements)
    shared = bench.buffer(count, "float32", "managed")
    near, out = rig.arena.floats(count, 1), rig.arena.floats(count, 2)

    def touch() -> float:
        start = bench.now()
        view = shared.write()
        if bench.device.values:
            view[::256] = 1  # a number in each KiB: every page, and little work besides
        return bench.now() - start

    def run(operand: Buffer) -> float:
        start = bench.now()
        lane.launch(add, [operand, near], [out])
        lane.synchronize()
        return bench.now() - start

    def prefetch() -> float:
        start = bench.now()
        lane.prefetch(shared, "device")
        lane.synchronize()
        return bench.now() - start

    def measure(keys: object) -> dict[str, list[float]]:
        touch()
        faults = run(shared)
        back = touch()
        again = touch()
        moved = prefetch()
        nothing = prefetch()  # it is there
        return {
            "faults": [faults],
            "prefetched": [run(shared)],
            "prefetch": [moved - nothing],
            "host touches": [back - again],
        }

    run(shared)
    for _ in range(2):  # the first of each is slower
        touch()
        prefetch()
    rows = rig.noise.samples("managed memory", measure, ON_HOST)
    return section(rows, shared.nbytes)


def section(rows: dict[str, Json], nbytes: int) -> Json:
    """The profile's ``managed``, see :class:`~heterolab.device.profile.Managed`."""
    ns, share = medians(rows), GROUP_BYTES / nbytes
    prefetch = max(ns["prefetch"], 1.0)
    by_faults = ns["faults"] - ns["prefetched"] - prefetch
    return {
        "group_bytes": GROUP_BYTES,
        "fault_ns": round(max(by_faults, 0.0) * share, 1),
        "bytes_per_ns": round(nbytes / prefetch, 3),
        "host_fault_ns": round(max(ns["host touches"] - prefetch, 0.0) * share, 1),
        "concurrent": True,
        "measured": {"bytes": nbytes, **rows},
        "source": f"measured: a kernel over {nbytes >> 20} MiB that the host has touched, by faults and "
        "after a prefetch, and the host's touching them again; that faults are answered 64 KiB at a time "
        "is the driver's rule",
    }
