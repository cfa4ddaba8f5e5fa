"""The physics of a simulated GPU: when an op that the host has submitted starts and ends.

Two copy engines, one a direction; a link whose directions slow each other down; and the
multiprocessors, in ``occupancy.py``. None of it knows the host's code: an :class:`Op` comes in
with what it has to wait for, and is handed back at its end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from heterolab.device.occupancy import Sms
from heterolab.device.op import Op
from heterolab.device.profile import Compute, Copies
from heterolab.device.simhost import BEGIN, END, Agenda, Processor
from heterolab.trace.trace import D2H, H2D, KERNEL, NONE


class Gpu:
    """All engines of one device, and the ops on their way through them."""

    def __init__(
        self,
        agenda: Agenda,
        copies: Copies,
        compute: Compute,
        host_cpu: Processor,
        ended: Callable[[Op], None],
    ) -> None:
        self.agenda, self._ended = agenda, ended
        self._cpu, self._gil = host_cpu, compute.on_host_gil
        self.link = Link(agenda, copies)
        self.engines = {kind: CopyEngine(self, copies.channels) for kind in (H2D, D2H)}
        self.sms = Sms(agenda, compute, self._run, self.end)

    def submit(self, op: Op) -> None:
        """The host has enqueued `op`; its dependencies are named already."""
        if op.kind != KERNEL:
            self.engines[op.kind].queue(op)
        if not op.unmet:
            self.agenda.at(op.ready_ns, BEGIN, self._arrive, op)

    def _arrive(self, op: Op) -> None:
        op.ready = True
        if op.kind == KERNEL:
            self.sms.arrive(op)
        else:
            self.engines[op.kind].go_on()

    def _run(self, op: Op, ns: float, finish: Callable[[], None]) -> None:
        """Blocks of a kernel have been placed: they take `ns`, more where they share something."""
        now = self.agenda.now
        if self._gil is not None:
            self._cpu.start(now, ns, self._gil, self._gil, finish)
        elif op.on_link:
            self.link.start(
                Transfer(H2D, ns, self.link.costs.mapped_share, self.link.costs.both_speed, finish)
            )
        else:
            self.agenda.at(now + round(ns), END, finish)

    def transfer(self, op: Op, finish: Callable[[], None]) -> None:
        """A copy begins."""
        if self._gil is not None:
            self._cpu.start(self.agenda.now, op.work_ns, 0.0, 0.0, finish)
            return
        costs = self.link.costs
        weight = max(1 - costs.mapped_share, 0.01)
        self.link.start(Transfer(op.kind, op.work_ns, weight, costs.both_at(op.nbytes), finish))

    def end(self, op: Op) -> None:
        """`op` has ended now: its effect, and the ops that waited for it."""
        op.end_ns, op.done = self.agenda.now, True
        self._ended(op)
        for other, gap_ns in op.dependents:
            other.met(op, gap_ns)
            other.unmet -= 1
            if not other.unmet:
                self.agenda.at(other.ready_ns, BEGIN, self._arrive, other)
        op.dependents = []


class Transfer:
    """Bytes on the link: what is left of it, in ns at full speed, and how fast it goes."""

    __slots__ = ("beside", "direction", "end_ns", "finish", "left_ns", "speed", "weight")

    def __init__(
        self, direction: str, left_ns: float, weight: float, beside: float, finish: Callable[[], None]
    ) -> None:
        self.direction, self.left_ns, self.weight = direction, left_ns, weight
        self.beside = beside  # its speed while the other direction runs as well
        self.finish = finish
        self.speed, self.end_ns = 0.0, -1


class Link:
    """The link between host and device. Both directions at once slow each other down, and
    what goes in the same direction (a copy, and a kernel that reads host memory) shares it."""

    def __init__(self, agenda: Agenda, copies: Copies) -> None:
        self.agenda, self.costs = agenda, copies
        self.transfers: list[Transfer] = []
        self._settled_ns = 0

    def start(self, transfer: Transfer) -> None:
        self._settle()
        self.transfers.append(transfer)
        self._share()

    def _settle(self) -> None:
        """Take off what each transfer has done since the last change."""
        now = self.agenda.now
        for transfer in self.transfers:
            transfer.left_ns -= (now - self._settled_ns) * transfer.speed
        self._settled_ns = now

    def _share(self) -> None:
        """Give each transfer its speed; where that is new, another end."""
        now = self.agenda.now
        for transfer in self.transfers:
            speed = self._speed(transfer)
            if speed != transfer.speed:
                transfer.speed = speed
                transfer.end_ns = now + max(0, round(transfer.left_ns / speed))
                self.agenda.at(transfer.end_ns, END, self._end, transfer)

    def _speed(self, mine: Transfer) -> float:
        if len(self.transfers) == 1:
            return 1.0
        beside = sum(t.weight for t in self.transfers if t.direction == mine.direction)
        speed = mine.weight / beside
        if any(t.direction != mine.direction for t in self.transfers):
            speed *= mine.beside
        return speed

    def _end(self, transfer: Transfer) -> None:
        if transfer.end_ns != self.agenda.now or transfer not in self.transfers:
            return  # its speed has changed since: it has another end
        self._settle()
        self.transfers.remove(transfer)
        self._share()
        transfer.finish()


class CopyEngine:
    """Copies of one direction, one at a time, fed by a few channels.

    A channel is first in, first out, in the order in which the host issued: a copy that is not
    ready holds up those behind it. The engine stays with a channel while it can.
    """

    def __init__(self, gpu: Gpu, channels: int) -> None:
        self.gpu = gpu
        self.channels: list[deque[Op]] = [deque() for _ in range(channels)]
        self.current = self.channels[0]
        self.running: Op | None = None
        self.last = NONE  # the op that ended last

    def queue(self, op: Op) -> None:
        self.channels[op.stream % len(self.channels)].append(op)

    def go_on(self) -> None:
        """Start the next copy, if the engine is free and one is ready."""
        if self.running is None and (op := self._next()) is not None:
            now = self.gpu.agenda.now
            if now > op.ready_ns:
                op.after = self.last
            self.running, op.start_ns = op, now
            self.gpu.transfer(op, self._moved)

    def _next(self) -> Op | None:
        if not (self.current and self.current[0].ready):
            ready = [channel for channel in self.channels if channel and channel[0].ready]
            if not ready:
                return None
            self.current = min(ready, key=lambda channel: (channel[0].ready_ns, channel[0].number))
        return self.current.popleft()

    def _moved(self) -> None:
        """The bytes are there; a copy that the host feeds piece by piece may take longer."""
        op = self.running
        assert op is not None
        if self.gpu.agenda.now < op.not_before_ns:
            self.gpu.agenda.at(op.not_before_ns, END, self._end, op)
        else:
            self._end(op)

    def _end(self, op: Op) -> None:
        self.running, self.last = None, op.number
        self.gpu.end(op)
        self.go_on()
