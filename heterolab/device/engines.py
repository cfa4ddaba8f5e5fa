"""The physics of a simulated GPU: when an op that the host has submitted starts and ends.

Two copy engines, one a direction; a link whose directions slow each other down; and the
multiprocessors, in ``occupancy.py``. None of it knows the host's code: an :class:`Op` comes in
with what it has to wait for, and is handed back at its end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from heterolab.device.agenda import BEGIN, END, Agenda
from heterolab.device.failures import Failure
from heterolab.device.occupancy import Sms
from heterolab.device.op import Op
from heterolab.device.physics import Physics
from heterolab.device.processor import Processor
from heterolab.device.profile import Copies
from heterolab.trace.trace import D2H, H2D, KERNEL, NONE

#: A composite that the host launches more slowly than the GPU works is drawn as so many pulses.
PULSES = 12
_LANES = {H2D: "h2d", D2H: "d2h", KERNEL: "gpu"}


class Gpu:
    """All engines of one device, and the ops on their way through them.

    Parameters
    ----------
    index
        The device's index in the run.
    physics
        The device's costs and rules.
    rows
        Where the spans of ops that have ended are written.
    effect
        Called with an op that has ended and has an effect on memory, or whose stream is in `failed`.
    """

    def __init__(
        self,
        index: int,
        agenda: Agenda,
        physics: Physics,
        host_cpu: Processor,
        rows: list[Any],
        effect: Callable[[Op], None],
    ) -> None:
        self.index, self.agenda, self._rows, self._effect = index, agenda, rows, effect
        compute, copies = physics.profile.compute, physics.profile.copies
        self._cpu, self._gil = host_cpu, compute.on_host_gil
        self.failed: dict[int, list[Failure]] = {}  # by stream: what nobody was told of yet
        self.link = Link(agenda, copies)
        engine = CopyEngine if physics.one_engine else CopiesAtOnce
        self.copying = {kind: engine(self, physics, kind) for kind in (H2D, D2H)}
        self.sms = Sms(agenda, compute, self.shared, self.end)
        self._arrive = {H2D: self.copying[H2D].arrive, D2H: self.copying[D2H].arrive, KERNEL: self.sms.arrive}

    def submit(self, op: Op) -> None:
        """The host has enqueued `op`; its dependencies are named already."""
        kind = op.kind
        if kind != KERNEL:
            channels = self.copying[kind].channels
            channels[op.stream % len(channels)].append(op)
        if not op.unmet:
            self.agenda.at(op.ready_ns, BEGIN, self._arrive[kind], op)

    def shared(self, op: Op, ns: float, finish: Callable[[], None]) -> None:
        """Something of `op` begins that takes `ns` alone, and shares the host's cores or the link."""
        if self._gil is not None:
            gil = self._gil if op.kind == KERNEL else 0.0
            self._cpu.start(self.agenda.now, ns, gil, gil, finish)
        else:
            self.link.start(Transfer(H2D, self.link.costs.mapped_share, finish), ns)

    def end(self, op: Op) -> None:
        """`op` has ended now: its effect, its span, and the ops that waited for it."""
        op.end_ns = now = self.agenda.now
        op.done = True
        if op.effect is not None or op.stream in self.failed:
            self._effect(op)
        number, kind, name, stream, after = op.number, op.kind, op.name, op.stream, op.after
        lane, device, nbytes, batch = _LANES[kind], self.index, op.nbytes, op.batch
        for queued, start, end in _pulses(op) if op.launches > 1 else ((op.queued_ns, op.start_ns, now),):
            row = (number, kind, name, lane, stream, device, queued, start, end, nbytes, batch, after)
            self._rows.append(row)
        if op.then is not None:
            self._let_go(op.then, now + op.then_gap_ns, number)
            op.then = None
        if op.others is not None:
            for other, gap_ns in op.others:
                self._let_go(other, now + gap_ns, number)
            op.others = None

    def _let_go(self, op: Op, at_ns: int, number: int) -> None:
        """What `op` waited for has ended, and lets it start from `at_ns` on."""
        if at_ns > op.ready_ns:
            op.ready_ns, op.after = at_ns, number
        op.unmet -= 1
        if not op.unmet:
            self.agenda.at(op.ready_ns, BEGIN, self._arrive[op.kind], op)


def _pulses(op: Op) -> list[tuple[int, int, int]]:
    """(queued, start, end) of each span of an op of several launches: one, as a rule.

    An eager forward pass is hundreds of kernels. When the GPU does each of them faster than the
    host launches the next, it idles between them; the spans show how much, as a few pulses that
    together last as long as the kernels' work.
    """
    duration = op.end_ns - op.start_ns
    count = min(op.launches, PULSES)
    launches_set_the_end = op.end_ns <= op.not_before_ns
    if not launches_set_the_end or duration < 1.05 * op.launched_ns:
        return [(op.queued_ns, op.start_ns, op.end_ns)]
    length = round(op.launched_ns / count)
    starts = [op.start_ns + (duration - length) * i // (count - 1) for i in range(count)]
    return [(start if i else op.queued_ns, start, start + length) for i, start in enumerate(starts)]


class Transfer:
    """Bytes on the link: what is left of them, in ns at full speed, and how fast they go.

    `weight`: its part of the link beside others in its direction; `nbytes`: on which depends
    how much the other direction slows it (0: a kernel's reads); `turn`: how often it was started,
    for a copy engine is one transfer, again and again.
    """

    def __init__(self, direction: str, weight: float, finish: Callable[[], None]) -> None:
        self.direction, self.weight, self.finish = direction, weight, finish
        self.left_ns = self.speed = 0.0
        self.end_ns = self.nbytes = self.turn = 0


class Link:
    """The link between host and device. Both directions at once slow each other down, and
    what goes in the same direction (a copy, and a kernel that reads host memory) shares it."""

    def __init__(self, agenda: Agenda, copies: Copies) -> None:
        self.agenda, self.costs = agenda, copies
        self.transfers: list[Transfer] = []
        self._ends = self._end  # a method that is looked up once
        self._settled_ns = 0

    def start(self, transfer: Transfer, ns: float, nbytes: int = 0) -> None:
        """`transfer` begins, which takes `ns` alone."""
        transfer.left_ns, transfer.nbytes = ns, nbytes
        transfer.turn += 1
        if self.transfers:
            transfer.speed = 0.0
            self._settle()
            self.transfers.append(transfer)
            self._share()
        else:  # as a rule: it has the link to itself
            self._settled_ns = now = self.agenda.now
            self.transfers.append(transfer)
            transfer.speed, transfer.end_ns = 1.0, now + round(ns)
            self.agenda.at(transfer.end_ns, END, self._ends, transfer, transfer.turn)

    def _settle(self) -> None:
        """Take off what each transfer has done since the last change."""
        now = self.agenda.now
        passed = now - self._settled_ns
        for transfer in self.transfers:
            transfer.left_ns -= passed * transfer.speed
        self._settled_ns = now

    def _share(self) -> None:
        """Give each transfer its speed; where that is new, another end."""
        now = self.agenda.now
        for transfer in self.transfers:
            speed = self._speed(transfer)
            if speed != transfer.speed:
                transfer.speed = speed
                transfer.end_ns = now + max(0, round(transfer.left_ns / speed))
                self.agenda.at(transfer.end_ns, END, self._ends, transfer, transfer.turn)

    def _speed(self, mine: Transfer) -> float:
        speed = 1.0
        if len(self.transfers) > 1:
            beside, alone = 0.0, True
            for other in self.transfers:
                if other.direction == mine.direction:
                    beside += other.weight
                else:
                    alone = False
            speed = mine.weight / beside
            if not alone:
                speed *= self.costs.both_at(mine.nbytes)
        return speed

    def _end(self, transfer: Transfer, turn: int) -> None:
        if turn != transfer.turn or transfer.end_ns != self.agenda.now or transfer not in self.transfers:
            return  # its speed has changed since: it has another end
        if len(self.transfers) == 1:
            self.transfers.clear()
        else:
            self._settle()
            self.transfers.remove(transfer)
            self._share()
        transfer.finish()


class CopyEngine(Transfer):
    """Copies of one direction, one at a time, fed by a few channels.

    A channel is first in, first out, in the order in which the host issued: a copy that is not
    ready holds up those behind it. The engine stays with a channel while it can.
    """

    def __init__(self, gpu: Gpu, physics: Physics, direction: str) -> None:
        profile = physics.profile
        beside_a_kernel = max(1 - profile.copies.mapped_share, 0.01)
        super().__init__(direction, beside_a_kernel, self._moved)
        self.gpu, self.agenda, self.link = gpu, gpu.agenda, gpu.link
        # Without channels to share, each stream has one of its own, and the engine stays with none.
        channels = profile.copies.channels if physics.channels else profile.limits.streams + 1
        self.channels: list[deque[Op]] = [deque() for _ in range(channels)]
        self._stays = physics.channels
        self.current: deque[Op] = deque()
        self.running: Op | None = None
        self.last = NONE  # the op that ended last
        self._on_host = profile.compute.on_host_gil is not None

    def arrive(self, op: Op) -> None:
        """A copy is ready: it starts if the engine is free and comes to it."""
        if op.faults is not None:
            op.work_ns = op.faults()
        op.ready = True
        if self.running is None:
            self._go_on()

    def _go_on(self) -> None:
        """The engine is free: start the next copy, if one is ready."""
        channel = self.current
        if not (channel and channel[0].ready):
            ready = [channel for channel in self.channels if channel and channel[0].ready]
            if not ready:
                return
            channel = ready[0]
            if len(ready) > 1:
                channel = min(ready, key=lambda channel: (channel[0].ready_ns, channel[0].number))
            if self._stays:
                self.current = channel
        op, now = channel.popleft(), self.agenda.now
        if now > op.ready_ns:
            op.after = self.last
        self.running, op.start_ns = op, now
        if self._on_host:
            self.gpu.shared(op, op.work_ns, self._moved)
        else:
            self.link.start(self, op.work_ns, op.nbytes)

    def _moved(self) -> None:
        """The bytes are there; a copy that the host feeds piece by piece may take longer."""
        op = self.running
        assert op is not None
        if self.agenda.now < op.not_before_ns:
            self.agenda.at(op.not_before_ns, END, self._moved)
            return
        self.running, self.last = None, op.number
        self.gpu.end(op)
        if self.running is None:
            self._go_on()


class CopiesAtOnce(CopyEngine):
    """What there is without `one_engine_a_direction`: each copy starts when it is ready."""

    def __init__(self, gpu: Gpu, physics: Physics, direction: str) -> None:
        super().__init__(gpu, physics, direction)
        self.channels = [deque(maxlen=0)]  # nothing queues

    def arrive(self, op: Op) -> None:
        if op.faults is not None:
            op.work_ns = op.faults()
        op.start_ns = self.agenda.now
        finish = partial(self._arrived, op)
        if self._on_host:
            self.gpu.shared(op, op.work_ns, finish)
        else:
            self.link.start(Transfer(op.kind, self.weight, finish), op.work_ns, op.nbytes)

    def _arrived(self, op: Op) -> None:
        if self.agenda.now < op.not_before_ns:
            self.agenda.at(op.not_before_ns, END, self.gpu.end, op)
        else:
            self.gpu.end(op)
