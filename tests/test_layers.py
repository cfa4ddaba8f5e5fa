"""Who may import whom (the layers of the architecture), read from the sources themselves."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "heterolab"
MODULES = {
    ".".join(("heterolab", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}

#: module prefix → prefixes of heterolab modules that it must not import
FORBIDDEN = {
    "heterolab.errors": ["heterolab"],
    "heterolab.trace.trace": ["heterolab.device", "heterolab.pipeline", "heterolab.models", "heterolab.view"],
    "heterolab.workload": ["heterolab.device", "heterolab.pipeline", "heterolab.trace", "heterolab.view"],
    "heterolab.device.profile": ["heterolab.device.sim", "heterolab.device.cpu", "heterolab.device.cuda"],
    "heterolab.device.base": ["heterolab.device.sim", "heterolab.device.cpu", "heterolab.device.cuda"],
    "heterolab.device.order": ["heterolab.device.sim", "heterolab.device.cpu", "heterolab.device.cuda"],
    "heterolab.device.sim": [
        "heterolab.device.cpu",
        "heterolab.device.cuda",
        "heterolab.device.cores",
        "heterolab.device.host",
    ],
    "heterolab.device.cpu": ["heterolab.device.sim", "heterolab.device.cuda"],
    "heterolab.device.cuda": ["heterolab.device.sim", "heterolab.device.cpu"],
    "heterolab.device.host": ["heterolab.device.sim", "heterolab.device.cpu", "heterolab.device.cuda"],
}
SEAM_ONLY = [
    "heterolab.device.sim",
    "heterolab.device.cpu",
    "heterolab.device.cuda",
    "heterolab.device.cupti",
    "heterolab.view",
]
for layer in ("heterolab.pipeline", "heterolab.models", "heterolab.trace"):
    FORBIDDEN[layer] = [*FORBIDDEN.get(layer, []), *SEAM_ONLY]

#: outside module → the only places that may import it
ONLY = {
    "time": (
        "heterolab.device.cores",
        "heterolab.device.host",
        "heterolab.device.cuda",
        "heterolab.device.calibrate",
        "heterolab.view",
    ),
    "cupy": ("heterolab.device.cuda",),
    "torch": (),
    "plotly": ("heterolab.view", "heterolab.lab"),
    "ipywidgets": ("heterolab.view", "heterolab.lab"),
}


def imports(path: Path) -> set[str]:
    """Every module that a file imports at run time, wherever in the file it does so."""
    found: set[str] = set()
    skipped: set[int] = set()
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            skipped |= {id(child) for child in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return found


def inside(module: str, prefixes: list[str] | tuple[str, ...]) -> bool:
    return any(module == p or module.startswith(p + ".") for p in prefixes)


@pytest.mark.parametrize("module", MODULES)
def test_layers(module: str) -> None:
    found = imports(MODULES[module])
    for layer, forbidden in FORBIDDEN.items():
        if inside(module, [layer]):
            breaches = {name for name in found if inside(name, forbidden) and not inside(name, [layer])}
            assert not breaches, f"{module} must not import {breaches}"
    for outside, allowed in ONLY.items():
        if any(inside(name, [outside]) for name in found):
            assert inside(module, allowed), f"{module} imports {outside}"


def test_no_stage_asks_whether_it_is_simulated() -> None:
    for module, path in MODULES.items():
        if inside(module, ["heterolab.pipeline", "heterolab.models"]):
            assert "simulat" not in "".join(
                ast.unparse(node.test)
                for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, ast.If)
            ), module
