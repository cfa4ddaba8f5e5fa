"""The simulator's own speed: what is counted, and that it does not fall off in long runs."""

from __future__ import annotations

import json

import pytest

from heterolab.device import scale


def test_a_plain_pipeline_does_the_ops_that_it_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    opened = scale.SimDevice.open
    monkeypatch.setattr(scale.SimDevice, "open", lambda *a, **k: made.append(opened(*a, **k)) or made[-1])
    speed = scale.plain(100, streams=2)
    kinds = [s.kind for s in made[0].host.recorder.spans if s.lane != "host"]
    assert speed.ops == len(kinds) == 102
    assert kinds.count("h2d") == kinds.count("d2h") == kinds.count("kernel") == 34
    assert speed.ops_per_s == pytest.approx(1e6 / speed.us_per_op)


def test_what_bench_scale_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "SIZES", (60, 90))
    monkeypatch.setattr(scale, "scale", lambda *a, **k: [scale.plain(60), scale.plain(90)])
    assert [row["ops"] for row in json.loads(scale.main(as_json=True))] == [60, 90, 60, 90]
    assert "measured on this machine" in scale.main()


@pytest.mark.slow
def test_an_op_costs_the_same_in_a_run_of_a_million() -> None:
    few, many = scale.scale((10**4, 10**6))
    assert many.us_per_op <= 1.5 * few.us_per_op
