"""A run again elsewhere, in its own batches."""

from dataclasses import replace

import pytest

import heterolab as hl
from heterolab.errors import InputError
from heterolab.trace.compare import OTHER_BATCHES
from heterolab.workload import questions

TEXTS = questions()[:8]


def batches(run):
    found = {}
    for request, timing in run.timings.items():
        found.setdefault(timing.batch, set()).add(request)
    return found


@pytest.fixture(scope="module")
def slow_and_fast(tmp_path_factory):
    """Two machines that make other batches of the same open load."""
    fast = hl.open_device("sim:h200")
    profile = fast.profile
    slow_stage = replace(
        profile.cpu_costs["preprocess"],
        time=replace(profile.cpu_costs["preprocess"].time, ns=(4e6, 8e6, 16e6, 32e6)),
    )
    slow = replace(profile, cpu_costs={**profile.cpu_costs, "preprocess": slow_stage})
    return type(fast).open(slow), fast


LOADS = {
    "open": hl.poisson(rate=400, n=40, seed=3, texts=TEXTS),
    "bursts": hl.bursts(rate=400, n=40, burst=7, share=0.5, seed=1, texts=TEXTS),
    "closed": hl.closed_loop(n=40, in_flight=6, seed=0, texts=TEXTS),
}


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
@pytest.mark.parametrize("settings", [{"batch": 4}, {"batch": 16, "streams": 1, "ring": 1, "chunk": 3}])
def test_the_prediction_makes_the_measured_batches(slow_and_fast, load, settings) -> None:
    slow, fast = slow_and_fast
    pipe = hl.Pipeline(hl.models.encoder(), **settings)
    measured = pipe.run(load, on=slow)
    again = hl.predict_like(measured, pipe, load, on=fast)
    assert batches(again) == batches(measured)
    assert [a.answer for a in again.answers] == [a.answer for a in measured.answers]
    assert OTHER_BATCHES not in hl.compare(measured, again).found.doubts


def test_by_itself_the_other_device_makes_others(slow_and_fast) -> None:
    slow, fast = slow_and_fast
    pipe, load = hl.Pipeline(hl.models.encoder(), batch=4), LOADS["open"]
    measured, alone = pipe.run(load, on=slow), pipe.run(load, on=fast)
    assert batches(alone) != batches(measured)
    assert OTHER_BATCHES in hl.compare(measured, alone).found.doubts


def test_on_the_same_device_a_run_is_repeated_to_the_nanosecond() -> None:
    pipe, load = hl.Pipeline(hl.models.encoder(), batch=4), LOADS["open"]
    run = pipe.run(load, on=hl.open_device("sim:h200"))
    again = hl.predict_like(run, pipe, load, on=hl.open_device("sim:h200"))
    assert list(again.trace) == list(run.trace)


def test_rejected_requests_and_a_run_that_was_stopped_are_no_trouble(slow_and_fast) -> None:
    _, fast = slow_and_fast
    load = hl.poisson(rate=400, n=24, seed=0, texts=[*TEXTS, "", b"no JSON"])
    pipe = hl.Pipeline(hl.models.encoder(), batch=4)
    run = pipe.run(load, on=fast)
    assert run.rejected
    kept = {i: t for i, t in run.timings.items() if t.batch < 2}
    stopped = replace(run, timings=kept, outputs={i: run.outputs[i] for i in kept})
    again = hl.predict_like(stopped, pipe, load, on=fast)
    assert len(again.answers) == len(stopped.answers)


def test_another_pipeline_or_load_is_refused(slow_and_fast) -> None:
    _, fast = slow_and_fast
    pipe, load = hl.Pipeline(hl.models.encoder(), batch=4), LOADS["open"]
    run = pipe.run(load, on=fast)
    with pytest.raises(InputError, match=r"batch=4.*batch=8"):
        hl.predict_like(run, hl.Pipeline(hl.models.encoder(), batch=8), load, on=fast)
    with pytest.raises(InputError, match=r"seed=3.*seed=4"):
        hl.predict_like(run, pipe, hl.poisson(rate=400, n=40, seed=4), on=fast)


def test_a_trace_says_which_load_it_served_and_how_many_were_answered(slow_and_fast) -> None:
    _, fast = slow_and_fast
    run = hl.Pipeline(hl.models.encoder(), batch=4).run(LOADS["closed"], on=fast)
    assert run.trace.meta["load"] == LOADS["closed"].label
    assert run.trace.meta["answers"] == 40
