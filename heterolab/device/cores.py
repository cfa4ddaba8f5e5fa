"""The CPU's cores are not equal, least of all in a cloud.

A virtual core shares a real one with a stranger: on a rented machine of 16 cores, the same Python
loop took 0.53 ms on eleven of them and up to 1.0 ms on the others, and which ones they were
changed within seconds. A measurement that does not look to it compares neighbours, not settings.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

#: A core counts as fast where it needs at most this much more than the fastest one.
NEARLY = 1.08
#: Rounds of the loop that is timed: about a fifth of a millisecond.
ROUNDS = 8_000
TRIES = 3


def _loop_ns() -> int:
    """The best of a few times of a loop in plain Python."""
    best = 1 << 62
    for _ in range(TRIES):
        start, x = time.perf_counter_ns(), 0
        for i in range(ROUNDS):
            x += i
        best = min(best, time.perf_counter_ns() - start)
    return best


def times_by_core(cores: set[int]) -> dict[int, int]:
    """What a short loop takes on each core, in ns. The calling thread ends on one of them."""
    times = {}
    for core in cores:
        os.sched_setaffinity(0, {core})
        times[core] = _loop_ns()
    return times


class FastCores:
    """Keeps this process to the cores that are fast at the moment.

    `choose` before each measurement (it takes about 10 ms for 16 cores); `release` afterwards.
    Where the system cannot bind threads to cores, or there are two cores or fewer, nothing happens.
    """

    def __init__(self) -> None:
        self.able = hasattr(os, "sched_setaffinity") and Path("/proc/self/task").is_dir()
        self.all: set[int] = set(os.sched_getaffinity(0)) if self.able else set()
        #: ns of the loop by core, each time that `choose` looked.
        self.seen: list[dict[int, int]] = []

    def __enter__(self) -> FastCores:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def choose(self) -> set[int]:
        """Bind every thread of this process to the cores that are fast now; gives these."""
        if not self.able or len(self.all) < 3:
            return self.all
        times = times_by_core(self.all)
        self.seen.append(times)
        by_speed = sorted(times, key=times.__getitem__)
        fast = {core for core in by_speed if times[core] <= NEARLY * times[by_speed[0]]}
        fast |= set(by_speed[:3])  # a host thread and two workers at least
        _bind(fast)
        return fast

    def release(self) -> None:
        """All cores again."""
        if self.able:
            _bind(self.all)

    def summary(self) -> dict[str, float]:
        """How unequal the cores were: the slowest and the median one over the fastest, and how
        often that was looked at."""
        ratios = [sorted(t / min(times.values()) for t in times.values()) for times in self.seen]
        if not ratios:
            return {"looked": 0}
        middle = sorted(r[len(r) // 2] for r in ratios)
        slowest = sorted(r[-1] for r in ratios)
        return {
            "looked": len(ratios),
            "median_core_over_fastest": round(middle[len(middle) // 2], 3),
            "slowest_core_over_fastest": round(slowest[len(slowest) // 2], 3),
        }


def _bind(cores: set[int]) -> None:
    """Bind this process's threads to `cores`; those that they start later inherit it."""
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that has just ended
            os.sched_setaffinity(int(task.name), cores)
