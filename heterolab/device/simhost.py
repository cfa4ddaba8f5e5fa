"""A host with a virtual clock: the CPU's side of the simulator.

The code that runs is real, the time it takes is not: each call moves the clock on by what the
machine's profile says it costs. Things that happen by themselves (a copy ends, a worker's job
ends) lie on the *agenda*, in order of time; whenever the host looks at them or sleeps, the
agenda is played up to that moment. No threads and no real clock: same seed, same trace.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Literal

from heterolab.device.agenda import Agenda, Ending
from heterolab.device.base import Background, Event, Host, Pool, Wait
from heterolab.device.processor import Processor
from heterolab.device.profile import DeviceProfile
from heterolab.device.simpool import SimPool
from heterolab.errors import InputError, StalledError
from heterolab.trace.trace import CPU, NO_STREAM, NONE, WAIT, Recorder, Span

MAX_WORKERS = 256
NEVER = "{} waits for something that can never happen: nothing is in flight."


class SimRecorder(Recorder):
    """Spans of a run on a virtual clock. One thread writes them: there is no lock. It may write
    plain tuples to :attr:`rows`, which are made spans once somebody looks at them."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Any] = self._spans
        self._looked = 0

    def next_op(self) -> int:
        self._next = number = self._next + 1
        return number - 1

    @property
    def spans(self) -> list[Span]:
        spans, new = self._spans, tuple.__new__
        for i in range(self._looked, len(spans)):
            spans[i] = new(Span, spans[i])
        self._looked = len(spans)
        return spans

    def since(self, index: int) -> list[Span]:
        return self.spans[index:]


class SimHost(Host):
    """The virtual clock, the host thread, and its pools of workers.

    Parameters
    ----------
    profile
        Costs of the CPU's stages, of waiting and of workers.
    seed, jitter
        With ``jitter`` > 0, every cost is multiplied by a random factor around 1 with about
        that relative deviation, drawn from `seed`. 0 is off.
    """

    recorder: SimRecorder

    def __init__(self, profile: DeviceProfile, seed: int = 0, jitter: float = 0.0) -> None:
        if not isinstance(seed, int):
            raise InputError(f"seed={seed!r} is not a whole number.")
        if not isinstance(jitter, int | float) or not 0 <= jitter <= 1:
            raise InputError(f"jitter={jitter!r} is a relative deviation: give a number from 0 to 1.")
        self.recorder = SimRecorder()
        self.profile = profile
        self.agenda = Agenda()
        self.cpu = Processor(self.agenda, profile.host.cores)
        self.seed, self.jitter = seed, jitter
        self._random = random.Random(seed) if jitter else None
        #: The virtual clock.
        self.now_ns = 0
        self._devices = 0
        self._woken = False
        #: The share of a device call in which others wait for the interpreter lock.
        self.call_gil = (profile.seam or profile.host).call_gil
        #: Whether workers or a device may take turns with the host thread on its cores.
        self.shared = False
        #: CPU work and bytes staged by the host thread so far: what makes its caches cold.
        self.worked_ns = 0.0
        self.staged_bytes = 0.0
        #: Changes whenever these two do.
        self.stirred = 0

    def next_device_index(self) -> int:
        """The index of one more device on this host."""
        self._devices += 1
        return self._devices - 1

    # -- the clock ---------------------------------------------------------------------

    def now(self) -> int:
        return self.now_ns

    def catch_up(self) -> None:
        """Let all that is due by now have happened."""
        self.agenda.play_until(self.now_ns)

    def noisy(self, ns: float) -> float:
        """`ns` with the run's jitter."""
        return ns * self._random.lognormvariate(0.0, self.jitter) if self._random else ns

    def spend(self, ns: float, gil: float = 1.0, waits: float | None = None) -> None:
        """The host thread works for `ns` (longer if workers contend for the interpreter, see
        :class:`Processor`; `waits` is `gil` where it is not given)."""
        if self.jitter:
            ns = self.noisy(ns)
        if not self.shared or self._undisturbed(ns):
            self.now_ns += round(ns)
            return
        self.catch_up()
        finished: list[int] = []
        waits = gil if waits is None else waits
        self.cpu.start(self.now_ns, ns, gil, waits, lambda: finished.append(self.agenda.now))
        while not finished:
            self.agenda.play_one()
        self.now_ns = finished[0]

    def _undisturbed(self, ns: float) -> bool:
        """Nothing else runs on the CPU in the next `ns`, as far as one can know."""
        soon = self.agenda and self.agenda.next_ns() < self.now_ns + ns
        return not (self.cpu.jobs or soon)

    def work(self, ns: float, gil: float = 1.0, waits: float | None = None) -> None:
        """The host thread computes something of its own for `ns`."""
        self.worked_ns += ns
        self.stirred += 1
        self.spend(ns, gil, waits)

    def staged(self, nbytes: int) -> None:
        """The host thread has copied bytes of pageable memory."""
        self.staged_bytes += nbytes
        self.stirred += 1

    def enter(self, between_ns: float, ns: float, held: bool = False) -> tuple[int, int]:
        """The host calls the device: a pause before, then `ns` inside. Gives (entry, exit).

        `held` says that the call blocks: its length is the device's doing, not the host's.
        """
        if not (self.shared or self.jitter):  # as a rule: nothing can come between
            entry = self.now_ns + round(between_ns)
            self.now_ns = exit_ns = entry + round(ns)
            return entry, exit_ns
        if between_ns:
            self.spend(between_ns, self.call_gil, 1.0)
        entry = self.now_ns
        if held:  # in the driver, which has let go of the interpreter lock
            self.spend(ns, 0.0)
        else:
            self.spend(ns, self.call_gil, 1.0)
        return entry, self.now_ns

    def sleep_until(self, happened: Callable[[], bool], why: str) -> None:
        """Hold the host thread until `happened()`; the clock stands where it came true."""
        while not happened():
            if not self.agenda:
                raise StalledError(NEVER.format(why))
            self.agenda.play_one()
            self.now_ns = max(self.now_ns, self.agenda.now)

    def sleep_until_done(self, ops: Sequence[Ending], why: str) -> None:
        """Hold the host thread until all `ops` have ended."""
        for op in ops:
            if not (op.done or self.agenda.play_till(op, self)):
                raise StalledError(NEVER.format(why))

    # -- work --------------------------------------------------------------------------

    def call(self, name: str, fn: Callable[..., Any], *args: Any, size: int = 1, batch: int = NONE) -> Any:
        cost = self.profile.cpu_cost(name)
        op, start = self.recorder.next_op(), self.now_ns
        self.catch_up()
        try:
            return fn(*args)
        finally:
            self.work(cost.time.at(size), cost.gil.at(size), cost.waits.at(size))
            self.recorder.add(
                Span(op, CPU, name, "host", NO_STREAM, NONE, start, start, self.now_ns, 0, batch)
            )

    def pool(self, workers: int, kind: Literal["thread", "process"] = "thread") -> Pool:
        if not isinstance(workers, int) or not 1 <= workers <= MAX_WORKERS:
            raise InputError(f"workers={workers!r}: a pool has 1 to {MAX_WORKERS} workers.")
        if kind not in ("thread", "process"):
            raise InputError(f'kind={kind!r} is not a kind of pool. Use "thread" or "process".')
        return SimPool(self, workers, kind)

    def spawn(self, step: Callable[[], bool]) -> Background:
        return Finished(step)

    # -- waiting -----------------------------------------------------------------------

    def wait_any(self, waits: Sequence[Wait], until: int | None = None) -> list[Wait]:
        costs = self.profile.waiting
        self.work(costs.loop_step_ns)
        self.catch_up()
        entered = self.now_ns
        while not (done := [wait for wait in waits if wait.done]) and not self._woken:
            if until is not None and until <= self.now_ns:
                break
            if self.agenda and (until is None or self.agenda.next_ns() <= until):
                self.agenda.play_one()
                self.now_ns = max(self.now_ns, self.agenda.now)
            elif until is not None:
                self.now_ns = until
            else:
                raise StalledError(
                    f"The host waits for {len(waits)} things and no time limit, and nothing is in flight "
                    "that could end its wait. Submit or enqueue the work first, or give until=."
                )
        self._woken = False
        if self.now_ns > entered:
            late = costs.timer_ns
            if done:
                late = costs.event_ns if isinstance(done[0], Event) else costs.job_ns
            self.now_ns += round(self.noisy(late))
            self.catch_up()
            done = [wait for wait in waits if wait.done]
            op = self.recorder.next_op()
            self.recorder.add(Span(op, WAIT, "wait", "host", NO_STREAM, NONE, entered, entered, self.now_ns))
        return done

    def wake(self) -> None:
        self._woken = True


class Finished(Background):
    """A loop that has run to its end already: a virtual clock has nothing beside it."""

    def __init__(self, step: Callable[[], bool]) -> None:
        self._error: BaseException | None = None
        try:
            while step():
                pass
        except Exception as error:  # raised where a real loop's error would be: at join()
            self._error = error

    @property
    def done(self) -> bool:
        return True

    def join(self, timeout_s: float | None = None) -> bool:
        if self._error is not None:
            raise self._error
        return True
