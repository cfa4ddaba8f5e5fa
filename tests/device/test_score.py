"""The simulator against what a real H200 did with 63 stream programs."""

from __future__ import annotations

import copy
import gzip
import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from heterolab.device.score import Report, load_programs, main, score
from heterolab.errors import InputError

PROGRAMS = Path(__file__).parent.parent / "data" / "h200-open.json.gz"
FAMILIES = (
    "concurrent",
    "copies",
    "dag",
    "default_stream",
    "hostwork",
    "pipeline",
    "tiny",
    "zerocopy",
)


def raw() -> list[dict[str, Any]]:
    programs: list[dict[str, Any]] = json.loads(gzip.decompress(PROGRAMS.read_bytes()))
    return programs


@pytest.fixture(scope="module")
def report() -> Report:
    return score(load_programs(PROGRAMS))


def test_the_median_error_is_at_most_ten_percent(report: Report) -> None:
    assert len(report.programs) == 63
    assert median(report.errors()) <= 0.10


@pytest.mark.parametrize("family", FAMILIES)
def test_no_family_is_far_off(report: Report, family: str) -> None:
    assert median(report.errors(family)) <= 0.12


def test_with_the_hosts_own_times_the_device_is_right(report: Report) -> None:
    assert median(report.recorded_errors.values()) <= 0.03


def test_most_predictions_lie_where_the_passes_lie(report: Report) -> None:
    assert sum(report.inside.values()) / len(report.inside) >= 0.75


def test_a_score_repeats_itself(report: Report) -> None:
    assert score(load_programs(PROGRAMS)).programs == report.programs


def test_predictions_use_nothing_that_was_measured(report: Report, tmp_path: Path) -> None:
    programs = raw()
    for program in programs:
        for one in program["measured"]["passes"]:
            one["wall_us"] = [9 * us for us in one["wall_us"]]
            one["host_us"] = [[2 * a, 2 * b] for a, b in one["host_us"]]
            one["launch_reference_us"] = 99
        program["measured"].pop("traced")
    changed = score(load_programs(written(tmp_path, programs)))
    assert [p.predicted_us for p in changed.programs] == [p.predicted_us for p in report.programs]
    assert [p.measured_us for p in changed.programs] == pytest.approx([
        9 * p.measured_us for p in report.programs
    ])


def test_the_recorded_host_is_played(tmp_path: Path) -> None:
    """A host that takes twice its time between calls makes a program of launches longer."""
    program = next(p for p in raw() if p["id"] == "tiny-02")
    slow = copy.deepcopy(program)
    for one in slow["measured"]["passes"]:
        one["host_us"] = [[2 * a, 2 * b] for a, b in one["host_us"]]
    ordinary, slower = score(load_programs(written(tmp_path, [program, slow]))).programs
    for us, twice in zip(
        ordinary.predicted_with_recorded_host_us, slower.predicted_with_recorded_host_us, strict=True
    ):
        assert twice == pytest.approx(2 * us, rel=0.05)
    assert slower.predicted_us == ordinary.predicted_us


def test_json_has_what_it_promises() -> None:
    result = json.loads(main(PROGRAMS, as_json=True))
    assert set(result) == {"programs", "ops_per_s"}
    assert result["ops_per_s"] > 0
    for entry in result["programs"]:
        assert set(entry) == {
            "id",
            "family",
            "predicted_us",
            "predicted_with_recorded_host_us",
            "measured_us",
        }
        assert len(entry["predicted_with_recorded_host_us"]) == 3
        assert entry["predicted_us"] > 0


def test_the_table_has_a_line_a_family_and_one_for_all() -> None:
    lines = main(PROGRAMS).splitlines()
    assert [line.split()[0] for line in lines[1 : len(FAMILIES) + 2]] == [*FAMILIES, "all"]


def written(folder: Path, programs: object) -> Path:
    path = folder / "programs.json"
    path.write_text(json.dumps(programs))
    return path


def _set(key: str, value: object, op: int = 0) -> Any:
    def change(program: dict[str, Any]) -> None:
        program["ops"][op][key] = value

    return change


DAMAGE = {
    "no ops": lambda p: p.pop("ops"),
    "no id": lambda p: p.pop("id"),
    "no streams": lambda p: p.update(streams=None),
    "no measurement": lambda p: p.pop("measured"),
    "no pass": lambda p: p["measured"].update(passes=[]),
    "a pass without walls": lambda p: p["measured"]["passes"][0].update(wall_us=[]),
    "host times for other ops": lambda p: p["measured"]["passes"][0]["host_us"].pop(),
    "an unknown op": _set("op", "teleport"),
    "a stream that is not there": _set("stream", 99),
    "a stream that is a text": _set("stream", "0"),
    "half a stream": _set("stream", 0.5),
    "no bytes": _set("bytes", 0),
    "bytes as a text": _set("bytes", "many"),
    "an unknown memory": _set("host", "cloudy"),
    "an op that is none": lambda p: p["ops"].__setitem__(0, 7),
    "a wait for nothing": lambda p: p["ops"].insert(0, {"op": "wait", "event": 1, "stream": 0}),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_program_is_refused_with_its_place(tmp_path: Path, damage: Any) -> None:
    good, bad = raw()[:2]
    assert bad["ops"][0]["op"] in ("h2d", "d2h")
    damage(bad)
    with pytest.raises(InputError, match=r"programs\.json, program 1"):
        load_programs(written(tmp_path, [good, bad]))


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"[7]", b"\x1f\x8bnot gzip", b"\xff"])
def test_a_file_of_no_programs_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "programs.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"programs\.json"):
        load_programs(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.json"):
        load_programs(tmp_path / "none.json")
