"""The whole pipeline, the same tests on every device there is."""

import gc
import json
import signal
import weakref
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

import heterolab as hl
from heterolab.device.base import Kernel
from heterolab.errors import InputError, OutOfDeviceMemory
from heterolab.pipeline.hooks import HookEvent
from heterolab.pipeline.loop import Loop
from heterolab.pipeline.payload import ANSWERS
from heterolab.pipeline.preprocess import accept
from heterolab.workload import COURSE_KEY, Load, Request

PAYLOADS = ("ids", "embeddings", "images_uint8", "images_float32")
RETURNS = ("topk", "vectors", "logits")


@pytest.fixture(scope="module")
def encoder():
    return hl.models.encoder()


def reference(encoder, load: Load) -> dict[int, tuple[tuple[int, ...], np.ndarray]]:
    """Nearest rows and scores of each request, computed alone with NumPy."""
    cpu = encoder.on(hl.open_device("cpu"))
    found = {}
    for request in load.requests:
        ids = encoder.tokenize([accept(request.body, (COURSE_KEY,))])[0][None, :]
        hidden = np.empty((1, ids.shape[1], encoder.dim), np.float32)
        lengths, vector = np.empty(1, np.int32), np.empty((1, encoder.dim), np.float32)
        cpu.from_ids.run(np, [ids], [hidden, lengths])
        cpu.pool.run(np, [hidden, lengths], [vector])
        scores = encoder.knowledge.vectors @ vector[0]
        best = np.argsort(-scores, kind="stable")[:ANSWERS]
        found[request.id] = (tuple(int(row) for row in best), scores[best])
    return found


def test_answers_equal_the_reference(device, encoder) -> None:
    load = hl.closed_loop(n=20, in_flight=6, seed=3)
    run = hl.Pipeline(encoder, batch=4, workers=1).run(load, on=device)
    tolerance = 1e-4 if device.source == "cuda-events" else 1e-6
    expected = reference(encoder, load)
    assert len(run.answers) == 20
    for answer in run.answers:
        rows, scores = expected[answer.id]
        assert answer.confidence == pytest.approx(min(max(float(scores[0]), 0), 1), abs=tolerance)
        if scores[0] - scores[1] > 2 * tolerance:
            assert answer.nearest[0] == rows[0]
            assert answer.answer == encoder.knowledge.answers[rows[0]]


@pytest.mark.parametrize("payload", PAYLOADS)
@pytest.mark.parametrize("memory", ["pageable", "pinned", "mapped"])
def test_every_payload_and_memory_kind_gives_the_same_answers(device, encoder, payload, memory) -> None:
    load = hl.closed_loop(n=6, in_flight=3, seed=1)
    same = "ids" if payload == "embeddings" else payload
    first = hl.Pipeline(encoder, batch=3, payload=same).run(load, on=device)
    run = hl.Pipeline(encoder, batch=3, payload=payload, memory=memory).run(load, on=device)
    assert len(run.answers) == 6
    assert [a.answer for a in run.answers] == [a.answer for a in first.answers]
    pictures = payload.startswith("images")  # their projection is random: the answers say so
    assert all(a.trained is (encoder.trained and not pictures) for a in run.answers)


@pytest.mark.parametrize("returns", RETURNS)
def test_every_kind_of_result_gives_the_same_answers(device, encoder, returns) -> None:
    load = hl.closed_loop(n=6, in_flight=6, seed=2)
    expected = reference(encoder, load)
    run = hl.Pipeline(encoder, batch=6, returns=returns).run(load, on=device)
    assert [a.nearest[0] for a in run.answers] == [expected[i][0][0] for i in range(6)]


def test_two_simulated_runs_with_one_seed_give_the_same_bytes(encoder, tmp_path) -> None:
    files = []
    for attempt in "ab":
        pipe = hl.Pipeline(encoder, batch=4, workers=2)
        dev = hl.open_device("sim:h200", seed=5, jitter=0.1)
        run = pipe.run(hl.poisson(rate=400, n=30, seed=9), on=dev)
        files.append(run.trace.save(tmp_path / f"{attempt}.json").read_bytes())
    assert files[0] == files[1]
    assert json.loads(files[0])["source"] == "simulated"


def test_a_simulated_run_does_not_depend_on_what_ran_before_it(encoder) -> None:
    dev, load = hl.open_device("sim:h200"), hl.poisson(rate=400, n=12, seed=9)
    first, second = (hl.Pipeline(encoder, batch=4).run(load, on=dev) for _ in range(2))
    assert first.trace.wall_ns == pytest.approx(second.trace.wall_ns, rel=0.01)
    assert first.trace.start_ns >= 0
    assert second.trace["op"].min() >= 0


def test_runs_on_one_device_do_not_use_up_its_streams_or_its_memory(device, encoder) -> None:
    load, limit = hl.closed_loop(n=1, in_flight=1), device.limits.streams
    pipe = hl.Pipeline(encoder, batch=1, streams=min(limit, 8), ring=1, workers=0)
    traces = [pipe.run(load, on=device).trace for _ in range(limit // 8 + 2)]
    assert set(traces[0]["stream"].tolist()) == set(traces[-1]["stream"].tolist())


BAD_BODIES = [
    b"{nonsense",
    b'{"text": "no key"}',
    b"\xff\xfe",
    json.dumps({"key": "x", "text": "hi"}).encode(),
]


def with_bad_bodies(load: Load) -> Load:
    """The load with every third body spoilt."""
    spoilt = [
        replace(r, body=BAD_BODIES[i // 3 % len(BAD_BODIES)]) if i % 3 == 0 else r
        for i, r in enumerate(load.requests)
    ]
    return replace(load, requests=tuple(spoilt))


def test_bad_requests_are_rejected_and_the_rest_is_answered(device, encoder) -> None:
    load = with_bad_bodies(hl.closed_loop(n=12, in_flight=4, seed=0))
    run = hl.Pipeline(encoder, batch=4, workers=1, chunk=2).run(load, on=device)
    assert [r.id for r in run.rejected] == [0, 3, 6, 9]
    assert [a.id for a in run.answers] == [1, 2, 4, 5, 7, 8, 10, 11]
    assert all(r.reason for r in run.rejected)
    assert "4 rejected" in repr(run)


@pytest.mark.parametrize(
    "knobs",
    [
        {"batch": 0},
        {"batch": -3},
        {"batch": 2.5},
        {"batch": True},
        {"streams": 0},
        {"streams": "two"},
        {"memory": "fast"},
        {"max_delay_ms": -1},
        {"max_delay_ms": float("nan")},
        {"workers": -1},
        {"chunk": 0},
        {"payload": "video"},
        {"returns": "everything"},
        {"ring": 0},
        {"memory": "unified"},
        {"hooks": print},
        {"keys": "a-key"},
        {"keys": (1,)},
    ],
)
def test_an_impossible_knob_is_refused_by_name_and_value(encoder, knobs) -> None:
    (name, value) = next(iter(knobs.items()))
    with pytest.raises(InputError, match=name) as refusal:
        hl.Pipeline(encoder, **knobs)
    assert repr(value) in str(refusal.value)


def test_a_batch_larger_than_the_device_is_refused_with_the_device_s_limit(device, encoder) -> None:
    with pytest.raises(OutOfDeviceMemory, match="largest batch that fits is"):
        hl.Pipeline(encoder, batch=1_000_000).run(hl.closed_loop(n=4, in_flight=4), on=device)
    run = hl.Pipeline(encoder, batch=2).run(hl.closed_loop(n=2, in_flight=2), on=device)
    assert len(run.answers) == 2


def test_too_many_streams_are_refused_with_the_device_s_limit(device, encoder) -> None:
    with pytest.raises(InputError, match="at most"):
        hl.Pipeline(encoder, streams=100_000, batch=1).run(hl.closed_loop(n=1, in_flight=1), on=device)


def test_a_batch_that_fails_fails_alone(device, encoder, monkeypatch) -> None:
    kernels = encoder.on(device)
    good = kernels.pool
    launches = [0]

    def run(xp, reads, writes) -> None:
        launches[0] += 1
        if launches[0] == 7:  # the four slots' warm-ups come first
            raise ValueError("a cosmic ray")
        good.run(xp, reads, writes)

    monkeypatch.setattr(kernels, "pool", Kernel("encoder.pool", run, good.work))
    pipe = hl.Pipeline(encoder, batch=2, streams=2, ring=2, workers=0)
    outcome = pipe.run(hl.closed_loop(n=12, in_flight=2, seed=0), on=device)
    assert len(outcome.failed) == 2
    assert "a cosmic ray" in outcome.failed[0].reason
    assert len(outcome.answers) == 10


def test_a_failing_hook_is_shown_and_the_run_goes_on(device, encoder) -> None:
    seen: list[str] = []

    def clumsy(event: HookEvent) -> None:
        raise RuntimeError("no disk")

    def watcher(event: HookEvent) -> None:
        seen.append(f"{event.stage} {event.phase}")

    pipe = hl.Pipeline(encoder, batch=2, hooks=[clumsy, watcher])
    run = pipe.run(hl.closed_loop(n=4, in_flight=4), on=device)
    assert len(run.answers) == 4
    assert len(run.hook_errors) == 1
    assert "clumsy" in run.hook_errors[0]
    assert "no disk" in run.hook_errors[0]
    for stage in ("preprocess", "batch", "transfer", "kernels", "postprocess"):
        assert seen.count(f"{stage} begin") == seen.count(f"{stage} end") > 0


def test_spans_tell_the_whole_story(device, encoder) -> None:
    run = hl.Pipeline(encoder, batch=4, memory="pinned").run(hl.closed_loop(n=8, in_flight=8), on=device)
    trace = run.trace
    names = set(trace["name"].tolist())
    assert {"preprocess", "batch", "pad_ids", "postprocess", "session_write"} <= names
    assert {"encoder.forward", "encoder.pool", "encoder.top_k"} <= set(trace.kind("kernel")["name"].tolist())
    for batch in range(len(run.batch_sizes)):
        of_batch = [s for s in trace if s.batch == batch]
        copy_in = next(s for s in of_batch if s.kind == "h2d")
        forward = next(s for s in of_batch if s.name == "encoder.forward" and s.kind == "kernel")
        copy_out = next(s for s in of_batch if s.kind == "d2h")
        answer = next(s for s in of_batch if s.name == "postprocess")
        assert copy_in.end_ns <= forward.start_ns + 2_000  # CUDA events resolve to half a microsecond
        assert forward.end_ns <= copy_out.start_ns + 2_000
        assert copy_out.end_ns <= answer.start_ns + 2_000
    assert run.batch_sizes.max() <= 4
    assert run.batch_sizes.sum() == 8


def test_stop_keeps_what_is_done_and_returns_the_rest(device, encoder) -> None:
    pipe = hl.Pipeline(encoder, batch=2, workers=0, chunk=2)
    loop = Loop(pipe, hl.closed_loop(n=200, in_flight=20, seed=0), device)
    for _ in range(30):
        loop.step()
    loop.stop()
    while loop.step():
        pass
    run = loop.finish()
    loop.close()
    arrived = len(run.outputs) + len(run.unserved)
    assert 20 <= arrived < 200
    assert len(run.unserved) > 0
    assert not run.failed


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def real_device(request):
    dev = hl.open_device(request.param)
    yield dev
    dev.close()


def test_a_live_run_shows_itself_and_stops(real_device, encoder) -> None:
    pipe = hl.Pipeline(encoder, batch=4)
    live = pipe.start(hl.closed_loop(n=100_000, in_flight=8, seed=0), on=real_device)
    for _ in range(400):
        if len(live.snapshot().answers) >= 8:
            break
        real_device.host.wait_any([], until=real_device.host.now() + 10_000_000)
    seen = live.snapshot()
    run = live.stop()
    assert live.done
    assert 8 <= len(seen.answers) <= len(run.answers) < 100_000
    assert len(run.trace) > 0
    assert live.stop() is run


def test_a_device_serves_one_run_at_a_time(real_device, encoder) -> None:
    pipe = hl.Pipeline(encoder, batch=4)
    live = pipe.start(hl.closed_loop(n=100_000, in_flight=8, seed=0), on=real_device)
    with pytest.raises(InputError, match="serves a run already"):
        pipe.run(hl.closed_loop(n=2, in_flight=2), on=real_device)
    live.stop()
    assert len(pipe.run(hl.closed_loop(n=2, in_flight=2), on=real_device).answers) == 2


def test_a_device_that_ran_a_pipeline_can_be_forgotten(encoder) -> None:
    dev = hl.open_device("sim:h200")
    hl.Pipeline(encoder, batch=2).run(hl.closed_loop(n=2, in_flight=2), on=dev)
    host = weakref.ref(dev.host)
    del dev
    gc.collect()
    assert host() is None


def test_what_is_no_device_or_no_load_is_refused(device, encoder) -> None:
    load = hl.closed_loop(n=2, in_flight=2)
    with pytest.raises(InputError, match="is not a device"):
        hl.Pipeline(encoder).run(load, on="sim:h200")
    with pytest.raises(InputError, match="is not a load"):
        hl.Pipeline(encoder).run(["a"], on=device)


def test_numpy_s_whole_numbers_are_whole_numbers(encoder, tmp_path) -> None:
    pipe = hl.Pipeline(encoder, batch=np.int64(4), workers=np.int32(1))
    run = pipe.run(hl.closed_loop(n=4, in_flight=4), on=hl.open_device("sim:h200"))
    assert run.trace.save(tmp_path / "trace.json").exists()


def test_without_values_no_answer_claims_to_be_trained(encoder) -> None:
    dev = hl.open_device("sim:h200", values=False)
    run = hl.Pipeline(encoder).run(hl.closed_loop(n=2, in_flight=2), on=dev)
    assert not any(answer.trained for answer in run.answers)


def test_latency_is_waiting_and_computing(device, encoder) -> None:
    run = hl.Pipeline(encoder, batch=4).run(hl.poisson(rate=200, n=12, seed=1), on=device)
    assert (run.waiting_ns >= 0).all()
    assert (run.waiting_ns < run.latencies_ns).all()
    assert run.wall_ns >= run.latencies_ns.max()


def throughput(encoder, **knobs) -> float:
    dev = hl.open_device("sim:h200", values=False)
    load = hl.closed_loop(n=512, in_flight=128, seed=0)
    pipe = hl.Pipeline(encoder, batch=32, streams=2, workers=2, chunk=32, **knobs)
    run = pipe.run(load, on=dev)
    return len(run.answers) / run.wall_ns * 1e9


def test_pinning_pays_for_pictures_and_not_for_token_ids(encoder) -> None:
    ids = throughput(encoder, memory="pinned") / throughput(encoder, memory="pageable")
    assert ids == pytest.approx(1, abs=0.03)
    pictures: Callable[[str], float] = lambda m: throughput(encoder, memory=m, payload="images_float32")  # noqa: E731
    assert pictures("pinned") / pictures("pageable") > 1.15


def test_a_request_is_not_held_back_when_nobody_else_can_come(encoder) -> None:
    run = hl.Pipeline(encoder, batch=64, max_delay_ms=10_000).run(
        hl.closed_loop(n=3, in_flight=3), on=hl.open_device("sim:h200")
    )
    assert run.wall_ns < 1_000_000_000


def test_sessions_remember_who_asked_what(encoder, tmp_path) -> None:
    from heterolab.pipeline.postprocess import Sessions

    file = tmp_path / "sessions.jsonl"
    sessions = Sessions(file)
    load = hl.closed_loop(n=6, in_flight=2)
    run = hl.Pipeline(encoder, batch=2, sessions=sessions).run(load, on=hl.open_device("sim:h200"))
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert sorted(line["question"] for line in lines) == sorted(a.question for a in run.answers)
    assert sum(len(h) for h in sessions.history.values()) == 6


def test_keyboard_interrupt_ends_in_good_order(encoder) -> None:
    dev = hl.open_device("sim:h200")
    calls = [0]

    def interrupt(event: HookEvent) -> None:
        calls[0] += 1
        if calls[0] == 20:
            signal.raise_signal(signal.SIGINT)

    pipe = hl.Pipeline(encoder, batch=2, workers=0, chunk=2, hooks=[interrupt])
    run = pipe.run(hl.closed_loop(n=60, in_flight=10), on=dev)
    assert 0 < len(run.outputs) < 60
    assert run.unserved


def test_a_request_of_the_longest_kind_fits(device, encoder) -> None:
    body = json.dumps({"key": COURSE_KEY, "text": "why " * 5_000}).encode()
    load = replace(hl.closed_loop(n=1, in_flight=1), requests=(Request(0, body, 0, "s"),))
    run = hl.Pipeline(encoder, batch=1).run(load, on=device)
    assert len(run.answers) == 1
