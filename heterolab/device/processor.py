"""The simulated host's cores and Python's interpreter lock, shared by all that runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from heterolab.device.agenda import END, Agenda

#: Rounds in which the speeds of jobs that share the interpreter lock are settled.
LOCK_ROUNDS = 4


@dataclass(eq=False)
class Running:
    """A job on the CPU: what is left of it, and how fast it goes."""

    left_ns: float
    gil: float
    waits: float
    finish: Callable[[], None]
    speed: float = 1.0
    version: int = 0


class Processor:
    """The host's cores and Python's interpreter lock, shared by all that runs.

    A job holds the lock for a share `gil` of its time, and for a share `waits` it makes no
    progress while another job holds it. The two differ. Tokenising holds the lock at first and
    at the end, and lets go of it in between. Copying a picture row by row hardly ever holds it,
    but comes back for it at every row and waits each time. Plain Python never lets go, so others
    wait for it and it for nobody (a thread that wants the lock asks for it after 5 ms). So a job
    goes at 1 - waits × (the share of time in which others hold the lock), and at its fair share
    1 / n of n jobs at least. More jobs than cores share the cores.
    """

    def __init__(self, agenda: Agenda, cores: float) -> None:
        self.agenda, self.cores = agenda, max(cores, 1.0)
        self.jobs: list[Running] = []
        self._settled_ns = 0

    def start(self, now: int, ns: float, gil: float, waits: float, finish: Callable[[], None]) -> None:
        """Run a job that takes `ns` alone; `finish` is called at its end."""
        self._settle(now)
        self.jobs.append(Running(ns, gil, waits, finish))
        self._share(now)

    def _settle(self, now: int) -> None:
        """Take off what each job has done since the last change."""
        for job in self.jobs:
            job.left_ns -= (now - self._settled_ns) * job.speed
        self._settled_ns = now

    def _share(self, now: int) -> None:
        """Give each job its new speed and its new end."""
        jobs = self.jobs
        cores = min(1.0, self.cores / max(len(jobs), 1))
        for job, speed in zip(jobs, shared_speeds([(job.gil, job.waits) for job in jobs]), strict=True):
            job.speed = cores * speed
            job.version += 1
            end = now + max(0, round(job.left_ns / job.speed))
            self.agenda.at(end, END, self._end, job, job.version)

    def _end(self, job: Running, version: int) -> None:
        if job.version != version:
            return  # its speed has changed since: another end is on the agenda
        self._settle(self.agenda.now)
        self.jobs.remove(job)
        job.version += 1
        self._share(self.agenda.now)
        job.finish()


def shared_speeds(jobs: Sequence[tuple[float, float]]) -> list[float]:
    """Speeds, 0 to 1, of jobs that share one interpreter lock, given as (gil, waits) each.

    A job that others slow down also holds the lock less, so the speeds depend on each other; a
    few rounds settle them.
    """
    if len(jobs) < 2:
        return [1.0] * len(jobs)
    speeds = [1.0] * len(jobs)
    least = 1 / len(jobs)
    for _ in range(LOCK_ROUNDS):
        held = [gil * speed for (gil, _), speed in zip(jobs, speeds, strict=True)]
        total = sum(held)
        speeds = [
            max(least, 1 - waits * min(total - mine, 1.0))
            for (_, waits), mine in zip(jobs, held, strict=True)
        ]
    return speeds
