"""Why the GPU is idle and what would help, as text, tables and a picture."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from made_by_hand import EVIL, run, trace

import heterolab as hl
from heterolab.errors import InputError
from heterolab.trace import metrics
from heterolab.trace.trace import KERNEL, NO_STREAM, NONE, Span, Trace
from heterolab.view import explained, words
from heterolab.view import explained_picture as picture


@pytest.fixture(scope="module")
def pictures() -> Any:
    """A run on the simulator whose host is held by pageable copies."""
    pipe = hl.Pipeline(
        hl.models.encoder(), payload="images_float32", memory="pageable", batch=32, chunk=32, streams=1
    )
    load = hl.closed_loop(n=96, in_flight=96)
    return pipe.run(load, on=hl.open_device("sim:h200", values=False))


def test_it_says_when_for_how_long_before_what_and_why_with_the_run_s_own_numbers() -> None:
    told = str(hl.explain(trace()))
    assert told.startswith("simulated · a GPU on paper\nGPU: idle 10.0 µs of 20.0 µs (50 %).")
    assert (
        "- 0 ns – 3.00 µs: GPU idle for 3.00 µs, before encode (op 4, batch 0). The host was busy with "
        "preprocess. Evidence: preprocess (op 0) on worker 0, 3.00 µs of it."
    ) in told
    assert "critical path" in told


def test_gaps_and_causes_and_the_path_are_at_hand(pictures: Any) -> None:
    why = hl.explain(pictures)
    assert sum(why.by_cause.values()) == metrics.idle_ns(pictures.trace, "gpu")
    assert sum(gap.took_ns for gap in why.gaps) == sum(why.by_cause.values())
    assert sum(step.took_ns for step in why.critical_path) == pictures.trace.wall_ns
    longest = why.longest(1)[0]
    assert why.at(longest.start_ns) == longest
    (kernel,) = list(pictures.trace.kind(KERNEL))[:1]
    assert why.at(kernel.start_ns) is None
    assert repr(why) == str(why)


def test_the_rows_add_up_to_the_idle_time_even_if_small_causes_are_folded(pictures: Any) -> None:
    why = hl.explain(pictures)
    assert len(why.rows) == explained.CAUSE_LINES + 1
    assert "other causes" in why.rows[-1][0]
    counts = sum(int(row[3]) for row in why.rows)
    assert counts == len(why.gaps)
    assert len(why.path_rows) == explained.PATH_LINES + 1


def test_every_cause_has_a_name_a_sentence_and_a_colour() -> None:
    causes = [
        metrics.INPUT_COPY, metrics.OUTPUT_COPY, metrics.EVENT, metrics.HAND_OVER, metrics.HOST_SYNC,
        metrics.PAGEABLE, metrics.COPY_CALL, metrics.LAUNCH_CALL, metrics.ARRIVALS, metrics.BATCH_DELAY,
        metrics.WAKE, metrics.UNRECORDED, metrics.END,
    ]  # fmt: skip
    assert set(causes) | {metrics.UNKNOWN} == set(picture.CAUSE_COLOURS)
    told = set()
    for cause in (*causes, "cpu:pad"):
        gap = explained.Gap(0, 0, 5, cause, 1, "forward", 0, (), 5)
        told.add((words.cause_name(cause), explained.why(gap)))
    for missing in ("requests", "host", "reason"):
        told.add(("", explained.why(explained.Gap(0, 0, 5, "unknown", 1, "f", 0, (), 5, missing))))
    assert len({sentence for _, sentence in told}) == len(causes) + 4


def test_what_a_trace_does_not_tell_is_said() -> None:
    asleep = Span(0, "wait", "wait", "host", NO_STREAM, NONE, 0, 0, 900)
    kernel = Span(1, KERNEL, "forward", "gpu", 0, 0, 900, 1000, 1100)
    told = str(hl.explain(Trace.from_spans([asleep, kernel], "cuda-events", "a GPU")))
    assert "Unknown for 900 ns: the trace does not say when its requests arrived." in told
    assert "Pauses inside it are not counted as idle here." in told


def test_several_gpus_have_their_numbers() -> None:
    spans = [Span(i, KERNEL, "f", "gpu", 0, i, 0, 10 * i, 10 * i + 10) for i in range(2)]
    why = hl.explain(Trace.from_spans(spans, "simulated", "two GPUs"))
    assert why.title == "GPU 0: idle 10 ns of 20 ns (50 %). GPU 1: idle 10 ns of 20 ns (50 %)."
    assert why.rows[0][0] == "GPU 0: the end: no kernel was left"
    assert why.at(15).device == 0
    assert why.at(15, device=1) is None
    assert list(why.figure(device=1).layout.yaxis.ticktext)[-1] == "GPU 1 idle"
    with pytest.raises(InputError, match=r"device=2.*0, 1"):
        why.figure(device=2)


def test_nothing_recorded_and_no_gpu() -> None:
    nothing = hl.explain(Trace.from_spans([], "simulated", "x"))
    assert str(nothing) == "Nothing was recorded."
    assert nothing._repr_html_() == "<p>Nothing was recorded.</p>"
    assert nothing.at(0) is None
    nothing.figure()
    alone = Span(0, "cpu", "pad", "host", NO_STREAM, NONE, 0, 0, 9)
    assert "No GPU did anything" in str(hl.explain(Trace.from_spans([alone], "simulated", "x")))


def test_html_is_escaped(pictures: Any) -> None:
    hostile = trace(name=EVIL, device=EVIL)
    columns = hostile.columns | {"name": np.where(hostile["kind"] == "cpu", EVIL, hostile["name"])}
    why = hl.explain(replace(hostile, columns=columns))
    page = why._repr_html_()
    assert "<img" not in page
    assert "&lt;img" in page
    figure = why.figure()
    figure.layout.meta = None  # the alternative text is plain text
    assert "<img" not in figure.to_json().replace("\\u003c", "<")
    change = hl.what_if(pictures)
    renamed = replace(change.found, profile=replace(change.found.profile, name=EVIL))
    assert "<img" not in type(change)(renamed)._repr_html_()


def test_the_picture_has_a_row_of_causes_and_the_path(pictures: Any) -> None:
    why = hl.explain(pictures)
    figure = why.figure()
    assert list(figure.layout.yaxis.ticktext) == ["CPU", "link", "GPU", "GPU idle"]
    names = [one.name for one in figure.data]
    heaviest = list(why.by_cause)[: picture.LEGEND]
    assert [f"idle: {words.cause_name(cause)}" for cause in heaviest] == [
        name for name in names if name.startswith("idle: ") and "other causes" not in name
    ]
    work = next(one for one in figure.data if one.name == "critical path")
    drawn = np.array(work.x, float).reshape(-1, 3)
    on_path = sum(step.took_ns for step in why.critical_path if not step.cause)
    assert (drawn[:, 1] - drawn[:, 0]).sum() == pytest.approx(on_path / 1e6)
    cards = next(one for one in figure.data if one.text is not None and "idle for" in str(one.text[0]))
    assert len(cards.text) == min(len(why.gaps), picture.MOST_CARDS)
    assert pictures.trace.stamp in figure.layout.annotations[0].text
    assert figure.layout.meta["alt"] == why.alt
    assert "Idle because of:" in why.alt


def test_a_hand_made_run_can_be_explained_but_not_repeated() -> None:
    assert str(hl.explain(run())) == str(hl.explain(run().trace))
    with pytest.raises(InputError, match="pipeline=pipe"):
        hl.what_if(run())


# -- what would help most ---------------------------------------------------------------------------


def test_the_ranking_reads_as_a_table_with_its_stamp_and_a_verdict(pictures: Any) -> None:
    then = hl.what_if(pictures)
    lines = str(then).splitlines()
    assert lines[0] == f"simulated · NVIDIA H200 (costs {then.found.profile.stamp})"
    ratio = f"×{then.best.gain:.2f}"
    assert lines[1] == f"Try first: pinned memory (memory='pinned'). It promises {ratio} the throughput."
    assert re.search(r"^a GPU twice as fast +×\d\.\d\d +[+-]\d+\.\d % +no$", str(then), re.M)
    assert re.search(r"^pinned memory \(memory='pinned'\) +×\d\.\d\d +-\d+\.\d % +yes$", str(then), re.M)
    assert "no setting does it" in str(then)
    assert repr(then) == str(then)
    assert then._repr_html_().count("<tr>") == 1 + len(then.outcomes)


def test_promise_and_result(pictures: Any) -> None:
    dev = hl.open_device("sim:h200", values=False)
    tried = hl.what_if(pictures).try_best(on=dev, rounds=2)
    assert tried.measured == pytest.approx(tried.promised, rel=0.01)
    promised, measured = f"×{tried.promised:.2f}", f"×{tried.measured:.2f}"
    assert f"promised {promised} the throughput, got {measured}" in str(tried)
    assert "simulated · NVIDIA H200" in str(tried)
    assert "&#x27;pinned&#x27;" in tried._repr_html_()
    assert len(tried.trial.runs) == 2
    with pytest.raises(InputError, match="rounds=0"):
        hl.what_if(pictures).try_best(on=dev, rounds=0)


def test_what_does_not_run_and_what_was_cut_are_said(pictures: Any) -> None:
    then = hl.what_if(pictures)
    broken = replace(then.outcomes[-1], why_not="it does not <fit>.")
    found = replace(then.found, outcomes=(*then.outcomes[:-1], broken), requests=10)
    told = type(then)(found)
    assert "does not run" in str(told)
    assert "it does not <fit>." in str(told)
    assert "<fit>" not in told._repr_html_()
    assert "The first 10 of 96 requests were simulated." in str(told)


def test_nothing_helps() -> None:
    pipe = hl.Pipeline(hl.models.encoder(), max_delay_ms=0)
    slow = pipe.run(hl.poisson(rate=5, n=4, seed=0), on=hl.open_device("sim:h200", values=False))
    told = str(hl.what_if(slow))
    assert "No setting tried here helps by 1 % or more." in told
    assert "The arrivals limit the throughput" in told
