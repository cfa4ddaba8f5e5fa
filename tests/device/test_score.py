"""The simulator against what a real H200 did with 63 stream programs."""

from __future__ import annotations

import copy
import gzip
import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from heterolab.device.profile import DeviceProfile
from heterolab.device.programs import Pass, Program, Traced
from heterolab.device.replay import Player
from heterolab.device.score import Report, bimodal, load_programs, main, score, without_cpu_costs
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


# On all 63 programs, two thirds of which the profile was fitted on; test_fit.py has the others.


def test_the_median_error_is_at_most_four_percent(report: Report) -> None:
    assert len(report.programs) == 63
    assert median(report.errors()) <= 0.04


@pytest.mark.parametrize("family", FAMILIES)
def test_no_family_is_far_off(report: Report, family: str) -> None:
    assert median(report.errors(family)) <= 0.10


def test_with_the_hosts_own_times_the_device_is_right(report: Report) -> None:
    assert report.figures()["error_with_recorded_host"]["median"] <= 0.015


def test_most_predictions_lie_where_the_passes_lie(report: Report) -> None:
    assert report.figures()["inside"] >= 0.78


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
    assert result["ops_per_s"] > 0
    for entry in result["programs"]:
        assert {
            "id",
            "family",
            "predicted_us",
            "predicted_with_recorded_host_us",
            "measured_us",
        } <= set(entry)
        assert len(entry["predicted_with_recorded_host_us"]) == 3
        assert entry["predicted_us"] > 0
    everything = [result["all"], *result["by_family"].values()]
    assert set(result["by_family"]) == set(FAMILIES)
    for figures in everything:
        for key in ("error", "error_with_recorded_host", "error_without_cpu_costs"):
            assert 0 <= figures[key]["median"] <= figures[key]["p90"]
        assert 0 <= figures["inside"] <= 1
    assert sum(f["programs"] for f in everything[1:]) == everything[0]["programs"] == 63
    kinds = result["span_duration_error"]
    assert sum(d["spans"] for kind, d in kinds.items() if kind != "all") == kinds["all"]["spans"]
    assert {"h2d pinned", "d2h pageable", "gemm float32", "vadd mapped", "spin"} < set(kinds)
    assert result["start_order"]["pairs"] > 1000
    assert set(result["bimodal"]) < {p["id"] for p in raw()}


def test_the_tables_have_a_line_a_family_and_one_for_all() -> None:
    text = main(PROGRAMS)
    lines = text.splitlines()
    assert [line.split()[0].rstrip("*") for line in lines[1 : len(FAMILIES) + 2]] == [*FAMILIES, "all"]
    for word in ("span durations", "start order", "no CPU costs", "ops a second of one core"):
        assert word in text


def test_spans_last_as_long_and_start_in_the_order_as_measured(report: Report) -> None:
    assert report.durations()["all"]["median"] <= 0.02
    assert report.start_order is not None
    assert report.start_order >= 0.92


def test_a_model_of_the_gpu_alone_is_far_off_where_ops_are_small(report: Report) -> None:
    """The course's thesis: leave the CPU's costs out, and hundreds of tiny ops cost a third."""
    with_cpu, without = (
        report.figures("tiny")[key]["median"] for key in ("error", "error_without_cpu_costs")
    )
    assert with_cpu < 0.1
    assert without > 0.5


def test_without_cpu_costs_only_the_device_and_the_programs_own_work_take_time() -> None:
    profile = without_cpu_costs(DeviceProfile.load("h200"))
    host = {"op": "host", "us": 50}
    assert walls(profile, host, {"op": "sync"}) == 50
    launch = {"op": "kernel", "kernel": "spin", "stream": 0, "blocks": 1, "threads": 32, "ns": 10_000}
    times = Player(profile).replay(program(launch, launch, {"op": "sync"}))
    assert times.exits_us[:2] == (0, 0)
    gap = profile.gaps.kernel_kernel_ns
    assert times.wall_us * 1000 == profile.host.start_ns + 2 * (10_000 + profile.compute.fixed_ns) + gap


# -- what the figures mean, on programs made up for it -------------------------------------


def program(*ops: dict[str, Any], streams: int = 1, **measured: Any) -> Program:
    """A program whose three passes are as given: by default 1 µs, and no host time at all."""
    nothing = Pass(1.0, (1.0,) * 4, ((0.0, 0.0),) * len(ops), 1.0)
    fields = {"passes": (nothing,) * 3, "traced": None} | measured
    return Program("made-up", "made-up", (False,) * streams, ops, **fields)


def walls(profile: DeviceProfile, *ops: dict[str, Any]) -> float:
    return Player(profile).wall_us(program(*ops))


def copies(*streams: int) -> list[dict[str, Any]]:
    return [{"op": "h2d", "stream": s, "bytes": 1_000_000, "host": "pinned"} for s in streams]


def passes(*entries: list[float]) -> tuple[Pass, ...]:
    """Three passes in which the calls are entered at these times."""
    return tuple(Pass(100.0, (100.0,) * 4, tuple((us, us) for us in entry), 100.0) for entry in entries)


def test_start_order_counts_pairs_on_different_streams() -> None:
    ops = copies(0, 1, 0)
    same = passes([0, 1, 2], [0, 1, 2], [0, 1, 2])
    as_issued = Traced(same[0].host_us, {0: (10, 20), 1: (20, 30), 2: (30, 40)})
    swapped = Traced(same[0].host_us, {0: (20, 30), 1: (10, 20), 2: (30, 40)})
    for traced, agreed in ((as_issued, 1.0), (swapped, 0.5)):
        one = program(*ops, streams=2, passes=same, traced=traced)
        (spans,) = score([one]).spans
        assert spans.pairs == 2, "ops 0 and 2 are on one stream"
        assert score([one]).start_order == agreed


def test_start_order_leaves_out_what_the_passes_disagree_about() -> None:
    """Ops 0 and 1 were called 1, 2 and 30 µs apart, and started 10 µs apart: no truth there."""
    undecided = passes([0, 1, 50], [0, 2, 50], [0, 30, 50])
    traced = Traced(undecided[0].host_us, {0: (20, 30), 1: (10, 20), 2: (90, 95)})
    (spans,) = score([program(*copies(0, 1, 2), streams=3, passes=undecided, traced=traced)]).spans
    assert (spans.in_order, spans.pairs) == (2, 2)


def test_durations_are_compared_by_kind() -> None:
    profile = DeviceProfile.load("h200")
    launch = {"op": "kernel", "kernel": "spin", "stream": 0, "blocks": 1, "threads": 32, "ns": 99_550}
    ns = 99_550 + profile.compute.fixed_ns
    host = ((0.0, 0.0),) * 2
    traced = Traced(host, {0: (10, 10 + ns / 1000 * 0.8), 1: (500, 500 + ns / 1000)})
    (spans,) = score([program(launch, launch, traced=traced)], profile).spans
    assert spans.durations == {"spin": [pytest.approx(0.25), pytest.approx(0.0, abs=1e-9)]}


@pytest.mark.parametrize(
    ("repeats", "two"),
    [
        ([[500, 100, 101, 102]] * 3, False),  # only the first repeats stand out: cold caches
        ([[100, 100, 101, 102], [100, 100, 101, 102], [100, 150, 151, 152]], True),
        ([[100, 100, 150, 101], [100, 152, 101, 151], [100, 100, 150, 102]], True),
        ([[100, 100, 101, 102], [100, 110, 112, 115], [100, 120, 125, 128]], False),  # a wide one
        ([[100, 100, 101, 102], [100, 100, 101, 102], [100, 100, 101, 150]], False),  # one outlier
        ([[100, 100.0, 100.1, 100.2], [100, 100, 100, 100], [100, 101, 101, 101]], False),  # 1 %
        ([[100, 150]], False),  # too few to say
    ],
)
def test_two_modes(repeats: list[list[float]], two: bool) -> None:
    nothing = ({"op": "sync"},)
    measured = tuple(Pass(median(w), tuple(w), ((0.0, 0.0),), 100.0) for w in repeats)
    assert bimodal(program(*nothing, passes=measured)) is two


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
    "a traced op that is not there": lambda p: p["measured"]["traced"]["spans"][0].update(op=99),
    "a traced run without a host": lambda p: p["measured"]["traced"].pop("host_us"),
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
