"""Two ways to wait for an event of a GPU, measured against each other.

An event cannot call the host. Either the host asks it again and again (:class:`RealHost`), or
another thread sleeps in the driver until it is reached and tells the host (:class:`WaiterHost`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from heterolab.device.base import Device, Event, Wait
from heterolab.device.calibrate.figures import (
    Effort,
    Json,
    event_lateness,
    spin,
    spread,
    wait_for,
)
from heterolab.device.host import RealHost


class WaiterHost(RealHost):
    """A host that has another thread wait for each event, instead of asking the event itself.

    That thread sleeps in the driver without the interpreter lock; when it wakes it tells the host.
    """

    def __init__(self) -> None:
        super().__init__()
        self._waiters = ThreadPoolExecutor(8, "heterolab-waiter")
        self._watched: set[int] = set()

    def must_poll(self, wait: Wait) -> bool:
        if not isinstance(wait, Event):
            return super().must_poll(wait)
        if wait.op not in self._watched:
            self._watched.add(wait.op)
            self._waiters.submit(self._watch, wait)
        return False

    def _watch(self, event: Any) -> None:
        event.block()
        self.notify()

    def close(self) -> None:
        self._waiters.shutdown()


def compare_waiting(open_device: Callable[[RealHost], Device], effort: Effort) -> Json:
    """Lateness after an event and CPU use while waiting: polling against a waiter thread.

    Parameters
    ----------
    open_device
        Opens the device under the host it is given.

    Returns
    -------
    By way of waiting: lateness in ns (median and 99th percentile), and the CPU time used while
    waiting, as a share of one core.
    """
    found: Json = {}
    for name, host in (("polling", RealHost()), ("waiter thread", WaiterHost())):
        device = open_device(host)
        stream = device.stream()
        event_lateness(device, stream)
        late = [event_lateness(device, stream) for _ in range(effort.repeats * 10)]
        cpu, wall = time.process_time_ns(), time.perf_counter_ns()
        for _ in range(effort.repeats):
            stream.launch(spin(5_000_000))
            wait_for(device, stream.record())
        cpu, wall = time.process_time_ns() - cpu, time.perf_counter_ns() - wall
        found[name] = spread(late) | {
            "p99": round(float(np.percentile(late, 99)), 1),
            "cpu_share": round(cpu / wall, 3),
        }
        device.close()
        if isinstance(host, WaiterHost):
            host.close()
    return found
