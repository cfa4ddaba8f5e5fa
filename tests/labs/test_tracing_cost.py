"""What tracing costs: the script works on any device, and what it stored keeps the promise."""

import importlib.util
import json
from pathlib import Path

import pytest

import heterolab as hl

ROOT = Path(__file__).parent.parent.parent
REPORT = ROOT / "labs" / "recordings" / "tracing-cost.json"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("tracing_cost", ROOT / "labs" / "tracing_cost.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_report_has_every_source_and_where_it_comes_from(script, monkeypatch) -> None:
    opened = []

    def open_device(name, spans):
        opened.append(spans)
        return real("cpu")

    real = hl.open_device
    monkeypatch.setattr(hl, "open_device", open_device)
    monkeypatch.setattr(script, "BATCH", 2)
    monkeypatch.setattr(script, "PASSES", 2)
    monkeypatch.setattr(script, "REQUESTS", 8)
    monkeypatch.setattr(script, "KNOBS", {"batch": 2})
    monkeypatch.setattr(script, "torch_sees_the_gpu", lambda: False)
    made = json.loads(json.dumps(script.report("cpu", 1)))
    assert opened == ["off"] * 2 + ["cupti", "events", "off", "off", "events", "cupti"]
    assert set(made["rows"]) == {script.BEFORE, *script.SOURCES}
    assert made["rows"]["no spans"]["encoder"]["over_no_spans"]["median"] == 1
    assert made["no_torch_profiler"]
    assert {"device", "date", "meta", "heterolab", "rounds", "knobs"} <= set(made)
    shown = script.table(made)
    assert "| CUPTI, exact |" in shown
    assert made["device"] in shown


def test_exact_spans_cost_the_eager_encoder_at_most_a_tenth() -> None:
    if not REPORT.exists():
        pytest.skip(
            "labs/tracing_cost.py has not been run on a GPU yet: no labs/recordings/tracing-cost.json"
        )
    made = json.loads(REPORT.read_text())
    exact = made["rows"]["CUPTI, exact"]
    assert made["meta"]["spans"].startswith("spans from CUPTI")
    assert exact["encoder"]["over_no_spans"]["median"] >= 0.90
    assert not exact["notes"], "no record was lost"
