"""What a machine costs: the numbers that the simulator charges, and where they come from.

A profile is one JSON file, in ``profiles/`` or anywhere. Times are nanoseconds, sizes are
bytes unless a table says otherwise. A *table* is ``{"sizes": [...], "ns": [...]}``: piecewise
linear between its points, flat below the first, and beyond the last it goes on with the last
slope. The file has these sections; each holds a ``"source"`` text that says where its numbers
come from, and a number may be written with decimals::

    format       "heterolab-profile"
    version      1
    name         the device in words: "NVIDIA H200"
    provenance   {"kind": "measured" | "datasheet estimate" | "imagined",
                  "date": "2026-11-30", "driver": "…", "method": "…"}
    limits       {"memory_bytes", "pinned_bytes", "streams"}
    host         costs of device calls on the host thread, bare (CuPy's own), see HostCosts
    seam         the same calls made through this package, as a pipeline makes them; null or absent:
                 they cost what the bare ones do
    waiting      the loop's step, and how late a sleeping host wakes, see Waiting
    workers      submitting jobs to a pool of CPU workers, see Workers
    copies       copy engines, see Copies
    pageable     copies from and to pageable memory, see Pageable; null: they cost what pinned ones do
    mapped       a table, bytes → ns, of a kernel's reads of host memory over the link (zero-copy);
                 null: host memory is as near as the device's own
    managed      managed (unified) memory, see Managed; null or absent: not measured
    gaps         shortest pauses between dependent ops, see Gaps
    compute      what a kernel without an entry in `kernels` costs, and how kernels share the device
    cpu_costs    {stage: {"sizes", "ns", "gil", "waits", "source"}}: ns of the stage's function on the
                 host at the `size` that the pipeline passes; "gil" (a number or one a size, default 1) is
                 the share of that time in which the job holds Python's interpreter lock; "waits" (likewise,
                 default "gil") the share in which it makes no progress while another thread holds it
    kernels      {kernel: {"sizes", "ns", "host_ns", "cold_host_ns", "source"}}: ns on the device alone,
                 and how long the host is held for its launches, at the kernel's Work.size; host_ns (a
                 number, one a size, or absent: launches × host.launch_ns), cold_host_ns (more when
                 cold, see HostCosts; default host.cold_launch_ns)

A cost that a run needs and the profile lacks raises :class:`ProfileError`: nothing is guessed.
"""

from __future__ import annotations

import itertools
import json
import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from heterolab.errors import ProfileError

FORMAT, VERSION = "heterolab-profile", 1
KINDS = ("measured", "datasheet estimate", "imagined")
BUILT_IN = Path(__file__).parent / "profiles"

TINY = 1e-9
#: Numbers that something is divided by.
DIVISORS = {
    "cores",
    "cold_work_ns",
    "cold_bytes",
    "both_speed",
    "both_large_speed",
    "mapped_share",
    "chunk_bytes",
    "bytes_per_ns",
}

T = TypeVar("T")


@dataclass(frozen=True)
class Table:
    """A cost over a size: piecewise linear, extended with its last slope."""

    sizes: tuple[float, ...]
    ns: tuple[float, ...]

    def at(self, size: float) -> float:
        """The cost at `size`, in nanoseconds."""
        sizes, ns = self.sizes, self.ns
        if size <= sizes[0] or len(sizes) == 1:
            return ns[0]
        right = min(bisect_right(sizes, size), len(sizes) - 1)
        left = right - 1
        slope = (ns[right] - ns[left]) / (sizes[right] - sizes[left])
        return ns[left] + (size - sizes[left]) * slope

    @classmethod
    def constant(cls, ns: float) -> Table:
        return cls((0.0,), (ns,))


@dataclass(frozen=True)
class Provenance:
    """Where a profile's numbers come from."""

    kind: str
    date: str = ""
    driver: str = ""
    method: str = ""


@dataclass(frozen=True)
class Capacity:
    """What the device can hold: its memory, the host memory one may pin, and streams."""

    memory_bytes: int
    pinned_bytes: int
    streams: int = 128


@dataclass(frozen=True)
class HostCosts:
    """How long the host thread is inside a call to the device. ``cores`` are the host's.

    ``between_ns`` is the Python between two calls. ``submit_share`` is the part of a call after
    which the device has the op; ``start_ns`` passes between that and the op's start on an idle
    device. ``sync_ns`` passes between the device's falling idle and the return of a
    synchronize; ``sync_idle_ns`` is a synchronize with nothing to wait for.

    The costs above are those of a call that was made just before (warm). CPU work in between
    throws the call's code and data out of the core's caches, and it costs up to ``cold_…_ns``
    more: that times ``1 - exp(-work / cold_work_ns)``, plus ``cold_bytes_factor`` times
    ``1 - exp(-bytes / cold_bytes)`` after staging bytes of pageable memory. The first call of
    a run is as cold as after ``cold_start_ns`` of work.

    ``call_gil`` is the share of a call in which other threads wait for Python's interpreter
    lock. The call itself lets go of the lock and comes back for it, so that it makes no progress
    while another thread holds it.
    """

    cores: float
    launch_ns: float
    copy_ns: float
    record_ns: float
    wait_ns: float
    between_ns: float
    sync_ns: float
    sync_idle_ns: float
    start_ns: float
    submit_share: float
    cold_launch_ns: float = 0.0
    cold_copy_ns: float = 0.0
    cold_event_ns: float = 0.0
    cold_work_ns: float = 1.0
    cold_start_ns: float = 0.0
    cold_bytes: float = 1.0
    cold_bytes_factor: float = 0.0
    call_gil: float = 1.0
    source: str = ""


@dataclass(frozen=True)
class Waiting:
    """What ``wait_any`` costs: one step of the loop, and the lateness of a sleeping host.

    ``event_ns``: from an event's end to the host's going on; ``job_ns``: from a CPU job's end;
    ``timer_ns``: after the time it wanted to sleep until.
    """

    loop_step_ns: float
    event_ns: float
    job_ns: float
    timer_ns: float
    source: str = ""


@dataclass(frozen=True)
class Workers:
    """CPU jobs: the host's cost of submitting one, and its way to an idle worker. For pools of
    processes also the cost per job and per byte of pickling (absent: not measured)."""

    submit_ns: float
    start_ns: float
    process_job_ns: float | None = None
    pickle_ns_per_byte: float | None = None
    source: str = ""


@dataclass(frozen=True)
class Copies:
    """One engine a direction. Tables: bytes → ns of a copy alone, pinned memory; ``inside``
    is a copy within device memory.

    While both directions run, each goes at ``both_speed`` of its own speed; beyond
    ``both_large_bytes`` at less, down to ``both_large_speed`` at four times as many. A kernel
    that reads host memory while a copy runs in the same direction gets ``mapped_share`` of the
    link. A stream's copies go through channel (stream index mod ``channels``), first in, first
    out; an engine stays with a channel until the channel's next copy is not ready.
    """

    h2d: Table
    d2h: Table
    inside: Table
    both_speed: float
    both_large_bytes: float
    both_large_speed: float
    mapped_share: float
    channels: int
    source: str = ""

    def both_at(self, nbytes: float) -> float:
        """The share of its own speed at which a copy goes while the other direction runs."""
        if nbytes <= self.both_large_bytes:
            return self.both_speed
        large = min(math.log(nbytes / max(self.both_large_bytes, 1.0), 4), 1.0)
        return self.both_speed + large * (self.both_large_speed - self.both_speed)


@dataclass(frozen=True)
class Pageable:
    """Tables over bytes. ``d2h``: how long the host is held once the stream has come to the
    copy. ``h2d``: how long it is held while it stages the bytes, in pieces of ``chunk_bytes``
    that are copied as soon as they are staged; null: nothing is staged, the host is held until
    the copy is done, as with ``d2h``."""

    d2h: Table
    h2d: Table | None = None
    chunk_bytes: float = 1048576
    source: str = ""


@dataclass(frozen=True)
class Managed:
    """Managed memory, whose pages move to where they are touched.

    A kernel that touches pages in host memory waits ``fault_ns`` for each group of
    ``group_bytes``, and for the bytes, which come at ``bytes_per_ns``; the host that touches
    pages on the device likewise, with ``host_fault_ns`` a group (absent: not measured, taken as
    ``fault_ns``). A prefetch moves them at ``bytes_per_ns``, without faults. ``concurrent``
    false: the GPU cannot fault (CUDA's attribute concurrentManagedAccess is 0): all managed
    memory moves to it before each kernel, and the host must not touch any while one runs.

    Of a kernel over ``n`` bytes that the host has touched, measured by faults, after a prefetch,
    and that prefetch: ``bytes_per_ns`` = n / prefetch, and ``fault_ns`` = (faults - prefetched
    - prefetch) × group_bytes / n.
    """

    group_bytes: int
    fault_ns: float
    bytes_per_ns: float
    host_fault_ns: float | None = None
    concurrent: bool = True
    source: str = ""


@dataclass(frozen=True)
class Gaps:
    """Shortest pause between two ops of a stream, by what they are, in ns; ``event_ns`` between
    streams, through an event; ``legacy_ns`` at the legacy default stream's barrier."""

    copy_kernel_ns: float
    kernel_copy_ns: float
    kernel_kernel_ns: float
    copy_copy_ns: float
    turn_ns: float
    event_ns: float
    legacy_ns: float
    source: str = ""


@dataclass(frozen=True)
class Compute:
    """How kernels use the device.

    A kernel without an entry of its own takes ``fixed_ns`` plus the longer of its arithmetic
    (flops / ``flops_per_ns[dtype]``) and its memory traffic (``memory``: bytes → ns). Blocks
    are placed on ``sms`` processors of ``threads_per_sm`` threads and ``blocks_per_sm`` blocks;
    at most ``kernels`` kernels run at once. ``on_host_gil`` null: the device has processors of
    its own; a share: its ops run on the host's cores, and kernels hold the interpreter lock for
    that share of their time.
    """

    sms: int
    threads_per_sm: int
    blocks_per_sm: int
    kernels: int
    fixed_ns: float
    flops_per_ns: Mapping[str, float]
    memory: Table
    on_host_gil: float | None = None
    source: str = ""


@dataclass(frozen=True)
class CpuCost:
    """A CPU stage: its time over size, and the shares of it in which it holds the interpreter
    lock, and in which it waits if another thread holds it."""

    time: Table
    gil: Table
    waits: Table
    source: str = ""


@dataclass(frozen=True)
class KernelCost:
    """A kernel by name: its time on the device, and the host's for its launches."""

    time: Table
    host: Table | None = None
    cold_host_ns: float | None = None
    source: str = ""


@dataclass(frozen=True)
class DeviceProfile:
    """The costs of one machine; see the module for the file they are read from."""

    name: str
    provenance: Provenance
    limits: Capacity
    host: HostCosts
    waiting: Waiting
    workers: Workers
    copies: Copies
    pageable: Pageable | None
    mapped: Table | None
    gaps: Gaps
    compute: Compute
    cpu_costs: Mapping[str, CpuCost] = field(default_factory=dict)
    kernels: Mapping[str, KernelCost] = field(default_factory=dict)
    seam: HostCosts | None = None
    managed: Managed | None = None
    #: What it was read from, the texts and spreads beside the numbers included.
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def load(cls, name: str | Path) -> DeviceProfile:
        """The built-in profile of that name (``"h200"``), or the one in a JSON file.

        Raises
        ------
        ProfileError
            There is no such profile, it is not JSON, or something in it is missing or wrong.
        """
        path = BUILT_IN / f"{name}.json" if str(name).isidentifier() else Path(name)
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ProfileError(
                f"there is no device profile {str(name)!r}. Built in: {', '.join(cls.names())}. "
                "Give one of these, or the path of a JSON file that `heterolab calibrate` wrote."
            ) from None
        except (OSError, ValueError, RecursionError) as error:
            raise ProfileError(
                f"the profile {path.name} cannot be read as JSON ({error}). Fetch it again, or write one "
                "with `heterolab calibrate`."
            ) from error
        return cls.from_json(data, path.name)

    @staticmethod
    def names() -> list[str]:
        """The built-in profiles."""
        return sorted(path.stem for path in BUILT_IN.glob("*.json"))

    @classmethod
    def from_json(cls, data: Any, origin: str = "this profile") -> DeviceProfile:
        """A profile from the content of its file, checked before it is believed."""
        reader = _Reader(origin)
        data = reader.mapping(data, "the file")
        if data.get("format") != FORMAT or data.get("version") != VERSION:
            raise ProfileError(
                f"{origin} is not a device profile of this version: it needs "
                f'"format": "{FORMAT}" and "version": {VERSION}.'
            )
        provenance = reader.record(Provenance, data, "provenance")
        if provenance.kind not in KINDS:
            raise reader.wrong("provenance.kind", provenance.kind, f"one of {', '.join(KINDS)}")
        return cls(
            name=reader.text(data, "name"),
            provenance=provenance,
            limits=reader.record(Capacity, data, "limits"),
            host=reader.record(HostCosts, data, "host"),
            waiting=reader.record(Waiting, data, "waiting"),
            workers=reader.record(Workers, data, "workers"),
            copies=reader.record(Copies, data, "copies"),
            pageable=None if data.get("pageable", 0) is None else reader.record(Pageable, data, "pageable"),
            mapped=None if data.get("mapped", 0) is None else reader.table(data, "mapped"),
            gaps=reader.record(Gaps, data, "gaps"),
            compute=reader.record(Compute, data, "compute"),
            cpu_costs={k: reader.cpu_cost(v, f"cpu_costs.{k}") for k, v in reader.section(data, "cpu_costs")},
            kernels={k: reader.kernel(v, f"kernels.{k}") for k, v in reader.section(data, "kernels")},
            seam=None if data.get("seam") is None else reader.record(HostCosts, data, "seam"),
            managed=None if data.get("managed") is None else reader.record(Managed, data, "managed"),
            raw=data,
        )

    def save(self, path: str | Path) -> Path:
        """Write the profile as a file; ``open_device("sim:PATH")`` opens it.

        Raises
        ------
        ProfileError
            Its numbers were changed in code: make a changed profile with ``hl.imagined``.
        """
        from heterolab.device.datasheet import dumps

        if not self.raw or DeviceProfile.from_json(self.raw) != self:
            raise ProfileError(
                f"the profile of {self.name} is no longer what it was read from. Make a changed one with "
                "hl.imagined(name, base=..., ...), which can be saved."
            )
        path = Path(path)
        path.write_text(dumps(dict(self.raw)), encoding="utf-8")
        return path

    # -- the numbers asked for by name ---------------------------------------------------

    def cpu_cost(self, name: str) -> CpuCost:
        """The cost of the CPU stage `name`; ProfileError if it was not measured."""
        try:
            return self.cpu_costs[name]
        except KeyError:
            known = ", ".join(sorted(self.cpu_costs)) or "none"
            raise ProfileError(
                f"the profile of {self.name} has no cost for the CPU stage {name!r} (it has: {known}). "
                f"Measure it on that machine with `heterolab calibrate`, or add cpu_costs.{name} to the file."
            ) from None

    def flops_per_ns(self, dtype: str) -> float:
        """Arithmetic rate for `dtype`; ProfileError if it was not measured."""
        try:
            return self.compute.flops_per_ns[dtype]
        except KeyError:
            known = ", ".join(sorted(self.compute.flops_per_ns)) or "none"
            raise ProfileError(
                f"the profile of {self.name} has no arithmetic rate for {dtype} (it has: {known}). Measure "
                f"it with `heterolab calibrate`, or add compute.flops_per_ns.{dtype} to the file."
            ) from None

    @property
    def stamp(self) -> str:
        """The provenance in a few words, for reprs and figures."""
        return " ".join(word for word in (self.provenance.kind, self.provenance.date) if word)


class _Reader:
    """Reads a profile's parts, and names what is missing or wrong."""

    def __init__(self, origin: str) -> None:
        self.origin = origin

    def wrong(self, place: str, value: object, needed: str) -> ProfileError:
        shown = repr(value) if len(repr(value)) < 60 else f"{repr(value)[:57]}…"
        return ProfileError(f"{self.origin}: {place} is {shown}; it must be {needed}.")

    def missing(self, place: str) -> ProfileError:
        return ProfileError(
            f"{self.origin} lacks {place}. Add it to the file (heterolab/device/profile.py says what it "
            "means), or measure the machine with `heterolab calibrate`."
        )

    def mapping(self, value: Any, place: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self.wrong(place, value, "a JSON object")
        return value

    def section(self, data: dict[str, Any], place: str) -> list[tuple[str, dict[str, Any]]]:
        entries = self.mapping(data.get(place, {}), place)
        return [(name, self.mapping(entry, f"{place}.{name}")) for name, entry in entries.items()]

    def text(self, data: dict[str, Any], place: str) -> str:
        if place not in data:
            raise self.missing(place)
        value = data[place]
        if not isinstance(value, str):
            raise self.wrong(place, value, "a text")
        return value

    def number(self, value: Any, place: str, least: float = 0.0) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.wrong(place, value, "a number")
        if value < least:
            raise self.wrong(place, value, "more than 0" if 0 < least < 1 else f"{least:g} or more")
        return value

    def table(self, data: dict[str, Any], place: str) -> Table:
        """The table in ``data[last part of place]``."""
        key = place.rpartition(".")[2]
        if key not in data:
            raise self.missing(place)
        entry = self.mapping(data[key], place)
        return self.columns(entry, "ns", place)

    def columns(self, entry: dict[str, Any], column: str, place: str) -> Table:
        """A table from `entry`'s sizes and the given column."""
        for name in ("sizes", column):
            if name not in entry:
                raise self.missing(f"{place}.{name}")
            if not isinstance(entry[name], list) or not entry[name]:
                raise self.wrong(f"{place}.{name}", entry[name], "a list of numbers")
        sizes = tuple(self.number(v, f"{place}.sizes") for v in entry["sizes"])
        values = tuple(self.number(v, f"{place}.{column}") for v in entry[column])
        if len(sizes) != len(values):
            raise self.wrong(f"{place}.{column}", entry[column], f"as long as its sizes ({len(sizes)})")
        if any(b <= a for a, b in itertools.pairwise(sizes)):
            raise self.wrong(f"{place}.sizes", entry["sizes"], "in rising order")
        return Table(sizes, values)

    def either(self, entry: dict[str, Any], column: str, place: str) -> Table:
        """A column that may be one number for all sizes."""
        value = entry[column]
        if isinstance(value, list):
            return self.columns(entry, column, place)
        return Table.constant(self.number(value, f"{place}.{column}"))

    def cpu_cost(self, entry: dict[str, Any], place: str) -> CpuCost:
        gil = self.either({"gil": 1.0} | entry, "gil", place)
        waits = self.either(entry, "waits", place) if "waits" in entry else gil
        for name, share in (("gil", gil), ("waits", waits)):
            if max(share.ns) > 1:
                raise self.wrong(f"{place}.{name}", entry[name], "a share, 0 to 1")
        return CpuCost(self.columns(entry, "ns", place), gil, waits, str(entry.get("source", "")))

    def kernel(self, entry: dict[str, Any], place: str) -> KernelCost:
        host = self.either(entry, "host_ns", place) if entry.get("host_ns") is not None else None
        cold = entry.get("cold_host_ns")
        if cold is not None:
            cold = self.number(cold, f"{place}.cold_host_ns")
        return KernelCost(self.columns(entry, "ns", place), host, cold, str(entry.get("source", "")))

    def record(self, cls: type[T], data: dict[str, Any], place: str) -> T:
        """The dataclass `cls` from ``data[place]``, each field checked by its type."""
        if place not in data:
            raise self.missing(place)
        entry = self.mapping(data[place], place)
        self.slips(entry, [spec.name for spec in fields(cls)], place)  # type: ignore[arg-type]
        values = {}
        for spec in fields(cls):  # type: ignore[arg-type]
            if spec.name in entry:
                values[spec.name] = self._field(spec, entry, f"{place}.{spec.name}")
            elif spec.default is MISSING:
                raise self.missing(f"{place}.{spec.name}")
        return cls(**values)

    def slips(self, entry: dict[str, Any], known: list[str], place: str) -> None:
        """Refuse a name that is nearly that of a field which is not there: it would not count."""
        unset = [name for name in known if name not in entry]
        for name in entry:
            if name not in known and (near := get_close_matches(name, unset, 1, 0.75)):
                raise ProfileError(
                    f"{self.origin}: {place} has no field {name!r}. Did you mean {place}.{near[0]}?"
                )

    def _field(self, spec: Field[Any], entry: dict[str, Any], place: str) -> Any:
        value, kind = entry[spec.name], str(spec.type)
        if value is None and "None" in kind:
            return None
        if kind.startswith("Table"):
            return self.table(entry, place)
        if kind == "str":
            return self.text(entry, spec.name)
        if kind == "bool":
            if not isinstance(value, bool):
                raise self.wrong(place, value, "true or false")
            return value
        if kind.startswith("Mapping"):
            return {k: self.number(v, f"{place}.{k}", TINY) for k, v in self.mapping(value, place).items()}
        if kind == "int":
            number = self.number(value, place, 1)
            if number != int(number):
                raise self.wrong(place, value, "a whole number")
            return int(number)
        return self.number(value, place, TINY if spec.name in DIVISORS else 0.0)
