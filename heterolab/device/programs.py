"""Stream programs: lists of device calls, together with what a real machine did with them.

A file of programs is a JSON list. Each one says in which order one host thread issued copies,
kernels, events, waits, synchronisations and work of its own, and holds measurements of it:
*passes* (untraced: walls, and when the host was in which call) and, where there is one, a
*traced* run (when each op ran on the device).
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from heterolab.errors import InputError


@dataclass(frozen=True)
class Pass:
    """One measured pass: its walls (repeats of the program), their median, and the host's times
    (entry, exit) of each op in the repeat that took `host_run_wall_us`. All in µs."""

    wall_us: float
    walls_us: tuple[float, ...]
    host_us: tuple[tuple[float, float], ...]
    host_run_wall_us: float


@dataclass(frozen=True)
class Traced:
    """One run under a tracer: the host's times of each op, and op → (start, end) on the device,
    in µs of the same clock."""

    host_us: tuple[tuple[float, float], ...]
    spans: Mapping[int, tuple[float, float]]


@dataclass(frozen=True)
class Program:
    """A stream program with its measurements. `ops` are checked dictionaries of the file;
    `blocking` says of each stream whether it synchronises with the legacy default stream."""

    id: str
    family: str
    blocking: tuple[bool, ...]
    ops: tuple[dict[str, Any], ...]
    passes: tuple[Pass, ...]
    traced: Traced | None = None

    @property
    def measured_us(self) -> float:
        """The median of the passes' walls."""
        return median(p.wall_us for p in self.passes)


def load_programs(path: str | Path) -> list[Program]:
    """Read a file of stream programs, gzipped or not.

    Raises
    ------
    InputError
        The file cannot be read, or something in it is missing or wrong; the message says where.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        programs = json.loads(data)
    except (OSError, EOFError, ValueError, RecursionError) as error:
        raise InputError(f"{path.name} cannot be read as stream programs in JSON ({error}).") from error
    if not isinstance(programs, list) or not programs:
        raise InputError(f"{path.name}: stream programs are a JSON list of at least one program.")
    return [_program(entry, f"{path.name}, program {number}") for number, entry in enumerate(programs)]


def _program(entry: Any, place: str) -> Program:
    try:
        place = f"{place} ({entry['id']!r})"
        streams = entry["streams"]
        ops = tuple(_op(op, len(streams), f"{place}, op {i}") for i, op in enumerate(entry["ops"]))
        _check_events(ops, place)
        passes = tuple(_pass(p, len(ops), place) for p in entry["measured"]["passes"])
        if not passes:
            raise InputError(f"{place}: measured.passes is empty; a score needs at least one.")
        blocking = tuple(bool(s.get("blocking", False)) for s in streams)
        traced = entry["measured"].get("traced")
        seen = None if traced is None else _traced(traced, len(ops), place)
        return Program(str(entry["id"]), str(entry["family"]), blocking, ops, passes, seen)
    except InputError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise InputError(f"{place} is damaged: {type(error).__name__} {error}.") from error


def _pass(entry: dict[str, Any], ops: int, place: str) -> Pass:
    walls = tuple(float(us) for us in entry["wall_us"])
    wall = median(walls)
    if not (math.isfinite(wall) and wall > 0):
        raise InputError(f"{place}: wall_us has the median {wall}; it must be above 0.")
    host = _host(entry, ops, place)
    return Pass(wall, walls, host, float(entry.get("host_run_wall_us", wall)))


def _traced(entry: dict[str, Any], ops: int, place: str) -> Traced:
    spans = {int(s["op"]): (float(s["start_us"]), float(s["end_us"])) for s in entry["spans"]}
    for op in spans:
        if not 0 <= op < ops:
            raise InputError(f"{place}: traced has a span of op {op}; there are {ops} ops, from 0.")
    return Traced(_host(entry, ops, place), spans)


def _host(entry: dict[str, Any], ops: int, place: str) -> tuple[tuple[float, float], ...]:
    host = tuple((float(entry_us), float(exit_us)) for entry_us, exit_us in entry["host_us"])
    if len(host) != ops:
        raise InputError(f"{place}: host_us has {len(host)} entries for {ops} ops.")
    return host


#: What each op needs: field → (least, most) or the values allowed.
_NEEDS: dict[str, dict[str, Any]] = {
    "h2d": {"bytes": (1, 2**40), "host": ("pinned", "pageable")},
    "d2h": {"bytes": (1, 2**40), "host": ("pinned", "pageable")},
    "kernel": {"kernel": ("vadd", "spin", "gemm")},
    "record": {"event": (0, 2**40)},
    "wait": {"event": (0, 2**40)},
    "sync_stream": {},
    "sync": {},
    "host": {"us": (0, 1e9)},
    "vadd": {"n": (1, 2**36)},
    "spin": {"blocks": (1, 2**31), "threads": (1, 1024), "ns": (0, 10**12)},
    "gemm": {"m": (1, 2**17), "dtype": ("float32", "float16", "bfloat16")},
}


def _op(op: dict[str, Any], streams: int, place: str) -> dict[str, Any]:
    """`op`, once every field that it needs is there and makes sense."""
    name = op["op"]
    if name not in _NEEDS or name in ("vadd", "spin", "gemm"):
        raise InputError(f"{place}: op {name!r} is not known.")
    needs = dict(_NEEDS[name])
    if name == "kernel":
        needs |= _NEEDS.get(op["kernel"], {})
    if name not in ("sync", "host"):
        needs["stream"] = (-1, streams - 1)
    for key, allowed in needs.items():
        value = op.get(key)
        if isinstance(allowed[0], str):
            good = value in allowed
            wanted = " or ".join(allowed)
        else:
            number = isinstance(value, int | float if key == "us" else int) and not isinstance(value, bool)
            good = number and allowed[0] <= value <= allowed[1]
            wanted = f"a number from {allowed[0]} to {allowed[1]:g}"
        if not good:
            raise InputError(f"{place} ({name}): {key} is {value!r}; it must be {wanted}.")
    return op


def _check_events(ops: Sequence[dict[str, Any]], place: str) -> None:
    """Refuse a wait for an event that was not recorded before."""
    known: set[int] = set()
    for i, op in enumerate(ops):
        if op["op"] == "record":
            known.add(op["event"])
        elif op["op"] == "wait" and op["event"] not in known:
            raise InputError(
                f"{place}, op {i}: waits for event {op['event']}, which nothing recorded before."
            )
