"""How right is the simulator? Replay measured stream programs on it, and compare the walls.

A *stream program* is a list of ops (copies, kernels, events, waits, host work) together with
what a real machine did with it. Each program runs here through the same seam as everything
else: :class:`SimDevice`, its streams and its host. Twice: once from the profile alone, and
once a measured pass with the host's own times of that pass fed in (its calls that do not block,
and the gaps between them), which judges the device model without the host's.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from heterolab.device.base import Buffer, Event, Kernel, Memory, Work
from heterolab.device.host import RealHost
from heterolab.device.profile import DeviceProfile
from heterolab.device.sim import SimDevice, SimStream
from heterolab.device.simhost import SimHost
from heterolab.errors import InputError

#: A prediction this far outside the range of the measured passes still counts as inside.
BAND = 0.05


@dataclass(frozen=True)
class Pass:
    """One measured pass: its wall, and the host's times (entry, exit) of each op, in µs."""

    wall_us: float
    host_us: tuple[tuple[float, float], ...]
    host_run_wall_us: float


@dataclass(frozen=True)
class Program:
    """A stream program with its measurements. `ops` are checked dictionaries of the file."""

    id: str
    family: str
    blocking: tuple[bool, ...]
    ops: tuple[dict[str, Any], ...]
    passes: tuple[Pass, ...]

    @property
    def measured_us(self) -> float:
        """The median of the passes' walls."""
        return median(p.wall_us for p in self.passes)


@dataclass(frozen=True)
class Prediction:
    """One program's wall, predicted and measured, in µs."""

    id: str
    family: str
    predicted_us: float
    predicted_with_recorded_host_us: list[float]
    measured_us: float


@dataclass(frozen=True)
class Report:
    """Predictions for a file of programs, and how many ops a second the simulator did."""

    programs: list[Prediction]
    ops_per_s: float
    inside: dict[str, bool]
    recorded_errors: dict[str, float]

    def errors(self, family: str | None = None) -> list[float]:
        """|predicted − measured| / measured of each program (of one family)."""
        return [
            abs(p.predicted_us - p.measured_us) / p.measured_us
            for p in self.programs
            if family in (None, p.family)
        ]


# -- the programs' file ------------------------------------------------------------------


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
        return Program(str(entry["id"]), str(entry["family"]), blocking, ops, passes)
    except InputError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise InputError(f"{place} is damaged: {type(error).__name__} {error}.") from error


def _pass(entry: dict[str, Any], ops: int, place: str) -> Pass:
    host = tuple((float(entry_us), float(exit_us)) for entry_us, exit_us in entry["host_us"])
    if len(host) != ops:
        raise InputError(f"{place}: host_us has {len(host)} entries for {ops} ops.")
    wall = median(float(us) for us in entry["wall_us"])
    if not (math.isfinite(wall) and wall > 0):
        raise InputError(f"{place}: wall_us has the median {wall}; it must be above 0.")
    return Pass(wall, host, float(entry.get("host_run_wall_us", wall)))


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


#: One byte that stands for all: copies and kernels move no values here.
_BYTES = np.broadcast_to(np.zeros(1, np.uint8), (2**40,))


# -- replaying one -----------------------------------------------------------------------


class RecordedHost(SimHost):
    """A host whose calls take the times that a real one took; what blocks is predicted.

    :meth:`play` says which recorded times the next call has.
    """

    def __init__(self, profile: DeviceProfile) -> None:
        super().__init__(profile)
        self._times = (0.0, 0.0)
        self._last_exit_us = 0.0

    def play(self, times: tuple[float, float]) -> None:
        """The next call's recorded entry and exit, in µs."""
        self._times = times

    def work(self, ns: float, gil: float = 1.0) -> None:
        self.enter(0.0, ns)

    def enter(self, between_ns: float, ns: float, held: bool = False) -> tuple[int, int]:
        entry_us, exit_us = self._times
        self.spend((entry_us - self._last_exit_us) * 1000)
        entry = self.now()
        self.spend(ns if held else (exit_us - entry_us) * 1000)
        self._last_exit_us = exit_us
        return entry, self.now()


class Player:
    """Runs programs on a simulated device, op by op, through the seam."""

    def __init__(self, profile: DeviceProfile) -> None:
        # The programs were issued by bare calls, not through this package.
        self.profile = replace(profile, seam=None)

    def wall_us(self, program: Program, recorded: Pass | None = None) -> float:
        """The predicted wall of `program`: from the first call to the end of the last."""
        host = SimHost(self.profile) if recorded is None else RecordedHost(self.profile)
        device = SimDevice.open(self.profile, races="off", values=False, host=host)
        steps = _Steps(device, program.blocking)
        for i, op in enumerate(program.ops):
            if recorded is not None:
                assert isinstance(host, RecordedHost)
                host.play(recorded.host_us[i])
            steps.do(op)
        return host.now() / 1000


class _Steps:
    """A program's ops as calls to a device's streams. One arena a memory kind stands for all
    buffers: only sizes matter here."""

    def __init__(self, device: SimDevice, blocking: Sequence[bool]) -> None:
        self.device = device
        self.streams: list[SimStream] = [device.stream(non_blocking=not b) for b in blocking]
        self.events: dict[int, Event] = {}
        self._buffers: dict[tuple[Memory, int], Buffer] = {}

    def do(self, op: dict[str, Any]) -> None:
        kind = op["op"]
        stream = self._stream(op.get("stream", -1))
        if kind == "h2d":
            stream.copy(
                self._buffer(Memory.DEVICE, op["bytes"]), self._buffer(Memory(op["host"]), op["bytes"])
            )
        elif kind == "d2h":
            stream.copy(
                self._buffer(Memory(op["host"]), op["bytes"]), self._buffer(Memory.DEVICE, op["bytes"])
            )
        elif kind == "kernel":
            kernel, reads = self._kernel(op)
            stream.launch(kernel, reads)
        elif kind == "record":
            self.events[op["event"]] = stream.record()
        elif kind == "wait":
            stream.wait(self.events[op["event"]])
        elif kind == "sync_stream":
            stream.synchronize()
        elif kind == "sync":
            self.device.synchronize()
        else:
            self.device.host.work(op["us"] * 1000)

    def _stream(self, index: int) -> SimStream:
        return self.device.default_stream if index < 0 else self.streams[index]

    def _buffer(self, memory: Memory, nbytes: int) -> Buffer:
        key = (memory, nbytes)
        if key not in self._buffers:
            self._buffers[key] = Buffer(self.device, _BYTES[:nbytes], memory)
        return self._buffers[key]

    def _kernel(self, op: dict[str, Any]) -> tuple[Kernel, tuple[Buffer, ...]]:
        if op["kernel"] == "vadd":
            n, mapped = op["n"], op.get("operand") == "mapped"
            reads = (self._buffer(Memory.MAPPED, 4 * n),) if mapped else ()
            work = Work(flops=n, bytes=12 * n, blocks=-(-n // 256), threads=256, size=n)
            return _kernel("vector_add", work), reads
        if op["kernel"] == "spin":
            return _kernel("spin", Work(blocks=op["blocks"], threads=op["threads"], block_ns=op["ns"])), ()
        return _kernel(f"gemm.{op['dtype']}", gemm(op["m"], op["dtype"])), ()


def gemm(m: int, dtype: str) -> Work:
    """The cost of an m × m × m matrix product: tiles of 128 × 128, two on an SM."""
    itemsize = 4 if dtype == "float32" else 2
    tiles = (-(-m // 128)) ** 2
    return Work(flops=2.0 * m**3, bytes=3 * itemsize * m * m, dtype=dtype, blocks=tiles, threads=1024, size=m)


def _kernel(name: str, work: Work) -> Kernel:
    return Kernel(name, lambda xp, reads, writes: None, lambda reads, writes: work)


# -- the score ---------------------------------------------------------------------------


def score(programs: Sequence[Program], profile: DeviceProfile | None = None) -> Report:
    """Predict each program's wall and compare it with what was measured."""
    player = Player(profile or DeviceProfile.load("h200"))
    clock = RealHost()
    began = clock.now()
    walls = [player.wall_us(program) for program in programs]
    seconds = (clock.now() - began) / 1e9
    predictions, inside, recorded_errors = [], {}, {}
    for program, wall in zip(programs, walls, strict=True):
        recorded = [player.wall_us(program, p) for p in program.passes]
        predictions.append(Prediction(program.id, program.family, wall, recorded, program.measured_us))
        lowest, highest = (f(p.wall_us for p in program.passes) for f in (min, max))
        inside[program.id] = lowest * (1 - BAND) <= wall <= highest * (1 + BAND)
        recorded_errors[program.id] = median(
            abs(us - p.host_run_wall_us) / p.host_run_wall_us
            for us, p in zip(recorded, program.passes, strict=True)
        )
    ops = sum(len(program.ops) for program in programs)
    return Report(predictions, ops / seconds, inside, recorded_errors)


def main(path: str | Path, as_json: bool = False) -> str:
    """What ``heterolab bench simulator FILE`` prints: a table, or JSON."""
    report = score(load_programs(path))
    if as_json:
        programs = [asdict(prediction) for prediction in report.programs]
        return json.dumps({"programs": programs, "ops_per_s": round(report.ops_per_s)}, indent=1)
    return "\n".join(_table(report))


def _table(report: Report) -> Iterator[str]:
    yield f"{'family':16} {'programs':>8} {'median':>8} {'p90':>8} {'inside':>8}   with recorded host: median"
    families = sorted({p.family for p in report.programs})
    for family in (*families, None):
        mine = [p for p in report.programs if family in (None, p.family)]
        errors = report.errors(family)
        inside = sum(report.inside[p.id] for p in mine) / len(mine)
        recorded = median(report.recorded_errors[p.id] for p in mine)
        yield (
            f"{family or 'all':16} {len(mine):8} {median(errors):8.1%} {np.quantile(errors, 0.9):8.1%} "
            f"{inside:8.0%}   {recorded:.1%}"
        )
    yield f"\n{report.ops_per_s:,.0f} ops a second"
