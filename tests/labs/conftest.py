"""What the tests of the labs share: the build script as a module."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest
from lab_files import LABS


@pytest.fixture(scope="session")
def build() -> ModuleType:
    """labs/build.py."""
    pytest.importorskip("jupytext", reason="building labs needs jupytext (pip install '.[test]')")
    spec = importlib.util.spec_from_file_location("labs_build", LABS / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
