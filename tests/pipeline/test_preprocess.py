"""Stage 1: what is accepted, what is refused with which reason, what is cleaned away."""

import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterolab.pipeline.preprocess import MAX_BODY_BYTES, Prepared, Rejected, clean, known_key, preprocess
from heterolab.workload import COURSE_KEY, Request


def words(texts: list[str]) -> list[np.ndarray]:
    return [np.arange(len(text.split()), dtype=np.int32) for text in texts]


def body(text: object, key: object = COURSE_KEY) -> bytes:
    return json.dumps({"key": key, "text": text}).encode()


def outcome(raw: bytes) -> Prepared | Rejected:
    return preprocess([Request(7, raw, 0, "s")], (COURSE_KEY,), words)[0]


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"{not json", "not JSON"),
        (b"[" * 100_000, "at most"),
        (b"[" * 60_000, "not JSON"),
        (b"[1, 2]", 'string "text"'),
        (body(None), 'string "text"'),
        (body("hello", key="wrong"), "API key"),
        (body("hello", key=None), "API key"),
        (body("hello", key=3), "API key"),
        (body(""), "empty"),
        (body(" \x00\n\t "), "empty"),
        (body("x" * 1_000_000), f"at most {MAX_BODY_BYTES}"),
        (b'{"text": "\xff\xfe"}', "not UTF-8"),
        (b"", "not JSON"),
    ],
)
def test_a_bad_request_is_refused_with_its_reason(raw: bytes, reason: str) -> None:
    refused = outcome(raw)
    assert isinstance(refused, Rejected)
    assert refused.id == 7
    assert reason in refused.reason


def test_a_refused_request_does_not_disturb_its_neighbours() -> None:
    raw = [body("one two"), b"broken", body("three"), body("four", key="no")]
    requests = [Request(i, b, 0, "s") for i, b in enumerate(raw)]
    kinds = [type(o) for o in preprocess(requests, (COURSE_KEY,), words)]
    assert kinds == [Prepared, Rejected, Prepared, Rejected]
    prepared = preprocess(requests, (COURSE_KEY,), words)[2]
    assert isinstance(prepared, Prepared)
    assert (prepared.text, len(prepared.ids)) == ("three", 1)


def test_what_the_source_refused_is_rejected_with_the_source_s_reason() -> None:
    request = Request(3, body("fine"), 0, "s", refused="no such time")
    assert preprocess([request], (COURSE_KEY,), words) == [Rejected(3, "no such time")]


def test_html_is_kept_as_text_and_control_characters_go() -> None:
    assert clean("<b>a</b>\x07\x1b[31m  b\u202e\r\n") == "<b>a</b> [31m b"


def test_lone_surrogates_from_json_escapes_are_replaced() -> None:
    prepared = outcome(b'{"key": "' + COURSE_KEY.encode() + b'", "text": "a\\ud800b"}')
    assert isinstance(prepared, Prepared)
    prepared.text.encode()


@given(st.text())
def test_clean_text_is_one_line_without_control_characters_and_stays_clean(text: str) -> None:
    once = clean(text)
    assert clean(once) == once
    assert "\n" not in once
    assert all(ord(c) >= 32 for c in once)
    assert not any(a == b == " " for a, b in pairwise(once))


@given(st.one_of(st.text(), st.integers(), st.none(), st.lists(st.text())))
def test_only_the_served_key_is_known(key: object) -> None:
    assert known_key(key, ("secret",)) == (key == "secret")


def test_any_of_several_keys_is_served() -> None:
    assert known_key("b", ("a", "b", "c"))
