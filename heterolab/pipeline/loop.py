"""The one loop that runs the five stages.

`Loop.step` does all that can be done now, then sleeps once until whatever comes first: a
worker done, an event done, the next arrival, the batcher's deadline. A batch's life is one
generator (`Loop._life`) that gives the host back at each `yield event`. There are no
callbacks into user code but hooks, no threads and no clock but the host's, so the same loop
runs on a virtual clock, on this CPU and on a GPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from heterolab.device.base import Device, Event, Memory, Wait
from heterolab.errors import InputError, StalledError
from heterolab.pipeline.batch import Batch, Batcher
from heterolab.pipeline.hooks import Hooks
from heterolab.pipeline.kernels import run_kernels
from heterolab.pipeline.postprocess import Answer, postprocess
from heterolab.pipeline.preprocess import Prepared, Rejected, preprocess
from heterolab.pipeline.run import Failed, Origin, Run, Timing
from heterolab.pipeline.transfer import Slot, SlotPlan, copy_in, copy_out, make_slots
from heterolab.trace.queue import noted
from heterolab.trace.trace import Trace
from heterolab.workload import Load, Request

if TYPE_CHECKING:
    from heterolab.pipeline.pipeline import Pipeline

#: How often a live run takes stock of what the device has done, for those who watch.
LIVE_NS = 100_000_000

#: So many waits in a row that bring nothing mean that the loop would spin for ever.
MAX_FRUITLESS_WAITS = 1_000

#: The loops that have begun. A host runs one at a time, or their spans would mix.
_begun: WeakSet[Loop] = WeakSet()


class Loop:
    """One run of a pipeline. `step` until it returns False, then `finish`.

    Attributes
    ----------
    over
        Whether it has ended, well or not: its host may then run another.
    """

    def __init__(self, pipeline: Pipeline, load: Load, device: Device, live: bool = False) -> None:
        _refuse_a_second(device)
        self.over = False
        self.pipeline, self.settings = pipeline, pipeline.settings
        self.device, self.host = device, device.host
        self.kernels = pipeline.model.on(device)
        plan = SlotPlan(
            pipeline.payload,
            pipeline.returns,
            self.settings.batch,
            pipeline.model.max_tokens,
            pipeline.model.dim,
            Memory.of(self.settings.memory),
        )
        self.slots = deque(make_slots(device, plan, self.settings.streams, self.settings.ring))
        self.slot_count = len(self.slots)
        self.batcher = Batcher(
            self.settings.batch, round(self.settings.max_delay_ms * 1e6), self.settings.length_aware
        )
        self.inbox: deque[Request] = deque()
        self.load, self.source = load, load.source()
        self.waiting: dict[Wait, Callable[[Wait], None]] = {}
        self.jobs = 0
        self.stopping = False
        self.fruitless = 0
        self.outputs: dict[int, Answer | Rejected | Failed] = {}
        self.timings: dict[int, Timing] = {}
        self._warm_up()
        self.pool = self.host.pool(self.settings.workers) if self.settings.workers else None
        device.collect()  # what came before the run is told before it
        recorder = self.host.recorder
        self.first_span, self.first_op = len(recorder.spans), recorder.ops
        self.first_note = len(recorder.notes)
        self.origin_ns = self.host.now()
        self.hooks = Hooks(pipeline.hooks, self.host, self.origin_ns)
        self.live = live
        _begun.add(self)
        self.collected_ns = self.origin_ns

    # -- the loop ----------------------------------------------------------------------

    def step(self) -> bool:
        """Do all that can be done now, then wait once. False when everything is served."""
        try:
            self.over = not self._step()
        except BaseException:
            self.over = True
            raise
        return not self.over

    def _step(self) -> bool:
        progress = self._admit()
        progress |= self._start_preprocessing()
        progress |= self._start_batches()
        if self._served_all():
            return False
        done = self.host.wait_any(list(self.waiting), self._until())
        for wait in done:
            self.waiting.pop(wait)(wait)
        if self.live and self.host.now() - self.collected_ns > LIVE_NS:
            self.device.collect()
            self.collected_ns = self.host.now()
        self.fruitless = 0 if progress or done else self.fruitless + 1
        if self.fruitless > MAX_FRUITLESS_WAITS:
            raise StalledError(
                f"{MAX_FRUITLESS_WAITS} waits brought nothing: {len(self.inbox)} requests unprepared, "
                f"{len(self.batcher)} queued, {len(self.slots)} of {self.slot_count} slots free."
            )
        return True

    def stop(self) -> None:
        """Admit nothing more. May be called from any thread."""
        self.stopping = True
        self.host.wake()

    def now(self) -> int:
        """Nanoseconds since the start of the run."""
        return self.host.now() - self.origin_ns

    def _admit(self) -> bool:
        arrived = [] if self.stopping else self.source.due(self.now())
        if arrived:
            self.host.call("admit", self._take_in, arrived, size=len(arrived))
        return bool(arrived)

    def _take_in(self, arrived: list[Request]) -> None:
        self.inbox.extend(arrived)
        for request in arrived:
            self.timings[request.id] = Timing(request.arrival_ns)

    def _start_preprocessing(self) -> bool:
        """Hand chunks to idle workers; with no workers, do one chunk here and now."""
        started = False
        while self.inbox and not self.stopping and self.jobs < max(self.settings.workers, 1):
            chunk = [self.inbox.popleft() for _ in range(min(self.settings.chunk, len(self.inbox)))]
            args = (chunk, self.pipeline.keys, self.pipeline.model.tokenize)
            self.hooks.fire("preprocess", "begin", len(chunk))
            self.jobs += 1
            started = True
            if self.pool is None:
                self._prepared(chunk, self.host.call("preprocess", preprocess, *args, size=len(chunk)))
                break
            job = self.pool.submit("preprocess", preprocess, *args, size=len(chunk))
            self.waiting[job] = lambda wait, chunk=chunk: self._prepared(chunk, wait.result())  # type: ignore[misc]
        return started

    def _prepared(self, chunk: list[Request], outcomes: list[Prepared | Rejected]) -> None:
        self.jobs -= 1
        self.hooks.fire("preprocess", "end", len(chunk))
        self.host.call("enqueue", self._enqueue, chunk, outcomes, self.now(), size=len(chunk))

    def _enqueue(self, chunk: list[Request], outcomes: list[Prepared | Rejected], now: int) -> None:
        """Requests join the queue; what was rejected has its answer now."""
        for request, outcome in zip(chunk, outcomes, strict=True):
            if isinstance(outcome, Rejected):
                self._finished(request, outcome, now)
            else:
                self.timings[request.id].prepared_ns = now
                self.batcher.add(outcome, now)

    def _start_batches(self) -> bool:
        """While there is a slot free and a batch ready, start that batch's life in that slot."""
        started = False
        while self.slots and not self.stopping and self.batcher.ready(self.now(), self._no_more()):
            self.hooks.fire("batch", "begin", len(self.batcher))
            batch = self.host.call("batch", self._form_batch, self.now(), size=len(self.batcher))
            self.hooks.fire("batch", "end", len(batch), batch.number)
            slot = self.slots.popleft()
            self._advance(self._life(batch, slot), batch, slot)
            started = True
        return started

    def _form_batch(self, now: int) -> Batch:
        batch = self.batcher.take(now)
        for item in batch.items:
            timing = self.timings[item.request.id]
            timing.batched_ns, timing.batch = batch.formed_ns, batch.number
        return batch

    def _life(self, batch: Batch, slot: Slot) -> Generator[Event, None, None]:
        """A batch, from padding to answers. Each `yield` gives the host back until the event is done."""
        what, back = self.pipeline.payload, self.pipeline.returns
        shape = (len(batch), *what.row(batch.length))
        padded = slot.host_in.view(*shape)
        self.hooks.fire("transfer", "begin", len(batch), batch.number)
        size = what.items(len(batch), batch.length)
        self.host.call(f"pad_{what.name}", what.fill, padded.write(), batch, size=size, batch=batch.number)
        copy_in(slot, shape, batch)
        self.hooks.fire("kernels", "begin", len(batch), batch.number)
        result, shape = run_kernels(slot, self.kernels, what, back, batch)
        copy_out(slot, result, shape, batch)
        yield slot.stream.record()
        self.hooks.fire("kernels", "end", len(batch), batch.number)
        self.hooks.fire("transfer", "end", len(batch), batch.number)
        self.hooks.fire("postprocess", "begin", len(batch), batch.number)
        arrived = slot.host_out.view(*shape).read()
        self._respond(batch, arrived)
        self.hooks.fire("postprocess", "end", len(batch), batch.number)

    def _respond(self, batch: Batch, result: Any) -> None:
        model, back = self.pipeline.model, self.pipeline.returns.name
        stage = "postprocess" if back == "topk" else f"postprocess_{back}"
        answers = self.host.call(
            stage,
            postprocess,
            batch,
            result,
            back,
            model.knowledge,
            model.trained and self.pipeline.payload.trained and self.device.values,
            size=len(batch),
            batch=batch.number,
        )
        self.host.call(
            "session_write", self.pipeline.sessions.write, answers, size=len(batch), batch=batch.number
        )
        self.host.call(
            "respond", self._answered, batch, answers, self.now(), size=len(batch), batch=batch.number
        )

    def _answered(self, batch: Batch, answers: Sequence[Answer], now: int) -> None:
        for item, answer in zip(batch.items, answers, strict=True):
            self._finished(item.request, answer, now)

    def _advance(self, life: Generator[Event, None, None], batch: Batch, slot: Slot) -> None:
        """Run a batch's life to its next `yield`, or to its end, which frees the slot."""
        try:
            event = next(life)
        except StopIteration:
            self.slots.append(slot)
        except Exception as error:
            self._fail(batch, slot, error)
        else:
            self.waiting[event] = lambda wait: self._resume(wait, life, batch, slot)

    def _resume(self, wait: Wait, life: Generator[Event, None, None], batch: Batch, slot: Slot) -> None:
        try:
            wait.result()
        except Exception as error:
            self._fail(batch, slot, error)
        else:
            self._advance(life, batch, slot)

    def _fail(self, batch: Batch, slot: Slot, error: Exception) -> None:
        """One batch failed: its requests are told so, and the slot is used again only once its
        stream is idle, since a copy may still be under way in its buffers."""
        with suppress(Exception):  # the same failure, reported once already
            slot.stream.synchronize()
        now = self.now()
        for item in batch.items:
            self._finished(item.request, Failed(item.request.id, f"{type(error).__name__}: {error}"), now)
        self.slots.append(slot)

    def _finished(self, request: Request, output: Answer | Rejected | Failed, now: int) -> None:
        self.outputs[request.id] = output
        self.timings[request.id].done_ns = now
        self.source.finished(request, now)

    # -- what to wait for --------------------------------------------------------------

    def _no_more(self) -> bool:
        """Nobody else can join a batch, so waiting for company is in vain."""
        return not (self.source.open() or self.inbox or self.jobs)

    def _served_all(self) -> bool:
        if self.stopping:
            return not self.waiting
        return self._no_more() and not self.waiting and not self.batcher

    def _until(self) -> int | None:
        """The next moment at which something can be done without anything being finished.

        A deadline that cannot act (no slot is free) is left out, or the loop would spin.
        """
        moments = []
        if not self.stopping:
            if (arrival := self.source.next_ns()) is not None:
                moments.append(arrival)
            if self.slots and (deadline := self.batcher.deadline_ns()) is not None:
                moments.append(deadline)
        return self.origin_ns + min(moments) if moments else None

    # -- before and after --------------------------------------------------------------

    def _warm_up(self) -> None:
        """Run one small batch through every slot: first use compiles kernels and makes pools,
        which is not what a run is about. It comes before the clock of the run starts."""
        request = Request(0, b"", 0, "")
        text = "Is the kettle warm?"
        item = Prepared(request, text, self.pipeline.model.tokenize([text])[0])
        for slot in self.slots:
            batch = Batcher(1, 0)
            batch.add(item, 0)
            self._warm_slot(batch.take(0), slot)

    def _warm_slot(self, batch: Batch, slot: Slot) -> None:
        what, back = self.pipeline.payload, self.pipeline.returns
        shape = (len(batch), *what.row(batch.length))
        what.fill(slot.host_in.view(*shape).write(), batch)
        copy_in(slot, shape, batch)
        result, shape = run_kernels(slot, self.kernels, what, back, batch)
        copy_out(slot, result, shape, batch)
        slot.stream.synchronize()

    def close(self) -> None:
        """Give back the workers."""
        self.over = True
        if self.pool is not None:
            self.pool.close()

    def finish(self) -> Run:
        """The run, with all that the device has to tell."""
        self.device.collect()
        return self.result()

    def _meta(self) -> dict[str, Any]:
        """What a trace has to say of its run, so that it can be compared with another."""
        answers = sum(isinstance(output, Answer) for output in list(self.outputs.values()))
        requests = noted(dict(self.timings))
        return {
            "settings": asdict(self.settings),
            "load": self.load.label,
            "answers": answers,
            "requests": requests,
        }

    def result(self) -> Run:
        """The run as far as it is known now; may be called from any thread."""
        spans = self.host.recorder.since(self.first_span)
        notes = self.host.recorder.notes[self.first_note :]
        trace = Trace.from_spans(
            spans,
            self.device.source,
            self.device.name,
            self.device.meta() | self._meta() | ({"incomplete": notes} if notes else {}),
            origin_ns=self.origin_ns,
            first_op=self.first_op,
        )
        unserved = [] if not self.stopping else [*self.inbox, *(i.request for _, i in self.batcher.queue)]
        return Run(
            self.settings,
            dict(self.outputs),
            {i: t for i, t in list(self.timings.items()) if i in self.outputs},
            trace,
            tuple(unserved),
            tuple(self.hooks.errors),
            Origin(self.pipeline.model, self.pipeline.keys, self.load, self.device.profile),
        )


def _refuse_a_second(device: Device) -> None:
    """Raise where the device's host runs a loop already."""
    if any(loop.host is device.host and not loop.over for loop in tuple(_begun)):
        raise InputError(
            f"{device.name} serves a run already. Stop that one first (live.stop()), or open another device."
        )
