"""Host memory that is not pinned, or that kernels read where it is."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

import numpy as np

from heterolab.device.calibrate.calls import SMALL, SUBMIT_SHARE
from heterolab.device.calibrate.engines import octaves
from heterolab.device.calibrate.figures import Json, Recorded, median, spin
from heterolab.device.calibrate.noise import ON_DEVICE, ON_HOST, Noise, table_of, wanted
from heterolab.device.calibrate.rig import Arena, Rig, Step
from heterolab.pipeline.kernels import vector_add

#: Copies from pageable memory that are staged in pieces: what is larger than so many of them.
PIECES = 1 << 21


def pageable(rig: Rig) -> dict[str, dict[int, Json]]:
    """How long copies from and to ordinary memory hold the host, by direction and size.

    A program seldom copies the same bytes again, so each copy takes others; a small pinned one
    before it warms up the call.
    """
    lane, arena, bench = rig.lanes[0], rig.arena, rig.bench
    here, there = arena.bytes("pinned", SMALL), arena.bytes("device", SMALL)
    sizes = octaves(1024, arena.most_bytes)
    turn = 0

    def held(way: str, nbytes: int) -> list[float]:
        nonlocal turn
        found = []
        for _ in range(min(rig.repeats, 2) if nbytes > 1 << 24 else rig.repeats):
            turn += 1
            at = (turn * (nbytes + SMALL)) % max(arena.most_bytes - nbytes, 1)
            ours, theirs = arena.bytes("pageable", nbytes, 0, at), arena.bytes("device", nbytes)
            lane.copy(there, here)
            lane.synchronize()
            with bench.logged() as calls:
                lane.copy(*((theirs, ours) if way == "h2d" else (ours, theirs)))
            found.append(float(calls[0].ns))
            lane.synchronize()
        return found

    def measure(way: str, keys: Collection[int] | None) -> dict[int, list[float]]:
        return {nbytes: held(way, nbytes) for nbytes in wanted(keys, sizes)}

    return {
        way: rig.noise.samples(f"pageable {way}", partial(measure, way), ON_HOST) for way in ("h2d", "d2h")
    }


def staged_share(rig: Rig) -> Json | None:
    """When the first piece of a large copy from pageable memory goes over the link: ns since the
    call was entered, and how long it lasted. None where spans are not exact."""
    if not rig.exact:
        return None
    device, arena = rig.traced, rig.traced_arena
    stream = device.streams(1)[0]
    sizes = [n for n in (1 << 22, 1 << 23, 1 << 24) if PIECES < n <= arena.most_bytes]
    ops: list[tuple[int, int]] = []
    with Recorded(device) as recorded:
        for _ in range(rig.repeats):
            for nbytes in sizes:
                there, here = arena.bytes("device", nbytes), arena.bytes("pageable", nbytes)
                ops.append((nbytes, stream.copy(there, here)))
                stream.synchronize()
    spans, calls = recorded.on_device(), {s.op: s for s in recorded.calls("copy")}
    rows = [
        (nbytes, spans[op].start_ns - calls[op].start_ns, calls[op].end_ns - calls[op].start_ns)
        for nbytes, op in ops
        if op in spans
    ]
    return {"bytes, began, held": rows} if rows else None


def pageable_section(rows: dict[str, dict[int, Json]], staged: Json | None, host: Json, noise: Noise) -> Json:
    """The profile's ``pageable``."""
    into = table_of(rows["h2d"], noise, "pageable h2d")
    back = table_of(rows["d2h"], noise, "pageable d2h")
    # The table of d2h begins when the stream has come to the copy.
    until = SUBMIT_SHARE * host["copy_ns"] + host["start_ns"]
    for column in ("ns", "p10", "p90"):
        back[column] = [round(max(ns - until, 1.0), 1) for ns in back[column]]
    section: Json = {"h2d": into, "d2h": back}
    found = "the size of a staged piece is CUDA's usual one (not measured)"
    if staged is not None:
        begun = [n * (began - host["start_ns"]) / held for n, began, held in staged["bytes, began, held"]]
        if (chunk := round(median(begun))) >= SMALL:
            section["chunk_bytes"] = chunk
            found = "the size of a staged piece from when the first one went over the link"
    section["source"] = f"measured: bare calls, each with bytes that were not copied just before; {found}"
    return section


def mapped(rig: Rig) -> Json:
    """Kernels that read host memory over the link: a table of bytes read → ns."""
    sizes = [n for n in (1 << 12, 1 << 16, 1 << 20, 1 << 22, 1 << 24, 1 << 26) if n <= rig.arena.most_bytes]
    add = vector_add()

    def make(arena: Arena, nbytes: int) -> Step:
        far, near, out = _mapped_operands(arena, nbytes)
        return lambda stream: stream.launch(add, [far, near], [out])

    return table_of(rig.durations("mapped reads", sizes, make), rig.noise, "mapped reads")


def _mapped_operands(arena: Arena, nbytes: int) -> tuple[Any, Any, Any]:
    count = nbytes // 4
    most = min(1 << 24, arena.most_elements)
    far = arena.array(most, "float32", 0, "mapped")[:count]
    return far, arena.floats(count, 1), arena.floats(count, 2)


def mapped_share(rig: Rig) -> Json:
    """How much of the link a kernel that reads host memory gets while copies go the same way."""
    reader, copier = rig.lanes[:2]
    arena, add = rig.arena, vector_add()
    nbytes = min(1 << 26, arena.most_bytes)
    far, near, out = _mapped_operands(arena, nbytes)
    here, there = arena.bytes("pinned", nbytes), arena.bytes("device", nbytes)

    def until_read(with_copies: bool, with_reader: bool = True) -> float:
        bench = rig.bench
        bench.synchronize()
        start = bench.now()
        reader.launch(hold)
        copier.wait(reader.record())
        if with_reader:
            reader.launch(add, [far, near], [out])
        if with_copies:
            for _ in range(6):
                copier.copy(there, here)
        reader.synchronize()
        taken = bench.now() - start
        bench.synchronize()
        return taken

    hold = spin(300_000)
    until_read(True)

    def thousandths() -> list[float]:
        found = []
        for _ in range(2):
            nothing, alone = until_read(False, False), until_read(False)
            share = (alone - nothing) / max(until_read(True) - nothing, 1.0)
            found.append(1000 * float(np.clip(share, 0.02, 1.0)))
        return found

    row = rig.noise.samples("reads beside copies", lambda keys: {None: thousandths()}, ON_DEVICE, floor=50)[
        None
    ]
    return {"mapped_share": round(row["median"] / 1000, 3), "measured": {"thousandths": row}}
