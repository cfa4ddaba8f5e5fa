"""Predictions beyond what was measured: larger copies and kernels, more streams, more launches.

Nothing here compares with a measurement. What has to hold for any machine: more work takes
longer, a little more takes a little longer, and far beyond the tables a copy goes at a steady
rate.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heterolab.device.profile import DeviceProfile
from heterolab.device.programs import Program
from heterolab.device.replay import Player

PROFILES = ("h200", "a100", "t4")
PLAYERS = {name: Player(DeviceProfile.load(name)) for name in PROFILES}
H200 = PLAYERS["h200"]
SYNC = {"op": "sync"}
#: Eight sizes an octave from 1 KiB to 256 MiB.
SIZES = [round(1024 * 2 ** (i / 8)) for i in range(18 * 8 + 1)]


def program(*ops: dict[str, Any], streams: int = 1, blocking: int = 0) -> Program:
    """A program that ends with a synchronise; the first `blocking` streams are blocking ones."""
    return Program("made-up", "made-up", tuple(i < blocking for i in range(streams)), (*ops, SYNC), ())


def wall_us(*ops: dict[str, Any], streams: int = 1, player: Player = H200) -> float:
    return player.wall_us(program(*ops, streams=streams))


def move(way: str, nbytes: int, host: str, stream: int = 0) -> dict[str, Any]:
    return {"op": way, "stream": stream, "bytes": nbytes, "host": host}


def vadd(n: int, stream: int = 0, **more: Any) -> dict[str, Any]:
    return {"op": "kernel", "kernel": "vadd", "n": n, "stream": stream, **more}


def spin(blocks: int, threads: int, ns: int, stream: int = 0) -> dict[str, Any]:
    return {
        "op": "kernel",
        "kernel": "spin",
        "stream": stream,
        "blocks": blocks,
        "threads": threads,
        "ns": ns,
    }


def gemm(m: int, dtype: str = "float16", stream: int = 0) -> dict[str, Any]:
    return {"op": "kernel", "kernel": "gemm", "m": m, "dtype": dtype, "stream": stream}


# -- one op, over its size -----------------------------------------------------------------


@pytest.mark.parametrize("name", PROFILES)
@pytest.mark.parametrize("host", ["pinned", "pageable"])
@pytest.mark.parametrize("way", ["h2d", "d2h"])
def test_a_larger_copy_takes_longer_and_never_jumps(way: str, host: str, name: str) -> None:
    """An eighth of an octave is 9 % more bytes: at most 20 % more time, also where the rate of
    pageable copies falls (a third between 8 and 64 MiB), and where another chunk begins."""
    walls = [wall_us(move(way, nbytes, host), player=PLAYERS[name]) for nbytes in SIZES]
    for (small, a), (large, b) in itertools.pairwise(zip(SIZES, walls, strict=True)):
        assert b >= a - 0.002, f"{large} bytes in {b} µs, {small} in {a}"
        assert b <= 1.2 * a, f"{large} bytes in {b} µs, {small} in {a}"


@pytest.mark.parametrize("way", ["h2d", "d2h"])
def test_one_byte_more_is_no_new_regime(way: str) -> None:
    """Around every knot, chunk and bound that the profile names."""
    profile = H200.profile
    assert profile.pageable is not None
    assert profile.pageable.h2d is not None
    chunk = int(profile.pageable.chunk_bytes)
    edges = {*profile.pageable.h2d.sizes, *profile.pageable.d2h.sizes, *profile.copies.h2d.sizes}
    edges |= {chunk * k for k in (1, 2, 3, 16)} | {profile.copies.both_large_bytes}
    for edge in sorted(int(edge) for edge in edges if edge >= 1024):
        for host in ("pinned", "pageable"):
            before, after = (wall_us(move(way, edge + more, host)) for more in (-1, 1))
            assert after == pytest.approx(before, rel=0.02), f"{host} {edge}"


def test_a_chunk_more_is_a_chunk_later() -> None:
    """What follows the staging of the last piece does not vanish at a chunk's end, nor double."""
    profile = H200.profile
    assert profile.pageable is not None
    chunk = int(profile.pageable.chunk_bytes)
    for k in (1, 2, 8):
        before, after = (wall_us(move("h2d", k * chunk + more, "pageable")) for more in (0, 1024))
        assert abs(after - before) < 0.1 * before + profile.copies.h2d.at(chunk) / 1000


@pytest.mark.parametrize("way", ["h2d", "d2h"])
def test_pageable_is_never_faster_than_pinned_nor_absurdly_slow(way: str) -> None:
    for nbytes in SIZES:
        pinned, pageable = (wall_us(move(way, nbytes, host)) for host in ("pinned", "pageable"))
        assert pageable >= 0.9 * pinned, nbytes
        assert nbytes / (pageable * 1000) > 3 or nbytes < 2**18, f"{nbytes} bytes at under 3 GB/s"


@pytest.mark.parametrize("way", ["h2d", "d2h"])
def test_large_copies_go_at_a_steady_rate(way: str) -> None:
    """Twice the bytes, twice the time, from where the table ends."""
    for host, rates in (("pinned", (50, 60)), ("pageable", (4, 12))):
        one, two = (wall_us(move(way, nbytes, host)) for nbytes in (2**28, 2**29))
        assert two / one == pytest.approx(2, rel=0.05)
        assert rates[0] < 2**29 / (two * 1000) < rates[1], "GB/s"


@pytest.mark.parametrize("name", PROFILES)
def test_vector_adds_grow_and_end_up_at_the_memory_rate(name: str) -> None:
    sizes = [round(256 * 2 ** (i / 4)) for i in range(4 * 22)]
    walls = [wall_us(vadd(n), player=PLAYERS[name]) for n in sizes]
    assert all(b >= a - 0.002 for a, b in itertools.pairwise(walls))
    assert all(b <= 1.3 * a for a, b in itertools.pairwise(walls)), "19 % more elements"
    one, two = (wall_us(vadd(n), player=PLAYERS[name]) for n in (2**29, 2**30))
    assert two / one == pytest.approx(2, rel=0.02)
    if name == "h200":
        assert 2.8 < 12 * 2**30 / (two * 1e6) < 3.6, "TB/s"


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_products_grow_with_the_cube_and_stay_below_the_peak(dtype: str) -> None:
    sizes = [round(256 * 2 ** (i / 8)) for i in range(8 * 6 + 1)]
    walls = [wall_us(gemm(m, dtype)) for m in sizes]
    assert all(b >= a - 0.002 for a, b in itertools.pairwise(walls))
    # 9 % more in m is 30 % more arithmetic.
    assert all(b <= 1.45 * a for a, b in itertools.pairwise(walls))
    one, two = (wall_us(gemm(m, dtype)) for m in (16384, 32768))
    assert 4 <= two / one <= 9
    peak = {"float32": 67.0, "float16": 990.0, "bfloat16": 990.0}[dtype]
    for m in (2048, 3072, 4096, 6144, 8192, 16384):
        assert 2 * m**3 / (wall_us(gemm(m, dtype)) * 1e6) < peak, f"m = {m}: above the datasheet's TFLOP/s"


def test_mapped_reads_go_at_the_links_rate() -> None:
    walls = [wall_us(vadd(n, operand="mapped")) for n in (2**10, 2**16, 2**20, 2**24, 2**26)]
    assert walls == sorted(walls)
    assert 45 < 4 * 2**26 / (walls[-1] * 1000) < 56, "GB/s"


def test_both_directions_slow_each_other_down_gradually() -> None:
    """At no size does a byte more make both much slower; at most twice as slow as one alone."""
    before = 0.0
    for nbytes in [2**k for k in range(16, 30)]:
        ops = [move("h2d", nbytes, "pinned", 0), move("d2h", nbytes, "pinned", 1)]
        both, alone = wall_us(*ops, streams=2), wall_us(ops[0])
        assert alone <= both <= 2 * alone + 10
        share = both / alone
        if before:
            assert share == pytest.approx(before, rel=0.1)
        before = share if nbytes >= 2**22 else 0.0
    copies = H200.profile.copies
    assert copies.both_at(copies.both_large_bytes) == copies.both_speed
    assert copies.both_at(copies.both_large_bytes + 1) == pytest.approx(copies.both_speed)
    assert copies.both_at(4 * copies.both_large_bytes) == pytest.approx(copies.both_large_speed)
    assert copies.both_at(2**40) == copies.both_large_speed


# -- many ops ------------------------------------------------------------------------------


def test_hundreds_of_launches_cost_so_many_launches() -> None:
    """Kernels that the host launches more slowly than they run: the wall is the launches'."""
    costs = H200.profile.host
    ns = costs.launch_ns + costs.between_ns
    walls = [wall_us(*[vadd(1024)] * count) for count in (200, 400, 800, 2000)]
    for (a, b), more in zip(itertools.pairwise(walls), (200, 400, 1200), strict=True):
        assert (b - a) * 1000 == pytest.approx(more * ns, rel=0.02)


def test_a_long_queue_behind_a_long_kernel_runs_back_to_back() -> None:
    """1,000 launches ahead of the device. (How deep the real queue is was not measured: the
    simulated one has no end.)"""
    gap, fixed = H200.profile.gaps.kernel_kernel_ns, H200.profile.compute.fixed_ns
    long = spin(1, 32, 20_000_000)
    alone, behind = wall_us(long), wall_us(long, *[spin(1, 32, 1000)] * 1000)
    assert (behind - alone) * 1000 == pytest.approx(1000 * (1000 + fixed + gap), rel=0.02)


@pytest.mark.parametrize("streams", [1, 2, 4, 5, 8, 16, 32, 64])
def test_more_streams_never_take_longer_than_one(streams: int) -> None:
    """The same copies and kernels, dealt out: overlap helps, and no channel loses any."""
    ops = [
        op
        for i in range(64)
        for s in [i % streams]
        for op in (move("h2d", 2**21, "pinned", s), vadd(2**19, s), move("d2h", 2**21, "pinned", s))
    ]
    one = wall_us(*[{**op, "stream": 0} for op in ops])
    many = H200.replay(program(*ops, streams=streams))
    assert many.wall_us <= 1.02 * one
    assert len(many.spans) == len(ops)
    copies = 64 * H200.profile.copies.h2d.at(2**21) / 1000
    assert many.wall_us >= copies, "one engine a direction"


def test_sixteen_streams_of_small_grids_run_side_by_side() -> None:
    """Two of 132 SMs each: as many at once as were launched in time; 128 at most."""
    one = wall_us(spin(4, 1024, 500_000))
    for streams in (2, 16, 60):
        many = wall_us(*[spin(4, 1024, 500_000, s) for s in range(streams)], streams=streams)
        assert many < one + streams * 10 + 50, f"{streams} streams"


def test_many_events_cost_what_their_calls_cost() -> None:
    costs = H200.profile.host
    marks = [
        op
        for i in range(300)
        for op in (
            {"op": "record", "event": i, "stream": i % 16},
            {"op": "wait", "event": i, "stream": (i + 1) % 16},
        )
    ]
    wall = wall_us(vadd(1024), *marks, vadd(1024), streams=16)
    bare = wall_us(vadd(1024), vadd(1024), streams=16)
    ns = 300 * (costs.record_ns + costs.wait_ns + 2 * costs.between_ns)
    assert (wall - bare) * 1000 == pytest.approx(ns, rel=0.05)


def test_a_chain_over_sixteen_streams_is_serial() -> None:
    """Each kernel waits for the one before, through an event: no overlap, and a pause each."""
    ops: list[dict[str, Any]] = []
    for i in range(48):
        if i:
            ops.append({"op": "wait", "event": i - 1, "stream": i % 16})
        ops += [spin(1, 32, 100_000, i % 16), {"op": "record", "event": i, "stream": i % 16}]
    replay = H200.replay(program(*ops, streams=16))
    spans = [replay.spans[op] for op in sorted(replay.spans)]
    pause = H200.profile.gaps.event_ns / 1000
    for (_, end), (start, _) in itertools.pairwise(spans):
        assert start - end == pytest.approx(pause, abs=0.1)


def test_the_default_stream_among_blocking_and_other_streams() -> None:
    """A kernel on the legacy default stream waits for blocking streams, and only for them."""
    ops = [*[spin(1, 32, 300_000, s) for s in range(8)], spin(1, 32, 1000, -1)]
    replay = H200.replay(program(*ops, streams=8, blocking=4))
    default_start = replay.spans[8][0]
    assert default_start >= max(replay.spans[s][1] for s in range(4))
    assert default_start < max(replay.spans[s][1] for s in range(4, 8))


# -- anything ------------------------------------------------------------------------------

sizes = st.integers(10, 26).flatmap(lambda k: st.integers(2**k, 2 ** (k + 1)))
ops = st.one_of(
    st.builds(
        move,
        st.sampled_from(["h2d", "d2h"]),
        sizes,
        st.sampled_from(["pinned", "pageable"]),
        st.integers(-1, 15),
    ),
    st.builds(vadd, sizes.map(lambda n: n // 4), st.integers(-1, 15)),
    st.builds(spin, st.integers(1, 2000), st.integers(1, 1024), st.integers(0, 500_000), st.integers(-1, 15)),
    st.builds(
        gemm,
        st.integers(64, 6000),
        st.sampled_from(["float32", "float16", "bfloat16"]),
        st.integers(-1, 15),
    ),
    st.builds(lambda us: {"op": "host", "us": us}, st.integers(0, 500)),
    st.just(SYNC),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(ops, max_size=40), st.integers(0, 16))
def test_any_program_has_sound_spans(listed: list[dict[str, Any]], blocking: int) -> None:
    """Every copy and kernel runs once, for a finite time, in its stream's order, before the end."""
    replay = H200.replay(program(*listed, streams=16, blocking=blocking))
    assert math.isfinite(replay.wall_us)
    assert list(replay.exits_us) == sorted(replay.exits_us)
    last: dict[int, float] = {}
    for i, op in enumerate(listed):
        if op["op"] in ("h2d", "d2h", "kernel"):
            start, end = replay.spans[i]
            assert 0 < start <= end <= replay.wall_us
            assert start >= last.get(op["stream"], 0.0)
            last[op["stream"]] = end


@settings(max_examples=30, deadline=None)
@given(st.lists(ops, min_size=1, max_size=15))
def test_one_more_op_never_makes_a_stream_shorter(listed: list[dict[str, Any]]) -> None:
    """On one stream, with nothing to overlap, the end moves on with every op."""
    alone = [{**op, "stream": 0} if "stream" in op else op for op in listed]
    walls = [wall_us(*alone[: i + 1]) for i in range(len(alone))]
    assert np.all(np.diff(walls) >= -0.01)
