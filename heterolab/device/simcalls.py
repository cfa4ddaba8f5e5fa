"""A simulated device's calls: what each costs the host, and the op that it hands to the device.

The host is inside a call for a time that the profile knows. Towards the end of it the device has
the op: from then on it is ready once all that it waits for has ended and the pause behind that
has passed. Pageable copies are different: the host itself moves the bytes.
"""

from __future__ import annotations

from math import ceil, exp
from typing import TYPE_CHECKING

from heterolab.device.base import Work
from heterolab.device.engines import Gpu
from heterolab.device.op import Op
from heterolab.device.physics import Physics
from heterolab.device.prices import roofline_ns
from heterolab.device.profile import HostCosts, Pageable
from heterolab.device.simhost import SimHost
from heterolab.trace.trace import API, H2D, NONE

if TYPE_CHECKING:
    from heterolab.device.simstream import SimStream


class Warmth:
    """How cold the host's caches are for a call, see :class:`HostCosts`."""

    def __init__(self, host: SimHost, costs: HostCosts) -> None:
        self._host, self._costs = host, costs
        #: A call → the host's work until its last, and the host's count of changes to that.
        self._before: dict[str, tuple[float, float]] = {}
        self.warm: dict[str, int] = {}

    def cold(self, call: str) -> float:
        """0 just after the same call, 1 (or more, once memory was staged) after much other work."""
        host, costs = self._host, self._costs
        if self.warm.get(call) == host.stirred:
            return 0.0
        now, last = (host.worked_ns, host.staged_bytes), self._before.get(call)
        self._before[call], self.warm[call] = now, host.stirred
        last = last or (-costs.cold_start_ns, 0.0)
        work = 1 - exp(-(now[0] - last[0]) / costs.cold_work_ns)
        return work + costs.cold_bytes_factor * (1 - exp(-(now[1] - last[1]) / costs.cold_bytes))


class Calls:
    """The host's side of one device.

    Every op takes this path, hundreds of thousands a second: sizes and kernels are priced once,
    and spans are written as plain rows (:attr:`SimRecorder.rows`).
    """

    def __init__(self, physics: Physics, index: int, host: SimHost, gpu: Gpu) -> None:
        self.index, self.host, self.gpu = index, host, gpu
        profile = self.profile = physics.profile
        self.costs = profile.seam or profile.host
        self.warmth = Warmth(host, self.costs)
        self._warm, self._rows = self.warmth.warm, host.recorder.rows
        self.next_op = host.recorder.next_op
        self.prices, self._pauses = physics.prices, physics.prices.pauses
        self._start_ns = round(self.costs.start_ns)

    # -- what an op costs -----------------------------------------------------------

    def copying(self, kind: str, stream: SimStream, nbytes: int, batch: int) -> Op:
        """A copy, priced."""
        op = Op(self.next_op(), kind, "copy", stream.index, nbytes, batch)
        op.work_ns = self.prices.copies[kind][nbytes]
        if self.host.jitter:
            op.work_ns = self.host.noisy(op.work_ns)
        return op

    def price(self, op: Op, work: Work, far: int) -> tuple[float, str, float]:
        """Price a kernel that reads or writes `far` bytes over the link: its time and grid by its
        name, else its own, else by its arithmetic and bytes.

        Gives how long the host is held for its launches: the time of a warm call, which calls keep
        it warm, and how much longer it is when cold.
        """
        profile, costs = self.profile, self.costs
        price = self.prices.kernel(op.name)
        op.blocks, op.threads, op.launches = work.blocks, work.threads, work.launches
        if work.block_ns:
            op.work_ns, op.per_block = work.block_ns, True
        elif price is not None:
            op.work_ns = price.time[work.size]
        else:
            rate = profile.flops_per_ns(work.dtype) if work.flops else 1.0
            op.work_ns = roofline_ns(work, profile.compute, rate)
        if far and profile.mapped is not None:
            over_link = profile.mapped.at(far)
            op.on_link = over_link > op.work_ns
            op.work_ns = max(op.work_ns, over_link)
        if self.host.jitter:
            op.work_ns = self.host.noisy(op.work_ns)
        if price is None or price.host is None:
            return work.launches * costs.launch_ns, "launch", costs.cold_launch_ns
        cold_ns = costs.cold_launch_ns if price.cold_host_ns is None else price.cold_host_ns
        return price.host[work.size], op.name, cold_ns

    # -- calls -------------------------------------------------------------------------

    def mark(self, call: str, warm_ns: float, stream: SimStream) -> int:
        """A call that enqueues no op (record, wait): it costs time, and has a number and a span."""
        if self._warm.get(call) != self.host.stirred:
            warm_ns += self.warmth.cold(call) * self.costs.cold_event_ns
        number = self.next_op()
        entry, exit_ns = self.host.enter(self.costs.between_ns, warm_ns)
        row = (number, API, call, "host", stream.index, self.index, entry, entry, exit_ns, 0, NONE, NONE)
        self._rows.append(row)
        return number

    def issue(self, op: Op, call: str, stream: SimStream, ns: float, warmth: str, cold_ns: float) -> int:
        """The host enqueues `op`; returns its number.

        The call takes `ns` where it was made just before, and up to `cold_ns` more where much was
        done since the last one of the same `warmth`.
        """
        host, costs = self.host, self.costs
        if self._warm.get(warmth) != host.stirred:
            ns += self.warmth.cold(warmth) * cold_ns
        op.queued_ns, exit_ns = entry, _ = host.enter(costs.between_ns, ns)
        share = costs.submit_share
        if op.launches > 1:  # the last of its launches comes at the end of the call
            share /= op.launches
            op.launched_ns = op.work_ns
            op.not_before_ns = exit_ns + round(op.work_ns / op.launches)
        self._submit(op, stream, entry + round(share * (exit_ns - entry)))
        number, batch = op.number, op.batch
        row = (number, API, call, "host", op.stream, self.index, entry, entry, exit_ns, 0, batch, NONE)
        self._rows.append(row)
        return number

    def _submit(self, op: Op, stream: SimStream, at_ns: int) -> None:
        """The device has `op` from `at_ns` on: name what it waits for, and hand it over."""
        op.ready_ns = at_ns + self._start_ns
        last, stream.last = stream.last, op
        if last is not None:
            op.needs(last, self._pauses.within[last.kind][op.kind])
        if stream.awaited:
            for other in stream.awaited:
                op.needs(other, self._pauses.event)
            stream.awaited = []
        for behind in stream.barrier:
            for other in [*behind.awaited, behind.last] if behind.last else behind.awaited:
                op.needs(other, self._pauses.legacy[other.kind][op.kind])
        self.gpu.submit(op)

    # -- copies that the host takes part in --------------------------------------------

    def issue_staged(self, op: Op, stream: SimStream, costs: Pageable) -> int:
        """H2D from pageable memory: the host copies the bytes, piece by piece, into a pinned
        buffer, and each piece goes over the link while the next one is copied."""
        host, held, over_link = self.host, self.prices.staged, self.prices.copies[H2D]
        assert held is not None
        # The table holds the bare call itself; what a cold one, or one through the seam, costs more:
        held_ns = held[op.nbytes] + self._copy_call_ns() - self.profile.host.copy_ns
        entry, exit_ns = host.enter(self.costs.between_ns, held_ns, held=True)
        host.staged(op.nbytes)
        op.queued_ns = entry
        pieces = ceil(op.nbytes / costs.chunk_bytes)
        last_piece = op.nbytes - (pieces - 1) * costs.chunk_bytes
        after_ns = over_link[last_piece]
        if pieces > 1:  # the piece before may still be on its way
            staged_ns = held[op.nbytes] - held[op.nbytes - last_piece]
            after_ns = max(after_ns, over_link[costs.chunk_bytes] - staged_ns)
        op.not_before_ns = exit_ns + round(after_ns + self.costs.start_ns)
        self._submit(op, stream, entry + round((exit_ns - entry) * min(1.0, costs.chunk_bytes / op.nbytes)))
        return self._held("copy", op, entry)

    def issue_drained(self, op: Op, stream: SimStream) -> int:
        """D2H to pageable memory: the host waits for the stream, then copies the bytes out."""
        host, held = self.host, self.prices.drained
        assert held is not None
        entry, exit_ns = host.enter(self.costs.between_ns, self._copy_call_ns(), held=True)
        op.queued_ns = entry
        self._submit(op, stream, entry + round(self.costs.submit_share * (exit_ns - entry)))
        host.sleep_until_done([op], "copy()")
        host.spend(max(0.0, held[op.nbytes] - op.work_ns))
        host.staged(op.nbytes)
        return self._held("copy", op, entry)

    def _copy_call_ns(self) -> float:
        """How long the host is inside a copy's call that does not block."""
        return self.costs.copy_ns + self.warmth.cold("copy") * self.costs.cold_copy_ns

    def _held(self, call: str, op: Op, entry: int) -> int:
        """The host comes back from a call that held it; gives the op's number."""
        self.span(op.number, API, call, op.stream, entry, op.batch)
        return op.number

    def span(self, number: int, kind: str, call: str, stream: int, entry: int, batch: int = NONE) -> None:
        """The host was in a call from `entry` until now."""
        row = (number, kind, call, "host", stream, self.index, entry, entry, self.host.now(), 0, batch, NONE)
        self._rows.append(row)
