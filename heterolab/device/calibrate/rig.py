"""What the measurements of a device's engines stand on: chains of ops, and durations.

Two ways to time an op. *Exact* spans (CUPTI, the simulator) say when it ran. CUDA events cannot:
they tell when the stream came to the op, and two of them around an op also count its start. So
where spans are not exact, an op lasts as long as one more of it makes a chain longer: a chain waits
behind a kernel that spins until all of it is enqueued, and the host's clock is read at both ends.
What both ends have in common falls out of the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, TypeVar

import numpy as np

from heterolab.device.base import Buffer, Device
from heterolab.device.calibrate.bench import Bench, Lane
from heterolab.device.calibrate.figures import Json, Recorded, median, spin
from heterolab.device.calibrate.noise import ON_DEVICE, Noise, wanted
from heterolab.errors import InputError

K = TypeVar("K", bound=Hashable)
#: Puts one op into a stream.
Step = Callable[[Any], Any]

#: The largest copy, and the largest vector of float32, that are measured.
MOST_BYTES, MOST_ELEMENTS = 1 << 28, 1 << 26
#: Sources of spans that say when ops really ran.
EXACT = ("cupti", "simulated")
#: Links of a chain at least and at most, and how long it should be.
FEWEST, MOST_LINKS, CHAIN_NS = 2, 32, 2_000_000
#: Random numbers that are drawn; longer arrays repeat them.
NOISE = 1 << 20
#: Streams that the measurements share: a device has a limited number.
LANES = 20


#: One kernel a duration: what a launch of it needs is then made once.
_held = lru_cache(256)(spin)


class Arena:
    """Buffers of one device, made once; measurements take parts of them."""

    def __init__(self, device: Device, touch: Callable[..., Buffer]) -> None:
        self.device, self._touch = device, touch
        limits = device.limits
        self.most_bytes = MOST_BYTES
        while self.most_bytes * 8 > min(limits.memory_bytes, limits.pinned_bytes):
            self.most_bytes //= 2
        self.most_elements = min(MOST_ELEMENTS, self.most_bytes // 4)
        self._made: dict[tuple[str, int], Buffer] = {}

    def bytes(self, memory: str, count: int, which: int = 0, at: int = 0) -> Buffer:
        """`count` bytes of `memory`; another `which` lies elsewhere, `at` bytes in."""
        key = (memory, which)
        if key not in self._made:
            self._made[key] = self._touch(self.most_bytes, "uint8", memory)
        return self._made[key][at : at + count]

    def array(self, shape: int | tuple[int, ...], dtype: str, which: int, memory: str = "device") -> Buffer:
        """An array of its own shape and type."""
        key = (f"{memory} {shape} {dtype}", which)
        if key not in self._made:
            self._made[key] = self._touch(shape, dtype, memory)
        return self._made[key]

    def noise(self, count: int, dtype: str, which: int) -> Buffer:
        """An array of normal numbers in device memory; of bfloat16 ones as ``"int16"``. A GPU that
        multiplies zeros needs less power, and is faster, than one that computes."""
        key = (f"noise {count} {dtype}", which)
        if key not in self._made:
            made = self._made[key] = self._touch(count, dtype, "device")
            if hasattr(made.array, "set"):  # in the memory of a GPU
                some = np.random.default_rng(which).standard_normal(NOISE).astype(np.float32)
                if dtype == "int16":
                    some = (some.view(np.uint32) >> 16).astype(np.uint16).view(np.int16)
                there = min(NOISE, count)
                made.array[:there].set(some[:there].astype(dtype))
                while there < count:  # twice as much, from what is there
                    more = min(there, count - there)
                    made.array[there : there + more] = made.array[:more]
                    there += more
                self.device.synchronize()
        return self._made[key]

    def floats(self, count: int, which: int) -> Buffer:
        """A vector of `count` float32 in device memory."""
        return self.array(self.most_elements, "float32", which)[:count]

    def drop(self) -> None:
        """Give all of it back."""
        self._made.clear()


@dataclass
class Rig:
    """A device to be measured.

    Attributes
    ----------
    bench
        Its bare calls, untraced.
    open_traced
        Opens the same device with spans.
    attributes
        What the device says of itself: ``sms``, ``threads_per_sm``, ``blocks_per_sm``, ``kernels``.
    repeats
        Samples a pass.
    """

    bench: Bench
    open_traced: Callable[[], Device]
    attributes: Json
    noise: Noise = field(default_factory=Noise)
    repeats: int = 4

    @cached_property
    def traced(self) -> Device:
        return self.open_traced()

    @cached_property
    def exact(self) -> bool:
        """Whether spans say when ops really ran."""
        return self.traced.source in EXACT

    @cached_property
    def arena(self) -> Arena:
        return Arena(self.bench.device, self.bench.buffer)

    @cached_property
    def lanes(self) -> list[Lane]:
        """The streams that measurements share, in the order in which they were made."""
        count = min(LANES, self.bench.device.limits.streams // 2)
        return [self.bench.stream() for _ in range(count)]

    @cached_property
    def blocking(self) -> Lane:
        """A stream that synchronises with the legacy default stream."""
        return self.bench.stream(non_blocking=False)

    @cached_property
    def traced_arena(self) -> Arena:
        def touched(shape: Any, dtype: str, memory: str) -> Buffer:
            made = self.traced.buffer(shape, dtype, memory)
            if made.memory.on_host and self.traced.values:
                made.write()[...] = 1
            return made

        return Arena(self.traced, touched)

    def drop(self) -> None:
        """Give back the buffers of the bare measurements."""
        self.bench.forget()
        self.arena.drop()

    def close(self) -> None:
        """Give back all buffers; the devices stay open."""
        self.drop()
        if "traced_arena" in vars(self):
            self.traced_arena.drop()

    # -- chains ----------------------------------------------------------------------------

    def wall(self, lane: Lane, hold_ns: int, issue: Callable[[], Any]) -> float:
        """From the launch of a spin of `hold_ns` on `lane` until the device is idle again, with
        whatever `issue` enqueues meanwhile."""
        bench = self.bench
        hold = _held(hold_ns)
        bench.synchronize()
        start = bench.now()
        lane.launch(hold)
        issue()
        bench.synchronize()
        return bench.now() - start

    def hold_ns(self, issue: Callable[[], Any]) -> int:
        """How long to spin so that all of what `issue` enqueues is there before it begins."""
        taken = 0
        for _ in range(2):  # the first time also compiles and allocates
            self.bench.synchronize()
            start = self.bench.now()
            issue()
            taken = self.bench.now() - start
            self.bench.synchronize()
        return round(1.5 * taken) + 100_000

    def increments(
        self, lane: Lane, step: Callable[[], Any], links: int = MOST_LINKS, repeats: int | None = None
    ) -> list[float]:
        """ns by which one more `step` makes a chain on `lane` longer."""
        repeats = repeats or self.repeats

        def issue(count: int) -> Callable[[], None]:
            def go() -> None:
                for _ in range(count):
                    step()

            return go

        short, long = issue(1), issue(1 + links)
        hold = self.hold_ns(long)
        return [(self.wall(lane, hold, long) - self.wall(lane, hold, short)) / links for _ in range(repeats)]

    # -- durations -------------------------------------------------------------------------

    def durations(
        self,
        name: str,
        sizes: list[int],
        make: Callable[[Arena, int], Step],
        limit: float = ON_DEVICE,
    ) -> dict[int, Json]:
        """How long an op lasts with the device to itself, by size.

        Parameters
        ----------
        make
            ``make(arena, size)`` gives the step that puts the op into a stream.
        """
        once = self._spans if self.exact else self._chained
        steps = {size: make(self.traced_arena if self.exact else self.arena, size) for size in sizes}
        return self.noise.samples(
            name, lambda keys: {size: once(steps[size]) for size in wanted(keys, steps)}, limit
        )

    def roughly(self, make: Callable[[Arena, int], Step], size: int) -> float:
        """About how long one op of that size lasts, ns."""
        if self.exact:
            return median(self._spans(make(self.traced_arena, size), 1))
        step, lane = make(self.arena, size), self.lanes[0]
        return median(self.increments(lane, lambda: step(lane), 1, 1))

    def _spans(self, step: Step, repeats: int | None = None) -> list[float]:
        device = self.traced
        stream = device.streams(1)[0]
        with Recorded(device) as recorded:
            ops = []
            for _ in range((repeats or self.repeats) + 1):
                ops.append(step(stream))
                stream.synchronize()
        spans = recorded.on_device()
        found = [float(spans[op].end_ns - spans[op].start_ns) for op in ops[1:] if op in spans]
        if not found:
            raise InputError(
                f"{device.name} told of none of {len(ops)} ops when it ran them. Its spans are from "
                f"{device.source}; measure with spans from CUDA events: --spans events."
            )
        return found

    def _chained(self, step: Step) -> list[float]:
        lane = self.lanes[0]
        roughly = max(median(self.increments(lane, lambda: step(lane), 1, 1)), 1.0)
        links = int(min(MOST_LINKS, max(FEWEST, CHAIN_NS / roughly)))
        return self.increments(lane, lambda: step(lane), links)


def medians(rows: Mapping[K, Json]) -> dict[K, float]:
    """The medians of measured rows."""
    return {key: row["median"] for key, row in rows.items()}
