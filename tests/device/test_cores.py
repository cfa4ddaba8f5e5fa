"""Cores that are fast are kept to, and given back."""

import os
import threading

import pytest

from heterolab.device import cores
from heterolab.device.cores import FastCores

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system binds no threads")


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """Pretend that there are eight cores; what threads were bound to."""
    asked: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, to: asked.append(set(to)))
    return asked


def test_slow_cores_are_left_out(bound, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = {1, 6}
    monkeypatch.setattr(cores, "_loop_ns", lambda: 200 if bound[-1] & slow else 100)
    with FastCores() as fast:
        assert fast.choose() == {0, 2, 3, 4, 5, 7}
        assert bound[-1] == {0, 2, 3, 4, 5, 7}
        assert fast.summary()["slowest_core_over_fastest"] == 2.0
    assert bound[-1] == set(range(8))


def test_three_cores_are_kept_however_slow(bound, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "_loop_ns", lambda: 100 * (1 + min(bound[-1])))
    assert FastCores().choose() == {0, 1, 2}


def test_on_a_small_machine_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(cores, "times_by_core", lambda cores: pytest.fail("looked"))
    fast = FastCores()
    assert fast.choose() == {0, 1}
    assert fast.summary() == {"looked": 0}


def test_threads_that_run_are_bound_as_well() -> None:
    mine, stop = os.sched_getaffinity(0), threading.Event()
    other = threading.Thread(target=stop.wait)
    other.start()
    try:
        one = {min(mine)}
        cores._bind(one)
        assert os.sched_getaffinity(other.native_id or 0) == one
    finally:
        cores._bind(mine)
        stop.set()
        other.join()
    assert os.sched_getaffinity(0) == mine
