"""The command line: a table or JSON, the files it writes, and one clear line for a mistake."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import heterolab as hl
from heterolab import cli
from heterolab.trace.trace import Trace

PROGRAMS = str(Path(__file__).parent / "data" / "h200-open.json.gz")


def heterolab(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "heterolab.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_run_prints_a_table_and_writes_timeline_and_trace(tmp_path) -> None:
    html, trace = tmp_path / "timeline.html", tmp_path / "run.json"
    done = heterolab(
        "run", "--device", "sim:h200", "--batch", "4", "--n", "12", "--html", str(html), "--trace", str(trace)
    )
    assert done.returncode == 0, done.stderr
    assert "simulated" in done.stdout
    assert "12" in done.stdout
    assert "requests/s" in done.stdout
    assert hl.Trace.load(trace).replayed
    page = html.read_text()
    assert "simulated" in page
    assert "<script" in page


def test_run_json_is_the_same_for_the_same_seed(tmp_path) -> None:
    first, second = (
        heterolab("run", "--device", "sim:h200", "--n", "8", "--seed", "3", "--json").stdout for _ in "ab"
    )
    report = json.loads(first)
    assert first == second
    assert report["answers"] == 8
    assert report["stamp"].startswith("simulated")
    assert sum(report["batch_sizes"]) == 8


def test_a_user_s_own_requests_are_replayed_bad_lines_counted_and_html_escaped(tmp_path) -> None:
    requests, html = tmp_path / "requests.jsonl", tmp_path / "t.html"
    lines = [
        json.dumps({"text": "<script>alert(1)</script>"}),
        "not json",
        json.dumps({"text": ""}),
        json.dumps({"text": "What is a GPU?", "at_ms": 3}),
        json.dumps({"text": "x", "key": "wrong"}),
    ]
    requests.write_bytes("\n".join(lines).encode() + b"\n\xff\xfe\n")
    done = heterolab(
        "run", "--device", "sim:h200", "--requests", str(requests), "--json", "--html", str(html)
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["answers"] == 2
    assert report["rejected"] == 4
    assert len(report["reasons"]) == 4
    assert "<script>alert(1)</script>" not in html.read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("run", "--device", "sim:h900"), "h900"),
        (("run", "--device", "toaster"), "toaster"),
        (("run", "--device", "sim:h200", "--batch", "0"), "batch=0"),
        (("run", "--device", "sim:h200", "--batch", "1000000"), "largest batch that fits"),
        (("run", "--device", "sim:h200", "--memory", "fast"), "pinned"),
        (("run", "--device", "sim:h200", "--requests", "/no/such/file.jsonl"), "file.jsonl"),
        (("run", "--device", "sim:h200", "--rate", "0"), "rate"),
        (("run", "--device", "sim:/no/such/profile.json"), "profile.json"),
        (("bench", "simulator", "/no/such/programs.json"), "programs.json"),
        (("bench", "simulator", PROGRAMS, "--without", "gaps"), "gaps_in_a_stream"),
        (("bench", "effects", "/no/such/programs.json"), "programs.json"),
        (("lab", "99"), "03"),
        (("calibrate", "--device", "toaster", "--out", "x.json"), "toaster"),
        (("run", "--device", "sim:h200", "--n", "2", "--trace", "/no/such/folder/t.json"), "/no/such/folder"),
    ],
)
def test_a_mistake_is_one_clear_line(arguments: tuple[str, ...], said: str) -> None:
    done = heterolab(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.fixture
def recorded(tmp_path):
    path = tmp_path / "run.json.gz"
    dev = hl.open_device("sim:h200")
    hl.Pipeline(hl.models.encoder(), batch=4).run(hl.poisson(rate=300, n=8), on=dev).trace.save(path)
    return path


def test_show_prints_a_recorded_run_as_replayed_and_writes_its_timeline(recorded, tmp_path) -> None:
    html = tmp_path / "timeline.html"
    done = heterolab("show", str(recorded), "--html", str(html))
    assert done.returncode == 0, done.stderr
    assert "replayed, simulated · NVIDIA H200" in done.stdout
    assert "poisson(rate=300, n=8, seed=0)" in done.stdout
    assert "busiest lane" in done.stdout
    assert "replayed" in html.read_text()


def test_show_json_holds_the_figures(recorded) -> None:
    report = json.loads(heterolab("show", str(recorded), "--json").stdout)
    assert report["stamp"] == "replayed, simulated · NVIDIA H200"
    assert report["settings"]["batch"] == 4
    assert report["answers"] == 8
    assert report["throughput_per_s"] == pytest.approx(8 / report["wall_ms"] * 1e3, rel=0.2)
    assert report["busy_ms_by_lane"]["gpu"] > 0


def test_show_opens_the_recordings_of_a_gpu() -> None:
    done = heterolab("show", str(cli.labs_folder() / "recordings" / "05-ids-pinned.json.gz"))
    assert done.returncode == 0, done.stderr
    assert "replayed, measured" in done.stdout


@pytest.mark.parametrize("damage", ["half", "foreign", "nothing", "not there", "a folder"])
def test_show_refuses_a_file_that_is_no_trace_in_one_line_with_its_name(recorded, damage) -> None:
    content = recorded.read_bytes()
    if damage == "half":
        recorded.write_bytes(content[: len(content) // 2])
    elif damage == "foreign":
        recorded.write_text('{"traceEvents": []}')
    elif damage == "nothing":
        recorded.write_bytes(b"")
    elif damage == "not there":
        recorded.unlink()
    else:
        recorded = recorded.parent
    done = heterolab("show", str(recorded))
    assert done.returncode == 2
    assert recorded.name in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_show_lets_no_file_command_the_terminal(tmp_path) -> None:
    path = tmp_path / "run.json"
    Trace.from_spans([], "simulated", "a GPU\x1b[2J\x07").save(path)
    done = heterolab("show", str(path))
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert "a GPU?[2J?" in done.stdout


def test_a_corrupt_profile_is_refused(tmp_path) -> None:
    profile = tmp_path / "mine.json"
    profile.write_text('{"name": "mine"')
    done = heterolab("run", "--device", f"sim:{profile}")
    assert done.returncode == 2
    assert "mine.json" in done.stderr
    assert "Traceback" not in done.stderr


def test_run_explains_why_the_gpu_was_idle_and_what_would_help() -> None:
    arguments = (
        "run",
        "--device",
        "sim:t4",
        "--n",
        "24",
        "--memory",
        "pageable",
        "--payload",
        "images_float32",
    )
    told = heterolab(*arguments, "--explain")
    assert told.returncode == 0, told.stderr
    usual, _, rest = told.stdout.partition("\n\n")
    assert usual == heterolab(*arguments).stdout.rstrip("\n")
    assert rest.startswith("simulated · NVIDIA T4 (datasheet estimate)\nGPU: idle ")
    for part in ("the GPU was idle because of", "The longest gaps:", "critical path", "can it be tried?"):
        assert part in rest


def test_the_explanation_as_json_is_the_same_for_the_same_seed_and_adds_up() -> None:
    arguments = ("run", "--device", "sim:h200", "--n", "12", "--json", "--explain")
    first, second = (heterolab(*arguments).stdout for _ in "ab")
    assert first == second
    report = json.loads(first)
    why = report["explain"]
    idle = sum(why["idle_ns_by_cause"]["0"].values())
    assert idle == round(sum(report["gpu_idle_ms_by_cause"].values()) * 1e6)
    path = sum(step["ns"] for step in why["critical_path"])
    assert 0.99 * report["wall_ms"] < path / 1e6 <= report["wall_ms"], (
        "all but what came before the first span"
    )
    assert all(step["work"] or step["waits_because_of"] for step in why["critical_path"])
    tried = {change["change"]: change["can_be_tried"] for change in why["what_if"]["changes"]}
    assert (tried["batch"], tried["gpu"]) == (True, False)
    assert "explain" not in json.loads(heterolab(*arguments[:-1]).stdout)
