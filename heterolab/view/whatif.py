"""What would help most? The ranking of changes as a table, and the promise beside the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from heterolab.trace.what_if import LATENCY, Change, Outcome, Outlook, Trial, outlook
from heterolab.view.catalogue import text
from heterolab.view.words import columns, digits, duration, table

if TYPE_CHECKING:
    from heterolab.device.base import Device
    from heterolab.device.profile import DeviceProfile
    from heterolab.pipeline.pipeline import Pipeline
    from heterolab.view.words import Shown
    from heterolab.workload import Load


@dataclass(frozen=True, repr=False)
class WhatIf:
    """Changes, the best first; :func:`what_if` makes one. It prints as a table.

    Attributes
    ----------
    found
        See :class:`heterolab.trace.what_if.Outlook`.
    """

    found: Outlook

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        """What each change would do, the best first."""
        return self.found.outcomes

    @property
    def best(self) -> Outcome | None:
        """The best of the changes that can be tried; None where none helps by 1 %."""
        return self.found.best

    def try_best(self, *, on: Device, rounds: int = 1) -> Tried:
        """Run the unchanged pipeline and the best change on a device, and compare the gain with the
        promise.

        Parameters
        ----------
        on
            The device; to learn something, the one that the run was made on.
        rounds
            How often, in turns; the medians are compared. More on a machine that others use too.

        Raises
        ------
        InputError
            No change that can be tried helps by 1 %.
        """
        return Tried(self.found.try_best(on, rounds))

    # -- words -----------------------------------------------------------------------------

    @property
    def stamp(self) -> str:
        """Simulated, on what, and how good those numbers are."""
        profile = self.found.profile
        return text("whatif.stamp", device=profile.name, kind=profile.stamp)

    @property
    def rows(self) -> list[tuple[str, str, str, str]]:
        """(change, throughput, p90 latency, can it be tried) of each change."""
        return [self._row(outcome) for outcome in self.outcomes]

    def _row(self, outcome: Outcome) -> tuple[str, str, str, str]:
        name = change_name(outcome.change)
        if outcome.why_not:
            return name, "–", "–", text("whatif.impossible")
        can = text("whatif.yes" if outcome.change.can_be_tried else "whatif.no")
        return name, times(outcome.gain), f"{100 * (outcome.p90_ratio - 1):+.1f} %", can

    @property
    def verdict(self) -> str:
        """What to try, in a sentence."""
        best = self.best
        if best is None:
            return text("whatif.none")
        ratio = best.p90_ratio if self.found.goal == LATENCY else best.gain
        return text(f"whatif.best_{self.found.goal}", change=change_name(best.change), ratio=times(ratio))

    @property
    def notes(self) -> list[str]:
        """How to read the table."""
        found = self.found
        told = {"per_s": digits(found.per_s), "p90": duration(found.p90_ns)}
        notes = [text("whatif.base", **told), text("whatif.no_means")]
        if found.goal == LATENCY:
            notes.append(text("whatif.arrivals"))
        if found.requests < found.of_requests:
            notes.append(text("whatif.cut", requests=found.requests, all=found.of_requests))
        notes += [
            text("whatif.why_not", change=change_name(outcome.change), why=outcome.why_not)
            for outcome in self.outcomes
            if outcome.why_not
        ]
        return notes

    def __str__(self) -> str:
        lines = [self.stamp, self.verdict, "", *columns(_head(), self.rows), "", *self.notes]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        notes = "".join(f"<p>{escape(note)}</p>" for note in self.notes)
        head = f"<p><b>{escape(self.stamp)}</b></p><p>{escape(self.verdict)}</p>"
        return f"{head}{table(self.rows, _head())}{notes}"


@dataclass(frozen=True, repr=False)
class Tried:
    """A promise beside its result; :meth:`WhatIf.try_best` makes one.

    Attributes
    ----------
    trial
        See :class:`heterolab.trace.what_if.Trial`.
    """

    trial: Trial

    @property
    def promised(self) -> float:
        """Throughput (or p90 latency) with the change over that without, simulated."""
        return self.trial.promised

    @property
    def measured(self) -> float:
        """The same, on the device."""
        return self.trial.measured

    def __str__(self) -> str:
        trial = self.trial
        told = {"promised": times(trial.promised), "measured": times(trial.measured)}
        what = text(f"whatif.of_{trial.goal}")
        stamp = trial.runs[0][1].stamp
        change = change_name(trial.change)
        return text("whatif.tried", change=change, what=what, stamp=stamp, **told)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<p>{escape(str(self))}</p>"


def what_if(
    run: Shown,
    *,
    on: str | DeviceProfile | Device | None = None,
    pipeline: Pipeline | None = None,
    load: Load | None = None,
) -> WhatIf:
    """What would help most? The same requests on the simulator, with one thing changed at a time.

    Tried are pinned memory, one stream more, twice the workers, twice the batch, no batch delay and
    fewer bytes back; and what nobody can try: a GPU or a link twice as fast, parsing for nothing. The
    unchanged run is simulated too, so a gain is the ratio of two simulated runs. Hooks are left out.

    Parameters
    ----------
    run
        A run. Of a recording, `pipeline` and `load` are needed as well.
    on
        The machine to simulate: a profile, or its name or file as in ``"sim:h200"``. Default: that of
        the run; of a measured one, the built-in profile of its device.
    pipeline, load
        What made the run, where it does not know it.

    Raises
    ------
    InputError
        No profile is known of the run's device (the message says how to measure one), or a recording
        came without `pipeline` and `load`.

    >>> print(hl.what_if(run))  # doctest: +SKIP
    >>> hl.what_if(run).try_best(on=dev)  # doctest: +SKIP
    """
    return WhatIf(outlook(run, on=on, pipeline=pipeline, load=load))


def change_name(change: Change) -> str:
    """A change in words: a setting as one would type it."""
    told = ", ".join(f"{name}={value!r}" for name, value in change.settings.items())
    return text(f"whatif.change_{change.name}", setting=told)


def times(ratio: float) -> str:
    """A ratio as one would say it."""
    return f"×{ratio:.2f}"


def _head() -> Sequence[str]:
    return tuple(text(f"whatif.head_{name}") for name in ("change", "throughput", "p90", "can"))


__all__ = ["Tried", "WhatIf", "what_if"]
