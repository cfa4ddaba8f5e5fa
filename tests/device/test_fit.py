"""Fitting the simulator's physics to two thirds of the programs, and what the other third says."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from heterolab import cli
from heterolab.device import heldout
from heterolab.device.fit import (
    CONSTANTS,
    durations,
    fit,
    fit_chunk,
    fit_durations,
    fit_holds,
    fit_pauses,
    parts,
    recorded_loss,
    robust_line,
)
from heterolab.device.hostcalls import Calls, descend, fit_calls
from heterolab.device.neutral import neutral
from heterolab.device.profile import BUILT_IN, DeviceProfile
from heterolab.device.programs import Pass, Program, Traced, load_programs
from heterolab.device.replay import Player
from heterolab.device.score import Report, score
from heterolab.errors import InputError

DATA = Path(__file__).parent.parent / "data"
PROGRAMS = DATA / "h200-open.json.gz"
#: Written by ``heterolab bench fit tests/data/h200-open.json.gz --splits 5 --json``.
STORED: dict[str, Any] = json.loads((DATA / "h200-fit.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def programs() -> list[Program]:
    return load_programs(PROGRAMS)


@pytest.fixture(scope="module")
def base() -> dict[str, Any]:
    data: dict[str, Any] = json.loads((BUILT_IN / "h200.json").read_text(encoding="utf-8"))
    return data


# -- what has to hold on programs that the fit has not seen --------------------------------


@pytest.fixture(scope="module")
def held_out(programs: list[Program]) -> Report:
    """The built-in profile on the third that was held out when it was fitted."""
    return score(heldout.split(programs, *heldout.SHIPPED)[1])


@pytest.mark.parametrize("number", range(len(heldout.BOUNDS)), ids=[name for name, *_ in heldout.BOUNDS])
def test_the_built_in_profile_holds_on_the_third_it_has_not_seen(held_out: Report, number: int) -> None:
    check = heldout.checks(held_out)[number]
    assert check.holds, f"{check.name}: {check.value:.2%}, bound {check.bound:.1%}"


def test_the_stored_figures_are_those_of_the_built_in_profile(held_out: Report) -> None:
    first = STORED["splits"][0]
    assert (first["deal"], first["part"]) == heldout.SHIPPED
    assert first["ids"] == [p.id for p in held_out.programs]
    for stored, check in zip(first["bounds"], heldout.checks(held_out), strict=True):
        assert stored["name"] == check.name
        assert stored["value"] == pytest.approx(check.value, rel=0.1, abs=0.002), check.name


def test_the_stored_figures_hold_with_each_program_held_out_once() -> None:
    assert STORED["file_sha256"] == hashlib.sha256(PROGRAMS.read_bytes()).hexdigest()
    ids = [i for split in STORED["splits"][:3] for i in split["ids"]]
    assert len(ids) == len(set(ids)) == STORED["programs"] == 63
    for (name, bound, less), stored in zip(
        heldout.BOUNDS, STORED["each_program_held_out_once"]["bounds"], strict=True
    ):
        assert (stored["name"], stored["bound"]) == (name, bound)
        assert stored["holds"]
        assert stored["value"] <= bound if less else stored["value"] >= bound


def test_other_splits_say_much_the_same() -> None:
    """Five ways to hold a third out: medians, p90 and band hold for each."""
    assert len({(s["deal"], s["part"]) for s in STORED["splits"]}) == 5
    for split in STORED["splits"]:
        figures = {b["name"]: b["value"] for b in split["bounds"]}
        assert figures["makespan error, median"] <= 0.05
        assert figures["makespan error, p90"] <= 0.18
        assert figures["makespan inside the measured band"] >= 0.78
        assert figures["with recorded host calls, median"] <= 0.02


# -- the split ---------------------------------------------------------------------------------


def test_parts_hold_a_third_of_every_family(programs: list[Program]) -> None:
    dealt = parts(programs)
    assert sorted(p.id for part in dealt for p in part) == sorted(p.id for p in programs)
    for family, count in Counter(p.family for p in programs).items():
        for part in dealt:
            assert abs(sum(p.family == family for p in part) - count / 3) < 1, family


def test_a_deal_looks_at_names_only(programs: list[Program]) -> None:
    blank = [replace(p, ops=(), passes=(), traced=None) for p in programs]
    names = [[p.id for p in part] for part in parts(programs)]
    assert [[p.id for p in part] for part in parts(blank)] == names
    assert [{p.id for p in part} for part in parts(programs[::-1])] == [set(part) for part in names]
    assert [[p.id for p in part] for part in parts(programs, deal=1)] != names


# -- the steps, on programs that a known machine has run -----------------------------------


def played(programs: list[Program], data: dict[str, Any]) -> list[Program]:
    """The same programs as the simulator with profile `data` would have measured them."""
    player, done = Player(DeviceProfile.from_json(data)), []
    for program in programs:
        replay = player.replay(program)
        between = data["host"]["between_ns"] / 1000
        entries, last = [], 0.0
        for op, left in zip(program.ops, replay.exits_us, strict=True):
            entries.append(last if op["op"] == "host" else last + between)
            last = left
        host = tuple(zip(entries, replay.exits_us, strict=True))
        wall = replay.wall_us
        one = Pass(wall, (wall,) * 4, host, wall)
        done.append(replace(program, passes=(one,) * 3, traced=Traced(host, replay.spans)))
    return done


@pytest.fixture(scope="module")
def truth(base: dict[str, Any]) -> dict[str, Any]:
    """A machine that nobody has: the neutral one with other constants."""
    data = neutral(base)
    data["host"] |= {
        "launch_ns": 6000,
        "copy_ns": 5000,
        "cold_launch_ns": 9000,
        "cold_copy_ns": 7000,
        "sync_ns": 4000,
        "start_ns": 4000,
    }
    data["gaps"] |= {"copy_kernel_ns": 6000, "kernel_copy_ns": 6000, "turn_ns": 6000}
    data["compute"]["fixed_ns"] = 700
    data["pageable"]["chunk_bytes"] = 1_500_000
    for table in (data["copies"]["h2d"], data["kernels"]["vector_add"]):
        table["ns"] = [1.25 * ns for ns in table["ns"]]
    data["pageable"]["h2d"]["ns"] = [1.5 * ns for ns in data["pageable"]["h2d"]["ns"]]
    return data


def test_durations_leave_out_what_ran_beside_something(programs: list[Program]) -> None:
    alone = durations(programs)
    assert {"h2d pinned", "d2h pinned", "vadd", "spin", "gemm float16", "vadd mapped"} <= set(alone)
    program = programs[0]
    beside = {i: (10.0, 20.0) for i, op in enumerate(program.ops) if "bytes" in op}
    assert program.traced is not None
    assert not durations([replace(program, traced=replace(program.traced, spans=beside))])


def test_tables_and_the_chunk_are_found_again(
    programs: list[Program], base: dict[str, Any], truth: dict[str, Any]
) -> None:
    data, seen = neutral(base), played(programs, truth)
    fit_durations(data, seen)
    fit_chunk(data, seen)
    fitted, true = DeviceProfile.from_json(data), DeviceProfile.from_json(truth)
    for nbytes in (2**12, 2**16, 2**20, 2**24, 2**28):
        assert fitted.copies.h2d.at(nbytes) == pytest.approx(true.copies.h2d.at(nbytes), rel=0.05)
    for n in (2**12, 2**18, 2**23):
        ours, theirs = (p.kernels["vector_add"].time.at(n) for p in (fitted, true))
        assert ours == pytest.approx(theirs, rel=0.05)
    assert fitted.compute.fixed_ns == pytest.approx(700, rel=0.02)
    assert fitted.pageable is not None
    assert fitted.pageable.chunk_bytes == pytest.approx(1_500_000, rel=0.05)


def test_calls_are_found_again(programs: list[Program], base: dict[str, Any], truth: dict[str, Any]) -> None:
    data = neutral(base)
    fit_calls(data, played(programs, truth))
    for name in ("launch_ns", "copy_ns", "record_ns", "wait_ns", "between_ns"):
        assert data["host"][name] == pytest.approx(truth["host"][name], rel=0.03), name
    for name in ("cold_launch_ns", "cold_copy_ns"):
        assert data["host"][name] == pytest.approx(truth["host"][name], rel=0.25), name
    assert data["kernels"]["gemm.float16"]["host_ns"] == pytest.approx(12_000, rel=0.03)


def test_holds_are_found_again_although_calls_also_wait(
    programs: list[Program], base: dict[str, Any], truth: dict[str, Any]
) -> None:
    """By how much longer, the simulator knows, once it has the pauses and the copies' speed."""
    seen = played(programs, truth)
    data = neutral(base) | {"gaps": truth["gaps"], "host": truth["host"]}
    fit_durations(data, seen)
    fit_holds(data, seen)
    for way in ("h2d", "d2h"):
        ours, theirs = (getattr(DeviceProfile.from_json(d).pageable, way) for d in (data, truth))
        for nbytes in (2**16, 2**20, 2**24):
            assert ours.at(nbytes) == pytest.approx(theirs.at(nbytes), rel=0.1), (way, nbytes)


@pytest.mark.slow
def test_pauses_are_found_again(programs: list[Program], base: dict[str, Any], truth: dict[str, Any]) -> None:
    seen = played(programs, truth)[::2]
    data = neutral(base)
    data["copies"]["h2d"], data["kernels"] = truth["copies"]["h2d"], truth["kernels"]
    data["compute"], data["pageable"] = truth["compute"], truth["pageable"]
    before = recorded_loss(data, seen)
    fit_pauses(data, seen)
    assert recorded_loss(data, seen) < before / 4
    assert data["gaps"]["copy_kernel_ns"] == data["gaps"]["turn_ns"] == pytest.approx(6000, rel=0.15)
    latency = sum(data["host"][name] for name in ("start_ns", "sync_ns"))
    assert latency == pytest.approx(8000, rel=0.2), "only their sum shows, and that beside the pauses"


def test_descent_finds_a_valley_and_stops() -> None:
    found, loss = descend([1.0, 1.0], lambda v: abs(v[0] - 3) + abs(v[1] - 0.2))
    assert found == pytest.approx([3, 0.2], rel=0.06)
    assert loss < 0.2
    assert descend([5.0], lambda _: 1.0) == ([5.0], 1.0)


def test_a_line_through_most_points() -> None:
    x = np.arange(1.0, 21.0)
    y = 3 + 2 * x
    y[4] = 100
    assert robust_line(list(x), list(y)) == pytest.approx((3, 2), rel=0.01)


def test_neutral_forgets_the_physics_and_keeps_the_rest(base: dict[str, Any]) -> None:
    changed = json.loads(json.dumps(base))
    for section, name in [path for paths in CONSTANTS for path in paths]:
        changed[section][name] = 0.123
    changed["kernels"]["vector_add"]["ns"] = [1.0] * len(changed["kernels"]["vector_add"]["ns"])
    changed["pageable"]["h2d"]["ns"] = [1.0] * len(changed["pageable"]["h2d"]["ns"])
    assert neutral(changed) == neutral(base), "nothing fitted before may be left in it"
    for section in ("cpu_costs", "waiting", "workers", "limits"):
        assert neutral(base)[section] == base[section]


def test_calls_of_no_program_cost_what_they_did(base: dict[str, Any]) -> None:
    assert Calls([]).between_ns == 200
    assert Calls([]).costs((1, 1, 1, 1)) == (0.0, {})


def test_a_fit_repeats_itself_and_says_what_it_is(
    programs: list[Program], base: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("heterolab.device.hostcalls.STEPS", (0.4,))
    few = programs[3::11]
    data = fit(few, base)
    assert data == fit(few, base)
    assert f"fitted to {len(few)} measured stream programs" in data["gaps"]["source"]
    assert data["gaps"] != neutral(base)["gaps"]
    assert base == json.loads((BUILT_IN / "h200.json").read_text(encoding="utf-8")), "base is left alone"


# -- the command -------------------------------------------------------------------------------


def test_the_command_prints_figures_and_writes_the_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for the fit, which takes half a minute a split."""
    fitted_on = []

    def stand_in(programs: list[Program], base: dict[str, Any]) -> dict[str, Any]:
        fitted_on.append({p.id for p in programs})
        return neutral(base)

    monkeypatch.setattr(heldout, "fit", stand_in)
    out = tmp_path / "fitted.json"
    arguments = ["bench", "fit", str(PROGRAMS), "--splits", "5"]
    result = CliRunner().invoke(cli.app, [*arguments, "--out", str(out)])
    assert result.exit_code == 0, result.output
    for words in ("Fitted on 42 programs; figures on the 21 held out", "each program held out once (63)"):
        assert words in result.output
    assert "5 splits, lowest and highest held-out figure" in result.output
    for name, *_ in heldout.BOUNDS:
        assert result.output.count(name) == 3
    assert "missed" in result.output, "what was measured in tight loops alone misses bounds"
    assert json.loads(out.read_text(encoding="utf-8")) == neutral(
        json.loads((BUILT_IN / "h200.json").read_text(encoding="utf-8"))
    )

    stored = json.loads(CliRunner().invoke(cli.app, [*arguments, "--json"]).output)
    assert [(s["deal"], s["part"]) for s in stored["splits"]] == [(0, 1), (0, 0), (0, 2), (1, 0), (1, 1)]
    for split, seen in zip(stored["splits"], fitted_on[5:], strict=True):
        assert len(seen) == 42
        assert not seen & set(split["ids"]), "a program that was fitted on is in the report"


def test_programs_without_a_trace_cannot_be_fitted(tmp_path: Path, programs: list[Program]) -> None:
    file = tmp_path / "few.json"
    op = {"op": "sync"}
    one = {"wall_us": [1.0], "host_us": [[0, 1]]}
    entry = {"family": "f", "streams": [], "ops": [op], "measured": {"passes": [one]}}
    file.write_text(json.dumps([{"id": f"f-{i}", **entry} for i in range(9)]))
    with pytest.raises(InputError, match=r"few\.json: a fit needs at least 6 programs, each with a traced"):
        heldout.experiment(file, "h200", 1)
    with pytest.raises(InputError, match="part=3"):
        heldout.experiment(PROGRAMS, "h200", 1, part=3)


def test_the_readme_states_the_kept_figures() -> None:
    readme = (DATA.parent.parent / "README.md").read_text(encoding="utf-8")

    def figures(bounds: list[dict[str, Any]]) -> list[str]:
        value = {bound["name"]: bound["value"] for bound in bounds}
        names = ("makespan error, median", "makespan error, p90")
        inside = value["makespan inside the measured band"]
        return [*(f"{100 * value[name]:.1f} %" for name in names), f"{100 * inside:.0f} %"]

    median, p90, inside = figures(STORED["splits"][0]["bounds"])
    assert f"median error {median}, 90th percentile {p90}, {inside} inside" in readme
    assert (
        f"each of the 63 held out once {', '.join(figures(STORED['each_program_held_out_once']['bounds']))}"
        in readme
    )
