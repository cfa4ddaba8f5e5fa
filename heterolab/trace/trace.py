"""Spans and traces: what happened, when, on which lane, and on what kind of device.

A :class:`Recorder` collects spans while a run goes on; a :class:`Trace` is the finished,
columnar record that metrics, views and files work on. Recorder, data and views are apart,
so that a trace loaded from a file is as good as one just made.
"""

from __future__ import annotations

import gzip
import json
import threading
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from heterolab.errors import TraceError

FORMAT = "heterolab-trace"
VERSION = 1

#: No run lasts a year; a time beyond it is no time.
MOST_NS = 365 * 86_400 * 10**9

#: Kinds of span. The first three occupy the host, the rest the device.
CPU, API, SYNC, WAIT = "cpu", "api", "sync", "wait"
H2D, D2H, KERNEL = "h2d", "d2h", "kernel"
HOST_KINDS = (CPU, API, SYNC, WAIT)
DEVICE_KINDS = (H2D, D2H, KERNEL)

#: ``stream`` of a span that ran on no stream, and of one on the legacy default stream.
NO_STREAM, DEFAULT_STREAM = -2, -1
NONE = -1


class Span(NamedTuple):
    """One thing that happened. Times are integer nanoseconds on the run's host clock.

    Attributes
    ----------
    op
        Number given when the host issued it. An ``api`` span carries the op number of the
        device op it issued: that is the launch → op arrow.
    kind
        ``cpu`` (work on the host or on a worker), ``api`` (the host inside a device call),
        ``sync`` (the host held until the device is done), ``wait`` (the host sleeps until
        something happens), ``h2d``, ``d2h``, ``kernel``.
    name
        The stage, kernel or call.
    lane
        Where it ran: ``host``, ``worker 0`` …, ``h2d``, ``d2h``, ``gpu``.
    stream
        Stream index; -1 is the legacy default stream, -2 means none.
    device
        Index of the device in the run; -1 for the host.
    queued_ns, start_ns, end_ns
        Issued by the host, started, ended.
    bytes
        Bytes moved or touched (0 where it means nothing).
    batch
        Batch number, -1 for none.
    after
        The op whose end let this one start, -1 where not known or none.
    """

    op: int
    kind: str
    name: str
    lane: str
    stream: int
    device: int
    queued_ns: int
    start_ns: int
    end_ns: int
    bytes: int = 0
    batch: int = NONE
    after: int = NONE

    def moved(self, origin_ns: int, first_op: int) -> Span:
        """The same span with its times counted from `origin_ns` and its ops from `first_op`."""
        return self._replace(
            op=self.op - first_op,
            queued_ns=self.queued_ns - origin_ns,
            start_ns=self.start_ns - origin_ns,
            end_ns=self.end_ns - origin_ns,
            after=self.after - first_op if self.after >= first_op else NONE,
        )


_TEXT_COLUMNS = ("kind", "name", "lane")
_INT_COLUMNS = tuple(name for name in Span._fields if name not in _TEXT_COLUMNS)


class Recorder:
    """Numbers ops and collects spans; safe to use from any thread.

    `notes` says, in words, what the spans lack: a trace's meta carries it as ``incomplete``.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = 0
        self._spans: list[Span] = []
        self.notes: list[str] = []

    def next_op(self) -> int:
        """The next op number: one a device op or CPU job, in the order the host issues them."""
        with self._lock:
            op = self._next
            self._next += 1
            return op

    def add(self, span: Span) -> None:
        self._spans.append(span)

    @property
    def spans(self) -> list[Span]:
        """All spans so far, in the order in which they became known."""
        return self._spans

    @property
    def ops(self) -> int:
        """How many ops were numbered so far."""
        return self._next

    def since(self, index: int) -> list[Span]:
        """Spans added after the first `index` ones: what a live view has not shown yet."""
        return self.spans[index:]


@dataclass(frozen=True)
class Trace:
    """Spans as columns, with the stamp that says where they come from.

    Attributes
    ----------
    columns
        One NumPy array a field of :class:`Span`, equal lengths, sorted by (start, op).
    source
        ``simulated``, ``cuda-events``, ``cupti`` or ``cpu-clock``.
    device
        The device in words, e.g. ``NVIDIA H200``.
    replayed
        True once the trace came out of a file.
    meta
        Versions, clock offsets and what else provenance needs. A simulated trace holds no
        time of day, path, host name or argv.
    """

    columns: dict[str, NDArray[Any]]
    source: str
    device: str
    replayed: bool = False
    meta: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_spans(
        cls,
        spans: Iterable[Span],
        source: str,
        device: str,
        meta: dict[str, Any] | None = None,
        *,
        origin_ns: int = 0,
        first_op: int = 0,
    ) -> Trace:
        """A trace of `spans`, with times counted from `origin_ns` and ops from `first_op`, so
        that what ran on the host before does not show: nor what was issued before, and whose
        spans a real device told late (a warm-up)."""
        moved = (span.moved(origin_ns, first_op) for span in spans if span.op >= first_op)
        rows = sorted(moved, key=lambda s: (s.start_ns, s.op, s.kind))
        columns: dict[str, NDArray[Any]] = {}
        for index, name in enumerate(Span._fields):
            values = [row[index] for row in rows]
            dtype: Any = np.str_ if name in _TEXT_COLUMNS else np.int64
            columns[name] = np.array(values, dtype=dtype)
        return cls(columns, source, device, meta=dict(meta or {}))

    def __len__(self) -> int:
        return len(self.columns["op"])

    def __getitem__(self, column: str) -> NDArray[Any]:
        return self.columns[column]

    def __iter__(self) -> Iterator[Span]:
        for row in zip(*(self.columns[name].tolist() for name in Span._fields), strict=True):
            yield Span(*row)

    def where(self, mask: NDArray[np.bool_]) -> Trace:
        """The spans for which `mask` is true, with the same stamp."""
        return replace(self, columns={k: v[mask] for k, v in self.columns.items()})

    def kind(self, *kinds: str) -> Trace:
        """The spans of the given kinds."""
        return self.where(np.isin(self.columns["kind"], kinds))

    @property
    def start_ns(self) -> int:
        return int(self.columns["start_ns"].min()) if len(self) else 0

    @property
    def end_ns(self) -> int:
        return int(self.columns["end_ns"].max()) if len(self) else 0

    @property
    def wall_ns(self) -> int:
        """From the first start to the last end."""
        return self.end_ns - self.start_ns

    @property
    def stamp(self) -> str:
        """``measured``, ``simulated`` or ``replayed``, and on what: belongs on every figure."""
        how = {
            "simulated": "simulated",
            "cpu-clock": "measured (CPU)",
            "cuda-events": "measured (CUDA events)",
            "cupti": "measured (CUPTI)",
        }.get(self.source, self.source)
        lacks = self.meta.get("incomplete")
        incomplete = (
            f" · INCOMPLETE: {'; '.join(map(str, lacks))}" if isinstance(lacks, list) and lacks else ""
        )
        return f"{'replayed, ' if self.replayed else ''}{how} · {self.device}{incomplete}"

    def save(self, path: str | Path) -> Path:
        """Write the trace as JSON, gzipped when the name ends in ``.gz``; same trace, same bytes."""
        path = Path(path)
        data = json.dumps(self.to_json(), separators=(",", ":"), sort_keys=True).encode()
        path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
        return path

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "source": self.source,
            "device": self.device,
            "meta": self.meta,
            "columns": {name: self.columns[name].tolist() for name in Span._fields},
        }

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read a trace written by :meth:`save`; it is stamped *replayed* from then on.

        Raises
        ------
        TraceError
            The file is missing, not a trace, of another version, or its columns disagree.
        """
        path = Path(path)
        try:
            data = path.read_bytes()
            if data[:2] == b"\x1f\x8b":
                data = gzip.decompress(data)
            return cls.from_json(json.loads(data), str(path))
        except (OSError, EOFError, zlib.error, ValueError, RecursionError) as error:
            raise TraceError(
                f"{path} cannot be read as a trace ({error}). "
                "Write one with Trace.save() or `heterolab run --trace FILE`."
            ) from error

    @classmethod
    def from_json(cls, data: Any, origin: str = "this object") -> Trace:
        """A trace from what :meth:`to_json` gave; checks it before it is believed."""
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise TraceError(f"{origin} is not a HeteroLab trace: it lacks format={FORMAT!r}.")
        if data.get("version") != VERSION:
            raise TraceError(
                f"{origin} is a trace of version {data.get('version')!r}; this HeteroLab reads "
                f"version {VERSION}. Record it again."
            )
        columns: dict[str, NDArray[Any]] = {}
        try:
            for name in Span._fields:
                values = data["columns"][name]
                dtype: Any = np.str_ if name in _TEXT_COLUMNS else np.int64
                columns[name] = np.array(values, dtype=dtype)
            source, device, meta = str(data["source"]), str(data["device"]), dict(data["meta"])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise TraceError(f"{origin} is damaged: {error!r}. Record it again.") from error
        lengths = {column.shape for column in columns.values()}
        if len(lengths) != 1 or len(next(iter(lengths))) != 1:
            raise TraceError(f"{origin} is damaged: its columns have different lengths.")
        if (columns["end_ns"] < columns["start_ns"]).any():
            raise TraceError(f"{origin} is damaged: a span ends before it starts.")
        times = np.concatenate([columns[name] for name in ("queued_ns", "start_ns", "end_ns")])
        if (np.abs(times) > MOST_NS).any():
            raise TraceError(f"{origin} is damaged: it has a time that is years away from its start.")
        return cls(columns, source, device, replayed=True, meta=meta)
