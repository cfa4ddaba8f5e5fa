"""Loads: what arrives, when, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterolab.errors import InputError
from heterolab.workload import (
    COURSE_KEY,
    Load,
    Request,
    Source,
    bursts,
    closed_loop,
    poisson,
    questions,
    replay,
)


def drain(source: Source, service_ns: int = 1_000_000) -> list[Request]:
    """Play a source against a service that needs `service_ns` a request, any number at once."""
    now, arrived, busy = 0, [], []
    while source.open() or busy:
        due = source.due(now)
        arrived += due
        busy += [(now + service_ns, request) for request in due]
        busy.sort(key=lambda item: item[0])
        moments = [t for t in (source.next_ns(), busy[0][0] if busy else None) if t is not None]
        if not moments:
            break
        now = max(now, min(moments))
        while busy and busy[0][0] <= now:
            source.finished(busy.pop(0)[1], now)
    return arrived


def arrivals(load: Load) -> list[int]:
    return [request.arrival_ns for request in load.requests]


def text_of(request: Request) -> str:
    return str(json.loads(request.body)["text"])


# -- open loads ---------------------------------------------------------------------------------


def test_a_request_is_what_a_client_would_send() -> None:
    (request,) = poisson(rate=10, n=1, texts=['say "hé"']).requests
    assert json.loads(request.body) == {"key": COURSE_KEY, "text": 'say "hé"'}
    assert request.id == 0
    assert request.session.startswith("user-")


def test_poisson_has_its_rate_and_its_spread() -> None:
    gaps_s = np.diff(arrivals(poisson(rate=200, n=20_000, seed=1, texts=["a"]))) / 1e9
    assert gaps_s.mean() == pytest.approx(1 / 200, rel=0.03)
    assert gaps_s.std() == pytest.approx(1 / 200, rel=0.03)  # of an exponential: equal to its mean
    assert (gaps_s >= 0).all()


@pytest.mark.parametrize("make", [poisson, bursts])
def test_the_seed_fixes_everything(make: Any) -> None:
    assert make(rate=50, n=40, seed=7) == make(rate=50, n=40, seed=7)
    assert make(rate=50, n=40, seed=7) != make(rate=50, n=40, seed=8)


def test_a_load_can_be_played_again() -> None:
    load = poisson(rate=300, n=30)
    assert drain(load.source()) == drain(load.source()) == list(load.requests)


def test_texts_are_real_questions_by_default() -> None:
    known = set(questions())
    assert all(text_of(request) in known for request in poisson(rate=10, n=50).requests)
    assert len({text_of(request) for request in poisson(rate=10, n=50).requests}) > 30


def test_due_hands_out_each_request_once_and_in_time() -> None:
    load = poisson(rate=1000, n=100)
    source, seen = load.source(), []
    for now in range(0, arrivals(load)[-1] + 10_000_000, 7_000_000):
        upcoming = source.next_ns()
        due = source.due(now)
        assert bool(due) == (upcoming is not None and upcoming <= now)
        assert all(request.arrival_ns <= now for request in due)
        seen += due
    assert seen == list(load.requests)
    assert not source.open()
    assert source.next_ns() is None


@given(st.integers(0, 300), st.integers(1, 30), st.floats(0, 1), st.integers(0, 5))
def test_bursts_send_exactly_n_in_order(n: int, burst: int, share: float, seed: int) -> None:
    load = bursts(rate=100, n=n, burst=burst, share=share, seed=seed, texts=["a"])
    assert len(load) == n
    assert arrivals(load) == sorted(arrivals(load))
    assert [request.id for request in load.requests] == list(range(n))


def test_bursts_hold_their_share_and_the_mean_rate() -> None:
    load = bursts(rate=100, n=20_000, burst=20, share=0.05, texts=["a"])
    moments, sizes = np.unique(arrivals(load), return_counts=True)
    assert sorted(set(sizes.tolist())) == [1, 20]
    assert (sizes == 20).sum() * 20 / len(load) == pytest.approx(0.05)
    assert len(load) / (moments[-1] / 1e9) == pytest.approx(100, rel=0.05)


def test_bursts_without_a_share_are_poisson_like() -> None:
    assert len(set(arrivals(bursts(rate=100, n=200, share=0, texts=["a"])))) == 200


def test_a_small_load_still_has_its_burst() -> None:
    _, sizes = np.unique(arrivals(bursts(rate=100, n=64, burst=20, texts=["a"])), return_counts=True)
    assert sizes.max() == 20


# -- closed loop --------------------------------------------------------------------------------


@given(st.integers(0, 60), st.integers(1, 20), st.integers(0, 20))
def test_a_closed_loop_never_has_more_in_flight(n: int, in_flight: int, think_ms: int) -> None:
    source = closed_loop(n=n, in_flight=in_flight, think_ms=think_ms, texts=["a"]).source()
    now, busy, served = 0, [], []
    while source.open() or busy:
        busy += source.due(now)
        assert len(busy) <= in_flight
        now += 1_000_000
        if busy:
            served.append(busy.pop(0))
            source.finished(served[-1], now)
    assert [request.id for request in served] == list(range(n))


def test_a_client_asks_again_after_its_answer_and_its_pause() -> None:
    source = closed_loop(n=3, in_flight=1, think_ms=5, texts=["a"]).source()
    (first,) = source.due(0)
    assert source.next_ns() is None, "its client is waiting for the answer"
    assert source.open()
    source.finished(first, 2_000_000)
    assert source.next_ns() == 7_000_000
    assert source.due(6_999_999) == []
    (second,) = source.due(9_000_000)
    assert second.arrival_ns == 7_000_000, "latency counts from when it was meant to arrive"
    assert second.session == first.session == "client-0"
    assert second.id == 1


def test_finishing_twice_does_not_make_another_client() -> None:
    source = closed_loop(n=5, in_flight=1, texts=["a"]).source()
    (first,) = source.due(0)
    source.finished(first, 1)
    source.finished(first, 1)
    assert len(source.due(1)) == 1


def test_a_closed_loop_serves_all() -> None:
    assert len(drain(closed_loop(n=25, in_flight=4).source())) == 25


# -- replay -------------------------------------------------------------------------------------


def write(tmp_path: Path, *lines: str | bytes) -> Path:
    path = tmp_path / "requests.jsonl"
    path.write_bytes(b"\n".join(line.encode() if isinstance(line, str) else line for line in lines))
    return path


def test_replay_reads_times_keys_sessions_and_bare_strings(tmp_path: Path) -> None:
    load = replay(
        write(
            tmp_path,
            '{"text": "second", "at_ms": 12.5, "key": "mine", "session": "anna"}',
            '"with the one before"',
            "",
            '{"text": "first", "at_ms": 1}',
        )
    )
    assert [text_of(r) for r in load.requests] == ["first", "second", "with the one before"]
    assert arrivals(load) == [1_000_000, 12_500_000, 12_500_000]
    assert [json.loads(r.body)["key"] for r in load.requests] == [COURSE_KEY, "mine", COURSE_KEY]
    assert [r.session for r in load.requests] == ["replay", "anna", "replay"]
    assert [r.id for r in load.requests] == [0, 1, 2]


@pytest.mark.parametrize(
    "line",
    [
        b"{broken",
        b"[1, 2]",
        b"17",
        b"\xff\xfe not UTF-8",
        b"[" * 100_000,
    ],
)
def test_a_broken_line_is_sent_as_it_stands(line: bytes, tmp_path: Path) -> None:
    load = replay(write(tmp_path, '{"text": "a", "at_ms": 3}', line, '{"text": "b"}'))
    assert load.requests[1].body == line
    assert arrivals(load) == [3_000_000] * 3


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "a", "at_ms": "soon"}', "at_ms"),
        (b'{"text": "a", "at_ms": -1}', "at_ms"),
        (b'{"text": "a", "key": "k", "at_ms": NaN}', "at_ms"),
        (b'{"text": "a", "at_ms": 1e13}', "at_ms"),
        (b'{"text": "a", "session": 5}', "session"),
    ],
)
def test_an_impossible_time_or_session_is_a_refusal_with_its_reason(
    line: bytes, reason: str, tmp_path: Path
) -> None:
    load = replay(write(tmp_path, '{"text": "a", "at_ms": 3}', line, '{"text": "b"}'))
    assert reason in load.requests[1].refused
    assert [r.refused for r in load.requests if r.id != 1] == ["", ""]
    assert arrivals(load) == [3_000_000] * 3


def test_a_wrong_text_is_left_for_the_service_to_reject(tmp_path: Path) -> None:
    (request,) = replay(write(tmp_path, '{"text": 5}')).requests
    assert json.loads(request.body) == {"key": COURSE_KEY, "text": 5}


def test_replay_of_no_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere\.jsonl.*No such file"):
        replay(tmp_path / "nowhere.jsonl")
    with pytest.raises(InputError, match="cannot be read"):
        replay(tmp_path)
    with pytest.raises(InputError, match="holds 0 requests"):
        replay(write(tmp_path, "", "  "))


# -- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0, -1, float("nan"), float("inf"), "fast", None, True])
@pytest.mark.parametrize("make", [poisson, bursts])
def test_refuses_rates(make: Any, rate: Any) -> None:
    with pytest.raises(InputError, match="rate="):
        make(rate=rate, n=10)


@pytest.mark.parametrize("n", [-1, 10**9, 2.5, "10", None, True])
def test_refuses_counts(n: Any) -> None:
    for make in (lambda: poisson(10, n), lambda: bursts(10, n), lambda: closed_loop(n, 2)):
        with pytest.raises(InputError, match=f"n={n!r}"):
            make()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: closed_loop(5, 0), "in_flight=0"),
        (lambda: closed_loop(5, 2, think_ms=-1), "think_ms=-1"),
        (lambda: closed_loop(5, 2, think_ms=float("inf")), "think_ms=inf"),
        (lambda: bursts(10, 5, burst=0), "burst=0"),
        (lambda: bursts(10, 5, share=1.5), "share=1.5"),
        (lambda: poisson(10, 5, seed=-1), "seed=-1"),
        (lambda: poisson(10, 5, seed=0.5), "seed=0.5"),  # type: ignore[arg-type]
        (lambda: poisson(10, 5, texts=[]), r"texts=\[\]"),
        (lambda: poisson(10, 5, texts="one text"), r"texts=\['one text'\]"),
        (lambda: poisson(10, 5, texts=[1]), "all of them strings"),  # type: ignore[list-item]
    ],
)
def test_refuses_with_the_value(call: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()


def test_bytes_and_lone_surrogates_go_out_as_a_broken_client_sends_them() -> None:
    (raw,) = poisson(10, 1, texts=[b"\x00 not JSON"]).requests
    assert raw.body == b"\x00 not JSON"
    (broken,) = poisson(10, 1, texts=["half a pair: \ud83d"]).requests
    with pytest.raises(UnicodeDecodeError):
        broken.body.decode()


def test_reprs_say_how_a_load_was_made() -> None:
    assert repr(poisson(300, 4)) == "<load poisson(rate=300, n=4, seed=0): 4 requests>"
    assert repr(closed_loop(9, 3)) == "<load closed_loop(n=9, in_flight=3, seed=0, think_ms=0): 9 requests>"
    assert "burst=20, share=0.05" in repr(bursts(300, 4))
