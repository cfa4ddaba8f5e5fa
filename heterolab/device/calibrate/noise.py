"""Whether a number is one: measure it in passes apart from each other, and compare their medians.

The samples of a pass scatter, and a median copes with that. But a clock that changes, or another
process on the same cores, moves a whole pass; then the passes' medians differ, and no median
helps. So what differs too much is measured once more, and what still does is refused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar

from heterolab.device.calibrate.figures import Json, median, spread
from heterolab.errors import NoisyMeasurement

K = TypeVar("K", bound=Hashable)

#: How far the medians of the passes may lie apart, as a share of their median: on the device
#: (its clock is steady) and on the host (its clock wanders, and others use its cores).
ON_DEVICE, ON_HOST = 0.15, 0.35
#: The same of real runs of the pipeline, each of which is one pass: a host's speed wanders by half
#: within a minute, and the median of the passes bears that.
IN_RUNS = 1.0
#: Differences below this are no noise, whatever they are measured against: what clocks resolve.
FLOOR_NS = 600.0
IN_RUNS_FLOOR_NS = 50_000.0
#: A larger copy may seem faster than a smaller one by this much before the table is refused.
FASTER = 0.05


@dataclass
class Noise:
    """What all measurements of a calibration say about their own noise.

    Parameters
    ----------
    passes
        How often each thing is measured, apart in time.
    """

    passes: int = 3
    #: name → by how much its passes differed, where that was beyond the limit even the second time.
    found: dict[str, float] = field(default_factory=dict)
    #: Tables that make no sense, in words.
    implausible: list[str] = field(default_factory=list)

    def samples(
        self,
        name: str,
        measure: Callable[[Collection[K] | None], Mapping[K, Sequence[float]]],
        limit: float = ON_DEVICE,
        floor: float = FLOOR_NS,
    ) -> dict[K, Json]:
        """Measure in passes; give median, spread and the passes' medians of each key.

        Parameters
        ----------
        measure
            One pass: samples by key (a size, or what was measured), of the keys it is given; None
            asks for all. It may give more.
        limit, floor
            How far the passes may differ: relative, and at all.
        """
        made = self._passes(measure, None)
        worst = self._beyond(made, limit, floor)
        if worst:
            again = self._passes(measure, list(worst))
            still = self._beyond(again, limit, floor)
            for key in list(worst):
                if still.get(key, 0.0) < worst[key]:
                    made[key] = again[key]
                    worst[key] = still.get(key, 0.0)
        for key, share in worst.items():
            if share:
                self.found[name if key is None else f"{name}, {key}"] = round(share, 3)
        return made

    def one(self, name: str, measure: Callable[[], Sequence[float]], limit: float = ON_DEVICE) -> Json:
        """As :meth:`samples`, for one number."""
        return self.samples(name, lambda keys: {None: measure()}, limit)[None]

    def _passes(
        self,
        measure: Callable[[Collection[K] | None], Mapping[K, Sequence[float]]],
        keys: Collection[K] | None,
    ) -> dict[K, Json]:
        samples: dict[K, list[float]] = defaultdict(list)
        medians: dict[K, list[float]] = defaultdict(list)
        for _ in range(self.passes):
            for key, values in measure(keys).items():
                samples[key] += values
                medians[key].append(round(median(values), 1))
        return {key: spread(samples[key]) | {"passes": medians[key]} for key in samples}

    def _beyond(self, made: Mapping[K, Json], limit: float, floor: float) -> dict[K, float]:
        """By how much the passes differ, of those keys where that is too much."""
        apart = {key: max(row["passes"]) - min(row["passes"]) for key, row in made.items()}
        return {
            key: apart[key] / max(abs(row["median"]), 1.0)
            for key, row in made.items()
            if apart[key] > max(floor, limit * abs(row["median"]))
        }

    def runs(self, costs: Mapping[str, Json]) -> dict[str, float]:
        """By how much passes of real runs differ where that is beyond :data:`IN_RUNS`, by stage and size.

        Parameters
        ----------
        costs
            A profile's ``cpu_costs``; a stage that was watched in runs has the ``passes`` of each size.
        """
        rows = {
            f"{name} of {size:g}": {"median": ns, "passes": passes}
            for name, entry in costs.items()
            for size, ns, passes in zip(entry["sizes"], entry["ns"], entry.get("passes", ()), strict=False)
        }
        return self._beyond(rows, IN_RUNS, IN_RUNS_FLOOR_NS)

    def rising(self, name: str, sizes: Sequence[float], ns: Sequence[float]) -> list[float]:
        """`ns` made non-decreasing; noted as implausible where that changes a time by more than
        :data:`FASTER`: more work cannot be done sooner."""
        out: list[float] = []
        for value in ns:
            out.append(max(value, out[-1]) if out else value)
        for (small, large), was, now in zip(pairwise(sizes), ns[1:], out[1:], strict=True):
            if now - was > max(FLOOR_NS, FASTER * now):
                self.implausible.append(
                    f"{name}: {large:g} took {was / 1000:.1f} µs, less than the {now / 1000:.1f} µs of "
                    f"{small:g} or below"
                )
        return out

    def refuse(self) -> None:
        """Raise if anything was too noisy or implausible.

        Raises
        ------
        NoisyMeasurement
            Names what, by how much, the likely reasons, and the way on.
        """
        if not (self.found or self.implausible):
            return
        noisy = sorted(self.found.items(), key=lambda row: -row[1])
        lines = [f"{name}: passes {share:.0%} apart" for name, share in noisy[:8]]
        if len(noisy) > 8:
            lines.append(f"and {len(noisy) - 8} more")
        allowed = f"allowed: {ON_DEVICE:.0%} on the device, {ON_HOST:.0%} on the host, {FLOOR_NS / 1000:g} µs"
        raise NoisyMeasurement(
            "this machine gave another result each time, so no profile was written. "
            f"{'; '.join([*lines, *self.implausible[:4]])} ({allowed}). Likely reasons: something else uses "
            "the GPU or the CPU, or their clocks change (power saving, heat). Stop what else runs, and "
            "measure again. --accept-noise writes the profile all the same, and its provenance says so."
        )

    def note(self) -> Json:
        """For a profile's notes."""
        return {"apart": self.found, "implausible": self.implausible}


def wanted(keys: Collection[K] | None, all_keys: Iterable[K]) -> list[K]:
    """Those of `all_keys` that a pass is to measure."""
    return [key for key in all_keys if keys is None or key in keys]


def table_of(rows: Mapping[Any, Json], noise: Noise, name: str) -> Json:
    """A profile's table from measured rows by size."""
    sizes = sorted(rows)
    medians = noise.rising(name, sizes, [rows[size]["median"] for size in sizes])
    return {
        "sizes": sizes,
        "ns": [round(max(ns, 0.0), 1) for ns in medians],
        "p10": [rows[size]["p10"] for size in sizes],
        "p90": [rows[size]["p90"] for size in sizes],
        "samples": [rows[size]["samples"] for size in sizes],
    }
