"""HeteroLab: see how a CPU and a GPU share the work of serving a model.

>>> import heterolab as hl
>>> dev = hl.open_device("sim:h200")
>>> load = hl.poisson(rate=300, n=64, seed=0)
>>> pipe = hl.Pipeline(hl.models.encoder(), batch=8, streams=2, memory="pinned")
>>> run = pipe.run(load, on=dev)
>>> hl.timeline(run)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from heterolab import lab, models
    from heterolab.device import open_device
    from heterolab.device.imagined import imagined
    from heterolab.device.profile import DeviceProfile
    from heterolab.lab.quiz import gap_quiz
    from heterolab.pipeline.again import predict_like
    from heterolab.pipeline.pipeline import Pipeline
    from heterolab.trace import metrics
    from heterolab.trace.trace import Trace
    from heterolab.view.compared import compare
    from heterolab.view.explained import explain
    from heterolab.view.panel import Panel
    from heterolab.view.pipelines import pipeline_panel
    from heterolab.view.timeline import describe, timeline
    from heterolab.view.whatif import what_if
    from heterolab.workload import bursts, closed_loop, poisson, replay

__version__ = "0.1.0"

# Each name is imported when it is first used, so that `import heterolab` needs neither a
# plotting library nor a model, and takes a fraction of a second.
_HOME = {
    "DeviceProfile": "heterolab.device.profile",
    "Panel": "heterolab.view.panel",
    "Pipeline": "heterolab.pipeline.pipeline",
    "Trace": "heterolab.trace.trace",
    "bursts": "heterolab.workload",
    "closed_loop": "heterolab.workload",
    "compare": "heterolab.view.compared",
    "describe": "heterolab.view.timeline",
    "explain": "heterolab.view.explained",
    "gap_quiz": "heterolab.lab.quiz",
    "imagined": "heterolab.device.imagined",
    "lab": "heterolab.lab",
    "metrics": "heterolab.trace.metrics",
    "models": "heterolab.models",
    "open_device": "heterolab.device",
    "pipeline_panel": "heterolab.view.pipelines",
    "poisson": "heterolab.workload",
    "predict_like": "heterolab.pipeline.again",
    "replay": "heterolab.workload",
    "timeline": "heterolab.view.timeline",
    "what_if": "heterolab.view.whatif",
}

__all__ = [
    "DeviceProfile",
    "Panel",
    "Pipeline",
    "Trace",
    "bursts",
    "closed_loop",
    "compare",
    "describe",
    "explain",
    "gap_quiz",
    "imagined",
    "lab",
    "metrics",
    "models",
    "open_device",
    "pipeline_panel",
    "poisson",
    "predict_like",
    "replay",
    "timeline",
    "what_if",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"heterolab has no {name!r}; it has: {', '.join(__all__)}")
    module = import_module(_HOME[name])
    value = getattr(module, name, module)  # a module (metrics, models) stands for itself
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
