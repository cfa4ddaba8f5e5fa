"""What all tests share: a device of each kind, and what may be missing where."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import heterolab as hl
from heterolab.device import cuda
from heterolab.device.base import Device

#: The kinds of device that every test of the seam and the pipeline runs on.
DEVICES = ("sim:h200", "cpu", pytest.param("cuda", marks=pytest.mark.gpu))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `slow` run only when asked for: ``pytest -m slow``."""
    if "slow" in config.getoption("-m"):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """``pytest -m gpu --gpu-report FILE`` keeps the result of the GPU's tests, and on what.

    Of tests that FILE knows from an earlier run on such a machine, those that ran now are replaced.
    """
    if not (path := config.getoption("--gpu-report")):
        return
    opened = hl.open_device("cuda")
    ran = {how: terminalreporter.stats.get(how, []) for how in ("passed", "failed", "error", "skipped")}
    meta = {k: v for k, v in opened.meta().items() if isinstance(v, str)}
    report = {
        "device": opened.name,
        "date": datetime.now(UTC).date().isoformat(),
        "versions": meta | {"heterolab": hl.__version__},
    }
    earlier = json.loads(Path(path).read_text()) if Path(path).exists() else {}
    same = all(earlier.get(name) == report[name] for name in ("device", "versions"))
    now = {r.nodeid for results in ran.values() for r in results}
    for how, results in ran.items():
        kept = [test for test in earlier.get(how, []) if same and test not in now]
        report[how] = sorted(kept + [r.nodeid for r in results])
    Path(path).write_text(json.dumps(report, indent=1) + "\n")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-report", help="write the result of the run, with the GPU's provenance, here")


@pytest.fixture(autouse=True, scope="session")
def _ctrl_c_interrupts() -> None:
    """A shell's background job inherits that Ctrl-C is ignored; the tests of Ctrl-C need it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def no_gpu() -> str:
    """Why there is no CUDA device here; empty where there is one."""
    return cuda.why_not()


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """A fresh device of each kind, closed after the test."""
    opened = hl.open_device(request.param)
    yield opened
    opened.close()


@pytest.fixture
def cpu_device() -> Iterator[Device]:
    """A fresh CPU device, closed after the test."""
    opened = hl.open_device("cpu")
    yield opened
    opened.close()


@pytest.fixture(autouse=True)
def _gpu_tests_need_a_gpu(request: pytest.FixtureRequest) -> None:
    """Tests marked `gpu` are skipped where there is none, CI included, with the reason.

    It depends on nothing that opens a device, so it runs before the `device` fixture does.
    """
    if request.node.get_closest_marker("gpu"):
        reason = request.getfixturevalue("no_gpu")
        if reason:
            pytest.skip(f"no GPU: {reason}")


def find(what: str) -> bool:
    """Whether a module can be imported, or a program is on the path."""
    return importlib.util.find_spec(what) is not None or shutil.which(what) is not None


@pytest.fixture(scope="session")
def need() -> Callable[..., None]:
    """``need("torch")`` skips the test where neither a module nor a program of that name (or of
    one of the names) is there. In CI, where all of them are installed, that is a failure."""

    def need_any_of(*names: str) -> None:
        if any(find(name) for name in names):
            return
        missing = f"this test needs {' or '.join(names)}, which is not installed here."
        if os.environ.get("CI") == "true":
            pytest.fail(f"{missing} CI has to install it: a skip would hide that it was not tested.")
        pytest.skip(missing)

    return need_any_of
