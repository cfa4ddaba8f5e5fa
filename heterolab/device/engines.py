"""The physics of a simulated GPU: when an op that the host has submitted starts and ends.

Two copy engines, one a direction; a link whose directions slow each other down; streaming
multiprocessors (SMs) on which kernels place their blocks. None of it knows the host's code:
an :class:`Op` comes in with what it has to wait for, and is called back at its end.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable

from heterolab.device.base import Work
from heterolab.device.profile import Compute, Copies, Gaps
from heterolab.device.simhost import BEGIN, END, Agenda
from heterolab.trace.trace import D2H, H2D, KERNEL, NONE

#: A kernel's blocks are placed in at most so many rounds; finer ones change nothing that shows.
MAX_WAVES = 8


class Op:
    """One copy or kernel on its way through the device.

    It is *ready* once the host has submitted it, and everything it depends on has ended and
    the gap behind that has passed. Then its engine starts it when there is room.
    """

    __slots__ = (
        "after",
        "batch",
        "blocks",
        "channel",
        "dependents",
        "done",
        "effect",
        "end_ns",
        "error",
        "kind",
        "name",
        "nbytes",
        "not_before_ns",
        "number",
        "on_link",
        "per_block",
        "queued_ns",
        "ready",
        "ready_ns",
        "start_ns",
        "stream",
        "threads",
        "told",
        "unmet",
        "work_ns",
    )

    def __init__(self, number: int, kind: str, name: str, stream: int, nbytes: int, batch: int) -> None:
        self.number, self.kind, self.name = number, kind, name
        self.stream, self.nbytes, self.batch = stream, nbytes, batch
        self.work_ns = 0.0  # how long it takes on an idle device ...
        self.per_block = False  # ... or each of its blocks
        self.queued_ns = 0
        self.not_before_ns = 0  # it cannot end before: the host is still feeding it
        self.ready_ns, self.after = 0, NONE  # when it may start, and the op that decided that
        self.unmet = 0  # how many of those it waits for have not ended
        self.dependents: list[tuple[Op, float]] = []
        self.ready = self.done = False
        self.start_ns = self.end_ns = 0
        self.channel = 0
        self.on_link = False  # a kernel that reads host memory
        self.blocks, self.threads = 0, 0
        self.effect: Callable[[], None] | None = None
        self.error: BaseException | None = None
        self.told: object = None

    def needs(self, other: Op, gap_ns: float) -> None:
        """Start only `gap_ns` after `other` has ended."""
        if other.done:
            self.met(other, gap_ns)
        else:
            self.unmet += 1
            other.dependents.append((self, gap_ns))

    def met(self, other: Op, gap_ns: float) -> None:
        """`other` has ended: that may be what this op had to wait for."""
        at = other.end_ns + round(gap_ns)
        if at > self.ready_ns:
            self.ready_ns, self.after = at, other.number


def gap_between(gaps: Gaps, first: Op, then: Op) -> float:
    """The shortest pause between two ops of one stream."""
    if first.kind == KERNEL:
        return gaps.kernel_kernel_ns if then.kind == KERNEL else gaps.kernel_copy_ns
    if then.kind == KERNEL:
        return gaps.copy_kernel_ns
    return gaps.copy_copy_ns if first.kind == then.kind else gaps.turn_ns


class Gpu:
    """All engines of one device, and the ops on their way through them."""

    def __init__(self, agenda: Agenda, copies: Copies, compute: Compute, ended: Callable[[Op], None]) -> None:
        self.agenda, self._ended = agenda, ended
        self.link = Link(agenda, copies)
        self.copies = {kind: CopyEngine(self, kind, copies) for kind in (H2D, D2H)}
        self.sms = Sms(self, compute)

    def submit(self, op: Op) -> None:
        """The host has enqueued `op`; its dependencies are named already."""
        if op.kind != KERNEL:
            self.copies[op.kind].queue(op)
        if not op.unmet:
            self._wait_for(op)

    def _wait_for(self, op: Op) -> None:
        self.agenda.at(op.ready_ns, BEGIN, lambda: self._arrive(op))

    def _arrive(self, op: Op) -> None:
        op.ready = True
        if op.kind == KERNEL:
            self.sms.arrive(op)
        else:
            self.copies[op.kind].go_on()

    def end(self, op: Op) -> None:
        """`op` has ended now: its effect, and the ops that waited for it."""
        op.end_ns, op.done = self.agenda.now, True
        self._ended(op)
        for other, gap_ns in op.dependents:
            other.met(op, gap_ns)
            other.unmet -= 1
            if not other.unmet:
                self._wait_for(other)
        op.dependents = []


class Transfer:
    """Bytes on the link: what is left of it, in ns at full speed, and its speed now."""

    __slots__ = ("direction", "finish", "large", "left_ns", "speed", "version")

    def __init__(self, direction: str, left_ns: float, large: bool, finish: Callable[[], None]) -> None:
        self.direction, self.left_ns, self.large, self.finish = direction, left_ns, large, finish
        self.speed, self.version = 1.0, 0


class Link:
    """The link between host and device. Both directions at once slow each other down, and
    what shares a direction (a copy, and a kernel that reads host memory) halves it."""

    def __init__(self, agenda: Agenda, copies: Copies) -> None:
        self.agenda, self.copies = agenda, copies
        self.transfers: list[Transfer] = []
        self._settled_ns = 0

    def start(self, transfer: Transfer) -> None:
        self._settle()
        self.transfers.append(transfer)
        self._share(transfer)

    def _settle(self) -> None:
        now = self.agenda.now
        for transfer in self.transfers:
            transfer.left_ns -= (now - self._settled_ns) * transfer.speed
        self._settled_ns = now

    def _share(self, new: Transfer | None = None) -> None:
        """Give each transfer its speed; where it has changed, another end."""
        for transfer in self.transfers:
            speed = self._speed(transfer)
            if transfer is new or speed != transfer.speed:
                transfer.speed = speed
                transfer.version += 1
                self._schedule(transfer, transfer.version)

    def _speed(self, transfer: Transfer) -> float:
        beside = sum(t.direction == transfer.direction for t in self.transfers)
        if beside == len(self.transfers):
            return 1 / beside
        both = self.copies.both_large_speed if transfer.large else self.copies.both_speed
        return both / beside

    def _schedule(self, transfer: Transfer, version: int) -> None:
        end = self.agenda.now + max(0, round(transfer.left_ns / transfer.speed))

        def finish() -> None:
            if transfer.version == version:
                self._settle()
                self.transfers.remove(transfer)
                self._share()
                transfer.finish()

        self.agenda.at(end, END, finish)


class CopyEngine:
    """Copies of one direction, one at a time, fed by a few channels.

    A channel is first in, first out, in the order in which the host issued: a copy that is not
    ready holds up those behind it. The engine stays with a channel while it can.
    """

    def __init__(self, gpu: Gpu, kind: str, copies: Copies) -> None:
        self.gpu, self.kind, self.costs = gpu, kind, copies
        self.channels: list[deque[Op]] = [deque() for _ in range(copies.channels)]
        self.current = 0
        self.free_ns = 0
        self.running: Op | None = None

    def queue(self, op: Op) -> None:
        self.channels[op.channel % len(self.channels)].append(op)

    def go_on(self) -> None:
        """Start the next copy, if the engine is free and one is ready."""
        now = self.gpu.agenda.now
        if self.running is not None or now < self.free_ns:
            return
        op = self._next()
        if op is not None:
            self._start(op, now)

    def _next(self) -> Op | None:
        queue = self.channels[self.current]
        if queue and queue[0].ready:
            return queue.popleft()
        heads = [(c[0].ready_ns, c[0].number, i) for i, c in enumerate(self.channels) if c and c[0].ready]
        if not heads:
            return None
        self.current = min(heads)[2]
        return self.channels[self.current].popleft()

    def _start(self, op: Op, now: int) -> None:
        self.running, op.start_ns = op, now
        large = op.nbytes > self.costs.both_large_bytes
        self.gpu.link.start(Transfer(self.kind, op.work_ns, large, lambda: self._moved(op)))

    def _moved(self, op: Op) -> None:
        """The bytes are there; a copy that the host feeds piece by piece may take longer."""
        agenda = self.gpu.agenda
        if agenda.now < op.not_before_ns:
            agenda.at(op.not_before_ns, END, lambda: self._finish(op))
        else:
            self._finish(op)

    def _finish(self, op: Op) -> None:
        self.running = None
        self.gpu.end(op)
        self.go_on()


class Wave:
    """Blocks of one kernel that were placed together, and end together."""

    __slots__ = ("op", "per_sm", "threads")

    def __init__(self, op: Op, per_sm: list[int], threads: int) -> None:
        self.op, self.per_sm, self.threads = op, per_sm, threads


class Sms:
    """The streaming multiprocessors, and the line of kernels that have blocks left to place.

    Only the kernel at the head of the line places blocks, on the emptiest SM first; the next
    one begins once all of its blocks are placed. Blocks that are placed together run together.
    """

    def __init__(self, gpu: Gpu, compute: Compute) -> None:
        self.gpu, self.costs = gpu, compute
        self.line: deque[Op] = deque()
        self.left: dict[Op, int] = {}  # blocks still to be placed
        self.running: dict[Op, int] = {}  # waves that have not ended
        self.threads = [compute.threads_per_sm] * compute.sms
        self.slots = [compute.blocks_per_sm] * compute.sms

    def arrive(self, op: Op) -> None:
        """A kernel is ready: it joins the line."""
        self._grid(op)
        blocks = op.blocks
        self.left[op] = blocks
        self.line.append(op)
        self._place()

    def capacity(self, threads: int) -> int:
        """Blocks of `threads` that the empty device holds."""
        return self.costs.sms * self._per_sm(threads, self.costs.threads_per_sm, self.costs.blocks_per_sm)

    @staticmethod
    def _per_sm(threads: int, free_threads: int, free_slots: int) -> int:
        return min(free_threads // threads, free_slots)

    def _grid(self, op: Op) -> None:
        """Settle a kernel's grid (without one it fills the device once), and the time of a wave."""
        op.threads = threads = min(max(op.threads, 1), self.costs.threads_per_sm)
        room = self.capacity(threads)
        blocks = op.blocks or room
        waves = 1 if op.on_link else -(-blocks // room)
        rounds = min(waves, MAX_WAVES)
        if op.per_block:
            op.work_ns = (op.work_ns * waves + self.costs.fixed_ns) / rounds
        else:
            op.work_ns /= rounds
        op.blocks = blocks if waves == rounds else rounds * room
        if op.on_link:
            op.blocks = min(blocks, room)

    def _place(self) -> None:
        while self.line:
            op = self.line[0]
            if op not in self.running and len(self.running) >= self.costs.kernels:
                return
            placed = self._fill(op)
            if not placed:
                return
            self.left[op] -= placed
            if self.left[op]:
                return
            self.line.popleft()

    def _fill(self, op: Op) -> int:
        """Place as many blocks of `op` as fit, on the emptiest SMs first."""
        need, threads = self.left[op], op.threads
        room = [self._per_sm(threads, t, s) for t, s in zip(self.threads, self.slots, strict=True)]
        per_sm = room if sum(room) <= need else self._spread(need, threads, room)
        placed = sum(per_sm)
        if placed:
            self._start_wave(op, Wave(op, per_sm, threads))
        return placed

    def _spread(self, need: int, threads: int, room: list[int]) -> list[int]:
        """Block after block on the SM with the most free threads (then slots)."""
        per_sm = [0] * len(room)
        heap = [(-t, -s, i) for i, (t, s) in enumerate(zip(self.threads, self.slots, strict=True)) if room[i]]
        heapq.heapify(heap)
        for _ in range(need):
            free, slots, i = heap[0]
            per_sm[i] += 1
            if per_sm[i] < room[i]:
                heapq.heapreplace(heap, (free + threads, slots + 1, i))
            else:
                heapq.heappop(heap)
        return per_sm

    def _start_wave(self, op: Op, wave: Wave) -> None:
        now = self.gpu.agenda.now
        self._take(wave, -1)
        if op not in self.running:
            self.running[op], op.start_ns = 0, now
        self.running[op] += 1
        if op.on_link:
            self.gpu.link.start(Transfer(H2D, op.work_ns, False, lambda: self._end_wave(wave)))
        else:
            self.gpu.agenda.at(now + round(op.work_ns), END, lambda: self._end_wave(wave))

    def _take(self, wave: Wave, sign: int) -> None:
        for i, blocks in enumerate(wave.per_sm):
            if blocks:
                self.threads[i] += sign * blocks * wave.threads
                self.slots[i] += sign * blocks

    def _end_wave(self, wave: Wave) -> None:
        op, agenda = wave.op, self.gpu.agenda
        self._take(wave, +1)
        self.running[op] -= 1
        if not self.running[op] and not self.left[op]:
            if agenda.now < op.not_before_ns:
                agenda.at(op.not_before_ns, END, lambda: self._finish(op))
            else:
                self._finish(op)
                return
        self._place()

    def _finish(self, op: Op) -> None:
        del self.running[op], self.left[op]
        self.gpu.end(op)
        self._place()


def cost_of(work: Work, compute: Compute, flops_per_ns: float) -> float:
    """The time of a kernel that the profile does not know by name: the roofline."""
    arithmetic = work.flops / flops_per_ns if work.flops else 0.0
    memory = compute.memory.at(work.bytes) if work.bytes else 0.0
    return compute.fixed_ns + max(arithmetic, memory)
