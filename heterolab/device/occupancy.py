"""How kernels share a simulated GPU's streaming multiprocessors (SMs).

A kernel is a grid of blocks. An SM holds so many threads and so many blocks at once; a grid
that does not fit at once runs in *waves*. SMs in the same state are kept together as one
:class:`Group`, so that a kernel on an idle device costs the simulator a few steps, not 132.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from heterolab.device.agenda import END, Agenda
from heterolab.device.op import Op
from heterolab.device.profile import Compute
from heterolab.trace.trace import NONE

#: Waves that are simulated one by one; a longer grid runs in so many coarser ones.
MAX_WAVES = 64
COARSE_WAVES = 8
#: A kernel that finds this share of the room it needs goes at its full speed.
ENOUGH_ROOM = 0.5


class Group:
    """SMs in the same state: how many, what is free on each, and the blocks that run there."""

    __slots__ = ("blocks", "count", "slots", "threads")

    def __init__(self, count: int, threads: int, slots: int, blocks: dict[Wave, int]) -> None:
        self.count, self.threads, self.slots, self.blocks = count, threads, slots, blocks

    def room(self, threads: int) -> int:
        """Blocks of `threads` that each of its SMs can still take."""
        room = self.threads // threads
        return room if room < self.slots else self.slots

    def split(self, count: int) -> Group:
        """Take `count` of its SMs out as a group of their own."""
        self.count -= count
        return Group(count, self.threads, self.slots, self.blocks.copy())

    def add(self, wave: Wave, blocks: int) -> None:
        """`blocks` of `wave` begin on each of its SMs."""
        self.threads -= blocks * wave.grid.threads
        self.slots -= blocks
        self.blocks[wave] = self.blocks.get(wave, 0) + blocks


class Grid:
    """A kernel's blocks: those still to be placed, and how long a wave of them takes."""

    __slots__ = ("blocks", "later", "left", "op", "running", "started", "threads", "wave_ns", "waves")

    def __init__(self, op: Op, threads: int, blocks: int, wave_ns: float, waves: int = 1) -> None:
        self.op, self.threads, self.wave_ns, self.waves = op, threads, wave_ns, waves
        self.blocks = self.left = blocks
        self.later: tuple[int, float] | None = None  # blocks, and their time, once those have ended
        self.running = 0  # waves
        self.started = False


class Wave:
    """Blocks of one kernel that were placed together, and end together."""

    __slots__ = ("blocks", "grid")

    def __init__(self, grid: Grid, blocks: int) -> None:
        self.grid, self.blocks = grid, blocks


class Sms:
    """The multiprocessors, and the line of kernels that have blocks left to place.

    Only the kernel at the head of the line places blocks, on the emptiest SM first; the next
    one begins once all of them are placed.

    Parameters
    ----------
    run
        ``run(op, ns, finish)`` has `finish` called when blocks of `op`, which take `ns` alone,
        have ended. None: nothing outside the SMs slows them, but for kernels on the link.
    ended
        Called with each kernel at its end.
    """

    def __init__(
        self,
        agenda: Agenda,
        compute: Compute,
        run: Callable[[Op, float, Callable[[], None]], None],
        ended: Callable[[Op], None],
    ) -> None:
        self.agenda, self.costs = agenda, compute
        self._run, self._ended = run, ended
        self._ends = self._end  # a method that is looked up once
        self._by_themselves = compute.on_host_gil is None
        self._capacities: dict[int, int] = {}
        self.line: deque[Grid] = deque()
        self.kernels = 0  # that run
        self.waves = 0  # that run
        self.last = NONE  # the op that ended last
        self.groups = [self._idle(compute.sms)]
        #: A wave that has the device to itself is not placed on SMs until another kernel comes.
        self.alone: Wave | None = None

    def _idle(self, count: int) -> Group:
        return Group(count, self.costs.threads_per_sm, self.costs.blocks_per_sm, {})

    def arrive(self, op: Op) -> None:
        """A kernel is ready: once it has its pages, it joins the line."""
        if op.faults is not None:
            ns, op.faults = op.faults(), None
            if ns:
                op.start_ns = self.agenda.now
                self._run(op, ns, partial(self.arrive, op))
                return
        self.line.append(self._grid(op))
        self._place()

    def capacity(self, threads: int) -> int:
        """Blocks of `threads` that the empty device holds."""
        known = self._capacities.get(threads)
        if known is None:
            costs = self.costs
            known = costs.sms * max(1, min(costs.threads_per_sm // threads, costs.blocks_per_sm))
            self._capacities[threads] = known
        return known

    def _grid(self, op: Op) -> Grid:
        """A kernel's grid; one that does not say fills the device once."""
        threads, most = op.threads, self.costs.threads_per_sm
        if not 0 < threads <= most:
            threads = 1 if threads < 1 else most
        room = self.capacity(threads)
        blocks = op.blocks or room
        if op.on_link:  # it waits for the link, not for its turn
            return Grid(op, threads, min(blocks, room), op.work_ns)
        waves = -(-blocks // room)
        if op.per_block:
            wave_ns = op.work_ns + self.costs.fixed_ns
            if waves > MAX_WAVES:
                return Grid(op, threads, MAX_WAVES * room, wave_ns * waves / MAX_WAVES)
            return Grid(op, threads, blocks, wave_ns, waves)
        return Grid(op, threads, blocks, op.work_ns / waves, waves)

    def _plan(self, grid: Grid) -> None:
        """How the blocks of a kernel begin of which only the time of the whole is known.

        Where enough of the device is free, it goes at its full speed with the room that there is.
        A grid of many waves is then two steps for the simulator: all waves but the last, and the
        last.
        """
        room, waves = self.capacity(grid.threads), grid.waves
        free = room
        if self.kernels:
            free = sum(group.count * group.room(grid.threads) for group in self.groups)
        if free >= ENOUGH_ROOM * min(room, grid.blocks):
            grid.left = min(free, grid.blocks)
            if waves > 1:
                grid.later = grid.blocks - (waves - 1) * room, grid.wave_ns
                grid.wave_ns *= waves - 1
        elif waves > COARSE_WAVES:
            grid.left, grid.wave_ns = COARSE_WAVES * room, grid.wave_ns * waves / COARSE_WAVES

    def _place(self) -> None:
        """Let kernels place blocks, in the order of the line, until one finds no room."""
        line = self.line
        while line:
            grid = line[0]
            if not grid.started:
                if self.kernels >= self.costs.kernels:
                    return
                if self.alone is not None:  # no longer
                    self._spread(self.alone, self.alone.blocks)
                    self.alone = None
                grid.started = True
                if not grid.op.per_block and (self.kernels or grid.waves > 1):
                    self._plan(grid)
                self.kernels += 1
            if grid.left:
                self._fill(grid)
            if grid.left or grid.later:
                return
            line.popleft()

    def _fill(self, grid: Grid) -> None:
        """Start as many blocks as fit."""
        wave, op = Wave(grid, grid.left), grid.op
        if not self.waves and grid.left <= self.capacity(grid.threads):
            self.alone = wave
            grid.left = 0
        else:
            placed = self._spread(wave, grid.left)
            if not placed:
                return
            # Blocks that wait for the link end when it is through, wherever they were placed.
            grid.left = 0 if op.on_link else grid.left - placed
        now = self.agenda.now
        if op.start_ns < 0:
            op.start_ns = now
            if now > op.ready_ns:
                op.after = self.last
        grid.running += 1
        self.waves += 1
        if self._by_themselves and not op.on_link:
            self.agenda.at(now + round(grid.wave_ns), END, self._ends, wave)
        else:
            self._run(op, grid.wave_ns, partial(self._end, wave))

    def _spread(self, wave: Wave, blocks: int) -> int:
        """Place as many of the blocks as fit, one after the other on the emptiest SM; how many did."""
        need, threads, groups = blocks, wave.grid.threads, self.groups
        while need:
            # The group with the most room that still takes a block, and the most room elsewhere.
            best, most, slots, others = None, threads - 1, self.costs.blocks_per_sm, -1
            for group in groups:
                free = group.threads
                if (free > most or (free == most and group.slots > slots)) and group.slots:
                    if best is not None and most > others:
                        others = most
                    best, most, slots = group, free, group.slots
                elif free > others:
                    others = free
            if best is None:
                break
            if best.count > need:  # its other SMs are as empty: one round
                best = best.split(need)
                groups.append(best)
                rounds = 1
            else:
                rounds = min(best.room(threads), need // best.count)
                if others >= 0:  # until another group is the emptiest
                    rounds = min(rounds, max(1, (most - others) // threads))
            best.add(wave, rounds)
            need -= rounds * best.count
        return blocks - need

    def _end(self, wave: Wave) -> None:
        """A wave's blocks have ended: their room is free."""
        grid = wave.grid
        self.waves -= 1
        if self.alone is wave:
            self.alone = None
        else:
            self._free(wave)
        grid.running -= 1
        if grid.later and not grid.running:
            (grid.left, grid.wave_ns), grid.later = grid.later, None
        if not (grid.running or grid.left):
            self.kernels -= 1
            op = grid.op
            self.last = op.number
            if self.agenda.now < op.not_before_ns:
                self.agenda.at(op.not_before_ns, END, self._ended, op)
            else:
                self._ended(op)
        self._place()

    def _free(self, wave: Wave) -> None:
        """Its SMs have room again; those that are idle are one group."""
        threads = wave.grid.threads
        idle, busy = 0, []
        for group in self.groups:
            blocks = group.blocks.pop(wave, 0)
            if blocks:
                group.threads += blocks * threads
                group.slots += blocks
            if group.blocks:
                busy.append(group)
            else:
                idle += group.count
        if idle:
            busy.append(self._idle(idle))
        self.groups = busy
