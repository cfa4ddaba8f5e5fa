"""The grid's kept figures hold what is promised, and the simulator still says what they say."""

import json
import sys
from pathlib import Path

import pytest

import heterolab as hl
from heterolab.device.profile import DeviceProfile

LABS = Path(hl.__file__).parent.parent / "labs"
sys.path.insert(0, str(LABS))

import grid  # noqa: E402

REPORT = json.loads(grid.OUT.read_text())


def test_it_is_a_measurement_of_a_gpu_with_its_provenance() -> None:
    assert REPORT["source"] in ("cupti", "cuda-events")
    assert {"device", "date", "meta", "passes", "profile", "cores", "heterolab"} <= set(REPORT)
    assert REPORT["device"] == DeviceProfile.load("h200").name
    assert [row["point"] for row in REPORT["rows"]] == grid.points()


def test_prediction_and_measurement_lie_together() -> None:
    found = grid.summary(REPORT["rows"])
    assert found == REPORT["summary"]
    assert found["throughput_error_median"] <= 0.10
    assert found["p90_error_median"] <= 0.15
    assert found["best_change_right"] >= 0.80


@pytest.mark.parametrize(
    "row", REPORT["rows"][5::23], ids=lambda row: "-".join(map(str, row["point"].values()))
)
def test_the_simulator_still_predicts_what_is_kept(row) -> None:
    predicted = grid.predict("h200", row["point"])
    assert predicted["throughput_per_s"] == pytest.approx(row["throughput_per_s"]["predicted"], rel=0.01)
    assert predicted["p90_ns"] == pytest.approx(row["p90_ns"]["predicted"], rel=0.02)


def test_changes_are_of_one_setting() -> None:
    point = grid.points()[0]
    options = grid.changes(point)
    assert len(options) == sum(len(grid.KNOBS[name]) - 1 for name in grid.SETTINGS)
    for option in options:
        assert sum(option[name] != point[name] for name in point) == 1
        assert option["payload"] == point["payload"]


def test_the_best_change_is_judged_by_what_was_measured() -> None:
    def row(point, predicted: float, measured: float):
        both = {"median": measured, "low": measured, "high": measured, "predicted": predicted}
        return {"point": point, "throughput_per_s": both, "p90_ns": both}

    fair = [row(point, 100 + i, 100 + i) for i, point in enumerate(grid.points())]
    assert grid.summary(fair)["best_change_right"] == 1.0
    misled = [row(point, 1000 - i, 100 + i) for i, point in enumerate(grid.points())]
    assert grid.summary(misled)["best_change_right"] < 0.8


def test_the_readme_shows_the_kept_figures() -> None:
    readme = grid.README.read_text()
    assert grid.written(readme, REPORT) == readme
    assert grid.table_of(REPORT) in readme
