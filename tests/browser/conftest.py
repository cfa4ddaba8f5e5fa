"""A real browser on a real JupyterLab, each test with a server and folders of its own.

The visible "idle" light of JupyterLab lies while widgets load, so readiness is asked of the
application itself (``window.jupyterapp``), and *Run all* is started without awaiting its
promise, which can hang.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
#: How long a step of a page may take. CI machines are slow; a passing test never waits for it.
PATIENCE_S = 90

_CONNECTED = """() => {
  const widget = window.jupyterapp?.shell?.currentWidget;
  const kernel = widget?.context?.isReady && widget?.sessionContext?.session?.kernel;
  return !!kernel && kernel.connectionStatus === 'connected' && kernel.status === 'idle';
}"""
_RAN = """() => {
  const cells = window.jupyterapp.shell.currentWidget.content.widgets;
  const code = cells.filter(cell => cell.model.type === 'code' && cell.model.sharedModel.source.trim());
  return code.every(cell => cell.model.executionCount !== null)
    && window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.status === 'idle';
}"""
_ERRORS = """() => window.jupyterapp.shell.currentWidget.content.widgets
  .filter(cell => cell.model.type === 'code')
  .flatMap(cell => cell.model.sharedModel.outputs)
  .filter(output => output.output_type === 'error')
  .map(output => output.ename + ': ' + output.evalue)"""


class LabPage:
    """A notebook open in JupyterLab.

    Attributes
    ----------
    page
        Playwright's page.
    complaints
        What the console and the page reported as errors so far.
    """

    def __init__(self, page, complaints: list[str]) -> None:
        self.page, self.complaints = page, complaints

    def run_all(self) -> None:
        """Run every cell and wait for the last; fails on an error in a cell."""
        self.page.evaluate("() => { window.jupyterapp.commands.execute('notebook:run-all-cells'); }")
        self.page.wait_for_function(_RAN, timeout=PATIENCE_S * 1000)
        errors = self.page.evaluate(_ERRORS)
        assert not errors, errors

    def until(self, what: Callable[[], object], message: str) -> object:
        """What `what` gives once it is true."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            if value := what():
                return value
            self.page.wait_for_timeout(100)
        pytest.fail(f"{message}. Console: {self.complaints}")

    def plot(self, place: int = 0) -> dict:
        """What a plotly figure on the page draws: the x of its paths, and its lettering."""
        return self.page.evaluate(
            """place => {
              const plot = document.querySelectorAll('.js-plotly-plot')[place];
              return plot && plot.data ? {
                x: plot.data.map(trace => Array.from(trace.x?._inputArray ?? trace.x ?? [])),
                notes: (plot.layout.annotations ?? []).map(note => note.text),
                paths: plot.querySelectorAll('path.js-fill').length,
              } : null;
            }""",
            place,
        )

    def text(self, selector: str, place: int = 0) -> str:
        """The text of an element of the page."""
        return self.page.locator(selector).nth(place).inner_text()


@pytest.fixture
def chromium(need) -> str:
    """The browser's path; skips where there is none, fails in CI."""
    need("playwright")
    need(*CHROMIUM)
    return next(path for name in CHROMIUM if (path := shutil.which(name)))


@pytest.fixture
def lab_page(chromium: str, tmp_path: Path) -> Iterator[Callable[[Path], LabPage]]:
    """``lab_page(notebook)`` opens a copy of it in JupyterLab, its kernel connected. At the end
    the test fails if the browser's console showed an error."""
    from playwright.sync_api import sync_playwright

    folder = tmp_path / "notebooks"
    folder.mkdir()
    with _server(folder, tmp_path) as address, sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            tmp_path / "profile",
            executable_path=chromium,
            headless=True,
            args=FLAGS,
            viewport={"width": 1500, "height": 1100},
        )
        complaints: list[str] = []

        def open_notebook(notebook: Path) -> LabPage:
            shutil.copy(notebook, folder)
            page = context.pages[0]
            page.on("console", lambda m: complaints.append(m.text) if m.type == "error" else None)
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.goto(address.format(notebook.name), timeout=PATIENCE_S * 1000)
            page.wait_for_function(_CONNECTED, timeout=PATIENCE_S * 1000)
            return LabPage(page, complaints)

        try:
            yield open_notebook
        finally:
            if os.environ.get("HETEROLAB_SCREENSHOT"):
                context.pages[0].screenshot(path=os.environ["HETEROLAB_SCREENSHOT"])
            context.close()
        assert not complaints, complaints


@contextmanager
def _server(folder: Path, scratch: Path) -> Iterator[str]:
    """A JupyterLab that shares nothing with the user's own; gives the address of a notebook."""
    settings = scratch / "config" / "labconfig"
    settings.mkdir(parents=True)
    (settings / "page_config.json").write_text(
        json.dumps({"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": True}})
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    token = "browser-test"
    own = {f"JUPYTER_{name}_DIR": str(scratch / name.lower()) for name in ("CONFIG", "DATA", "RUNTIME")}
    command = [
        *(sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1"),
        *(f"--port={port}", "--ServerApp.port_retries=0", f"--IdentityProvider.token={token}"),
        *(f"--notebook-dir={folder}", "--LabApp.expose_app_in_browser=True"),
    ]
    with (scratch / "server.log").open("wb") as log:
        process = subprocess.Popen(command, env=os.environ | own, stdout=log, stderr=log)
        try:
            _wait_for(f"http://127.0.0.1:{port}/api?token={token}", process, scratch / "server.log")
            yield f"http://127.0.0.1:{port}/lab/tree/{{}}?token={token}&reset"
        finally:
            process.terminate()
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_for(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end and process.poll() is None:
        with suppress(OSError), urllib.request.urlopen(address, timeout=5):
            return
        time.sleep(0.2)
    pytest.fail(f"JupyterLab did not start:\n{log.read_text(errors='replace')[-2000:]}")
