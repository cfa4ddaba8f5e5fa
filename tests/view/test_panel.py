"""The panel without a browser: knobs, errors, live runs, and its one line of text."""

import asyncio
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from types import SimpleNamespace

import pytest
from made_by_hand import EVIL, run, trace

import heterolab as hl
from heterolab.errors import InputError
from heterolab.view.panel import Panel, explain_error


def scaled(batch=1, memory="pinned"):
    """A job whose time follows its knobs."""
    return run(trace(scale=1000 * batch * (2 if memory == "pageable" else 1)))


KNOBS = {"batch": [1, 2, 4], "memory": ["pinned", "pageable"]}


def shown_text(panel):
    """Everything that the panel's HTML parts say."""
    return " ".join(
        w.value for w in (panel._code_line, panel._status, panel._error, panel._diagnosis, panel._numbers)
    )


def slide(panel, place, value):
    """What the browser does when a knob moves."""
    panel._knobs.widgets[place].value = value


def test_a_panel_runs_once_and_reads_as_one_stable_line():
    panel = Panel(scaled, knobs=KNOBS)
    assert repr(panel) == '<Panel batch=1, memory="pinned"; simulated · a GPU on paper>'
    assert repr(panel) == repr(Panel(scaled, knobs=KNOBS))
    assert panel.last.trace.wall_ns == 20_000


def test_where_no_widget_can_run_it_is_a_line_and_a_still_picture():
    bundle = Panel(scaled, knobs=KNOBS)._repr_mimebundle_()
    assert bundle["text/plain"].startswith("<Panel batch=1")
    assert "application/vnd.jupyter.widget-view+json" in bundle
    assert "simulated" in ElementTree.fromstring(bundle["image/svg+xml"]).get("aria-label")


def test_moving_a_knob_changes_picture_numbers_code_and_last():
    panel = Panel(scaled, knobs=KNOBS)
    before, figure = shown_text(panel), panel.figure.to_json()
    slide(panel, 0, 4)
    assert panel.last.trace.wall_ns == 80_000
    assert panel.figure.to_json() != figure
    assert "scaled(batch=4, memory=&quot;pinned&quot;)" in shown_text(panel)
    assert "80.0 µs" in panel._numbers.value
    assert "20.0 µs" in panel._numbers.value, "the figures of the setting before stay in sight"
    assert shown_text(panel) != before
    assert panel._picture.widget.data[0].x.tolist()[2] == pytest.approx(panel.figure.data[0].x.tolist()[2])
    assert panel._picture.widget.layout.xaxis.range == panel.figure.layout.xaxis.range


def test_set_moves_several_knobs_and_runs_once():
    calls = []
    panel = Panel(lambda **knobs: calls.append(knobs) or scaled(**knobs), knobs=KNOBS)
    panel.set(batch=2, memory="pageable")
    assert calls == [{"batch": 1, "memory": "pinned"}, {"batch": 2, "memory": "pageable"}]
    panel.set(batch=2)
    assert len(calls) == 2, "nothing moved"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"batch": 3}, r"batch=3 is not on this panel. Choose from: 1, 2, 4"),
        ({"batch": True}, r"batch=True"),
        ({"stream": 1}, r"stream is not a knob of this panel. Its knobs: batch, memory"),
        ({"batch": 2, "memory": "fast"}, r"memory='fast'"),
    ],
)
def test_set_refuses_what_is_not_on_the_panel_and_moves_nothing(values, message):
    panel = Panel(scaled, knobs=KNOBS)
    with pytest.raises(InputError, match=message):
        panel.set(**values)
    assert panel.settings == {"batch": 1, "memory": "pinned"}


def test_a_range_is_a_slider():
    panel = Panel(lambda streams: scaled(streams), knobs={"streams": (1, 8)}, start={"streams": 3})
    assert panel.settings == {"streams": 3}
    with pytest.raises(InputError, match="1 to 8"):
        panel.set(streams=9)
    halves = Panel(lambda delay: scaled(), knobs={"delay": (0.0, 2.0, 0.5)})
    halves.set(delay=1.5)
    assert halves.settings == {"delay": 1.5}


@pytest.mark.parametrize(
    "knobs",
    [
        *({}, {name: [1] for name in "abcd"}, {"a": []}, {"a": (3, 1)}, {"a": "xyz"}, {"a": 8}),
        *({"a": (1, 8, step)} for step in (64, 0, -1)),
        {"a": (0, float("inf"))},
        {"a": (0.0, float("nan"))},
    ],
)
def test_knobs_that_make_no_sense_are_refused(knobs):
    with pytest.raises(InputError):
        Panel(lambda **_: scaled(), knobs=knobs)


@pytest.mark.parametrize(("choices", "value"), [((1, 8), 2.5), ((0, 5), 0.5)])
def test_a_range_of_whole_numbers_rounds_nothing(choices, value):
    panel = Panel(lambda knob: scaled(), knobs={"knob": choices})
    with pytest.raises(InputError, match=rf"{value}.*whole numbers"):
        panel.set(knob=value)
    assert panel.settings == {"knob": choices[0]}
    assert panel.set(knob=4.0).settings == {"knob": 4}


@pytest.mark.parametrize(
    ("knobs", "said"), [({"batch": 8}, "batch needs values"), ({"bacth": [1, 2]}, "bacth.*batch, streams")]
)
def test_a_pipeline_panel_refuses_knobs_that_are_none(knobs, said):
    with pytest.raises(InputError, match=said):
        hl.pipeline_panel(None, None, on=None, knobs=knobs)


def test_a_start_that_is_no_choice_is_refused():
    with pytest.raises(InputError, match="batch=5"):
        Panel(scaled, knobs=KNOBS, start={"batch": 5})


def test_reset_restores_the_preset():
    panel = Panel(scaled, knobs=KNOBS, start={"batch": 2})
    panel.set(batch=4, memory="pageable")
    panel._reset_button.click()
    assert panel.settings == {"batch": 2, "memory": "pinned"}


def test_an_error_ends_in_one_full_stop_and_keeps_its_notes():
    error = ValueError("too much.")
    error.add_note("In the kernel 'k'.")
    assert explain_error(error) == "ValueError: too much. In the kernel 'k'."


def failing(batch):
    if batch == 2:
        raise ValueError(f"too much: {EVIL}")
    return scaled(batch)


def test_an_error_is_shown_with_the_line_and_the_earlier_result_stays():
    panel = Panel(failing, knobs={"batch": [1, 2, 4]})
    kept, figure = panel.last, panel.figure
    slide(panel, 0, 2)
    assert panel.last is kept
    assert panel.figure is figure
    assert "ValueError: too much" in panel._error.value
    assert re.search(r"In your code, line \d+: raise ValueError", panel._error.value)
    assert "<img" not in panel._error.value
    assert "20.0 µs" in panel._numbers.value
    slide(panel, 0, 4)
    assert panel._error.value == ""
    assert panel.last.trace.wall_ns == 80_000


def test_an_error_from_code_is_raised_where_the_code_is():
    panel = Panel(failing, knobs={"batch": [1, 2]}, at_once=False)
    panel.run()
    panel.set(batch=2)
    with pytest.raises(ValueError, match="too much"):
        panel.run()
    assert panel.last.trace.wall_ns == 20_000


def test_a_job_must_give_a_run_or_a_trace():
    with pytest.raises(InputError, match="the job returned int"):
        Panel(lambda batch: batch, knobs={"batch": [1]})
    assert len(Panel(lambda batch: trace(), knobs={"batch": [1]}).last) == 10


def test_names_from_traces_are_escaped_in_the_panel():
    panel = Panel(lambda batch: run(trace(name=EVIL, device=EVIL), EVIL, EVIL), knobs={"batch": [1]})
    assert "<img" not in shown_text(panel)


def test_where_runs_take_time_nothing_runs_until_run_is_pressed():
    panel = Panel(scaled, knobs=KNOBS, at_once=False)
    assert panel.last is None
    assert repr(panel) == '<Panel batch=1, memory="pinned">'
    assert "image/svg+xml" not in panel._repr_mimebundle_()
    panel._run_button.click()
    assert panel.last is not None
    panel.set(batch=4)
    assert panel.last.trace.wall_ns == 20_000
    assert "press Run" in panel._status.value


# -- the switch that compares ------------------------------------------------------------------------


def predicted(shown, batch, memory):
    """What the simulator says of :func:`scaled`: ten per cent too much. With batch 4 it has no answer."""
    if batch == 4:
        raise ValueError(f"no answer: {EVIL}")
    return run(trace(scale=1100 * batch * (2 if memory == "pageable" else 1)))


def measuring(**knobs):
    done = scaled(**knobs)
    return replace(done, trace=replace(done.trace, source="cupti"))


def with_switch(**options):
    return Panel(measuring, knobs=KNOBS, counterpart=predicted, **options)


def drawn_by(panel):
    """The figure in the picture's place."""
    return panel._box.children[0]


def test_the_switch_puts_prediction_over_measurement_with_the_error():
    panel = with_switch()
    before = drawn_by(panel)
    assert panel.comparison is None
    panel._switch.checkbox.value = True
    assert drawn_by(panel) is not before
    assert "+10.0 %" in drawn_by(panel).layout.title.text
    assert "+10.0 %" in panel._switch.words.value
    assert panel.comparison.wall_error == pytest.approx(0.1)
    line = '<Panel batch=1, memory="pinned"; measured (CUPTI) · a GPU on paper; Wall time: measured'
    assert repr(panel) == f"{line} 20.0 µs, predicted 22.0 µs: +10.0 %>"
    panel._switch.checkbox.value = False
    assert drawn_by(panel) is before
    assert panel._switch.words.value == ""
    assert repr(panel) == '<Panel batch=1, memory="pinned"; measured (CUPTI) · a GPU on paper>'


def test_a_knob_that_moves_is_compared_anew():
    panel = with_switch()
    panel.compare()
    first = drawn_by(panel)
    panel.set(batch=2)
    assert drawn_by(panel) is first, "the same figure, with other data"
    assert panel.comparison.found.measured.wall_ns == 40_000
    assert "40.0 µs" in first.layout.title.text


def test_what_cannot_be_compared_is_said_and_the_timeline_stays():
    panel = with_switch()
    timeline_ = drawn_by(panel)
    panel.compare()
    slide(panel, 0, 4)
    assert panel.last.trace.wall_ns == 80_000
    assert panel.comparison is None
    assert drawn_by(panel) is timeline_
    assert "Nothing to compare with: ValueError: no answer" in panel._switch.words.value
    assert "<img" not in panel._switch.words.value
    with pytest.raises(ValueError, match="no answer"):
        panel.compare()
    slide(panel, 0, 1)
    assert panel.comparison is not None
    assert drawn_by(panel) is not timeline_


def test_before_the_first_run_and_without_a_counterpart_there_is_nothing_to_compare():
    panel = with_switch(at_once=False)
    with pytest.raises(InputError, match="nothing has run"):
        panel.compare()
    panel._switch.checkbox.value = True
    assert "nothing has run" in panel._switch.words.value
    panel.run()
    assert panel.comparison is not None
    with pytest.raises(InputError, match="counterpart"):
        Panel(scaled, knobs=KNOBS).compare()
    assert Panel(scaled, knobs=KNOBS).comparison is None


def test_a_simulated_run_is_the_prediction_and_a_recording_the_measurement():
    panel = Panel(scaled, knobs=KNOBS, counterpart=lambda shown, **knobs: measuring(**knobs))
    panel.compare()
    assert panel.comparison.found.measured.source == "cupti"
    assert panel.comparison.found.predicted.source == "simulated"


@pytest.mark.usefixtures("quick")
def test_a_live_run_is_watched_as_a_timeline_and_compared_when_it_ends():
    async def scene():
        def start(**knobs):
            return Live()

        asked = []

        def counterpart(shown, **knobs):
            asked.append(knobs)
            return shown

        panel = Panel(scaled, knobs=KNOBS, live=start, counterpart=counterpart)
        timeline_ = drawn_by(panel)
        panel._switch.checkbox.value = True
        panel.start()
        panel.set(batch=2)
        assert drawn_by(panel) is timeline_
        await panel._following
        assert drawn_by(panel) is not timeline_
        assert asked == [{"batch": 1, "memory": "pinned"}], "the settings it ran with"

    asyncio.run(scene())


class Live:
    """A live run that grows with each look, and ends when it is stopped."""

    def __init__(self, looks=3, fails=False):
        self.looks, self.looked, self.stopped, self.fails = looks, 0, False, fails

    @property
    def done(self):
        return self.stopped or self.looked >= self.looks

    def snapshot(self):
        self.looked += 1
        return run(trace(scale=self.looked * 100))

    def stop(self):
        self.stopped = True
        return self.join()

    def join(self):
        if self.fails:
            raise RuntimeError("the device is lost")
        outcome = run(trace(scale=5000))
        return SimpleNamespace(**{n: getattr(outcome, n) for n in dir(outcome) if n[0] != "_"} | {
            "unserved": (1, 2) if self.stopped else ()
        })  # fmt: skip


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr("heterolab.view.panel.REFRESH_S", 0.005)


def live_panel(live):
    started = []

    def start(**knobs):
        started.append(knobs)
        return live

    panel = Panel(scaled, knobs=KNOBS, live=start)
    return panel, started


@pytest.mark.usefixtures("quick")
def test_a_live_run_is_redrawn_until_it_ends():
    async def scene():
        live = Live()
        panel, started = live_panel(live)
        assert started == []
        panel._run_button.click()
        assert panel._run_button.disabled
        assert not panel._stop_button.disabled
        with pytest.raises(InputError, match="A run is going on"):
            panel.run()
        await panel._following
        assert live.looked == 3
        assert panel.last.trace.wall_ns == 100_000
        assert panel._status.value.endswith(">Done.</span>")
        assert not panel._run_button.disabled
        assert panel._stop_button.disabled

    asyncio.run(scene())


@pytest.mark.usefixtures("quick")
def test_stop_ends_a_live_run_and_says_what_was_not_served():
    async def scene():
        live = Live(looks=10**9)
        panel, _ = live_panel(live)
        panel._run_button.click()
        await asyncio.sleep(0.05)
        assert "answered so far" in panel._status.value
        assert live.looked > 0
        panel._stop_button.click()
        await asyncio.wait_for(panel._following, 5)
        assert live.stopped
        assert "Stopped: of the requests that had arrived, 2 were not served" in panel._status.value
        panel._run_button.click()  # and it can be started again
        await asyncio.wait_for(panel._following, 5)

    asyncio.run(scene())


@pytest.mark.usefixtures("quick")
def test_a_live_run_that_fails_says_so_and_can_be_tried_again():
    async def scene():
        panel, _ = live_panel(Live(fails=True))
        panel._run_button.click()
        await panel._following
        assert "RuntimeError: the device is lost" in panel._error.value
        assert not panel._run_button.disabled

    asyncio.run(scene())


def test_a_live_job_that_cannot_start_leaves_the_buttons_as_they_were():
    def start(**knobs):
        raise InputError("no such device")

    panel = Panel(scaled, knobs=KNOBS, live=start)
    panel._run_button.click()
    assert "no such device" in panel._error.value
    assert not panel._run_button.disabled


def test_without_a_notebook_a_live_job_runs_to_its_end():
    panel, _ = live_panel(Live())
    panel.start()
    assert panel.last.trace.wall_ns == 100_000
    assert not panel._run_button.disabled


@pytest.fixture(scope="module")
def encoder():
    import heterolab as hl

    return hl.models.encoder()


def test_a_pipeline_on_a_simulated_device_runs_at_once(encoder):
    import heterolab as hl

    load = hl.closed_loop(n=8, in_flight=8, seed=0)
    knobs = {"batch": [2, 3, 8], "memory": ["pageable", "pinned"]}
    panel = hl.pipeline_panel(encoder, load, on=hl.open_device("sim:h200"), knobs=knobs, batch=2, chunk=4)
    assert panel.settings == {"batch": 2, "memory": "pinned"}
    assert panel.code == 'hl.Pipeline(enc, batch=2, memory="pinned", chunk=4)'
    assert panel.last.settings.chunk == 4
    assert max(panel.set(batch=8).last.batch_sizes) > 2
    assert len(panel.last.answers) == 8


def test_on_a_simulated_device_the_measurement_is_a_recording_with_the_same_settings(encoder):
    from heterolab.workload import questions

    load = hl.closed_loop(n=128, in_flight=128, texts=questions()[:32])
    dev = hl.open_device("sim:h200")
    panel = hl.pipeline_panel(encoder, load, on=dev, knobs={"batch": [8, 32]}, batch=32, chunk=32)
    comparison = panel.compare()
    assert comparison.found.measured.replayed
    assert "NVIDIA H200" in comparison.found.measured.device
    assert comparison.found.predicted is not comparison.found.measured
    assert not comparison.found.only_measured or "ops" in comparison.found.doubts
    panel.set(batch=8)
    assert panel.comparison is None
    assert "no recording was made with these settings" in panel._switch.words.value


def test_on_a_real_device_the_simulator_predicts_the_measured_batches(encoder, cpu_device):
    load = hl.poisson(rate=200, n=24, seed=0)
    sim = hl.open_device("sim:cpu")
    panel = hl.pipeline_panel(encoder, load, on=cpu_device, knobs={"batch": [4, 8]}, predict_on=sim)
    panel.run()
    comparison = panel.compare()
    assert comparison.found.measured.source == "cpu-clock"
    assert comparison.found.predicted.source == "simulated"
    assert "batches" not in comparison.found.doubts
    assert not comparison.found.only_measured
    cpu_device.name = "a machine that nobody knows"
    stranger = hl.pipeline_panel(encoder, load, on=cpu_device, knobs={"batch": [4, 8]})
    stranger.run()
    with pytest.raises(InputError, match=r"a machine that nobody knows.*calibrate.*predict_on"):
        stranger.compare()


def test_a_pipeline_on_a_real_device_is_started_and_stopped_and_one_run_goes_at_a_time(encoder, cpu_device):
    import heterolab as hl

    async def scene():
        load = hl.poisson(rate=20, n=2000, seed=0)
        old, new = (hl.pipeline_panel(encoder, load, on=cpu_device, knobs={"batch": [8]}) for _ in range(2))
        assert old.last is None
        old.start()
        while "answered so far" not in old._status.value:
            await asyncio.sleep(0.05)
        new.start()
        await asyncio.wait_for(old._following, 20)
        assert old.last.trace.source == "cpu-clock"
        new.stop()
        await asyncio.wait_for(new._following, 20)
        assert len(new.last.outputs) < 2000
        assert "Stopped" in new._status.value

    asyncio.run(scene())
