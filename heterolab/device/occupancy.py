"""How kernels share a simulated GPU's streaming multiprocessors (SMs).

A kernel is a grid of blocks. An SM holds so many threads and so many blocks at once; a grid
that does not fit at once runs in *waves*. SMs in the same state are kept together as one
:class:`Group`, so that a kernel on an idle device costs the simulator a few steps, not 132.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from heterolab.device.op import Op
from heterolab.device.profile import Compute
from heterolab.device.simhost import END, Agenda
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
        return min(self.threads // threads, self.slots)

    def emptier(self, other: Group) -> bool:
        return (self.threads, self.slots) > (other.threads, other.slots)

    def split(self, count: int) -> Group:
        """Take `count` of its SMs out as a group of their own."""
        self.count -= count
        return Group(count, self.threads, self.slots, dict(self.blocks))

    def add(self, wave: Wave, blocks: int) -> None:
        """`blocks` of `wave` begin on each of its SMs."""
        self.threads -= blocks * wave.grid.threads
        self.slots -= blocks
        self.blocks[wave] = self.blocks.get(wave, 0) + blocks

    def remove(self, wave: Wave) -> None:
        """The blocks of `wave` have ended."""
        blocks = self.blocks.pop(wave, 0)
        self.threads += blocks * wave.grid.threads
        self.slots += blocks


class Grid:
    """A kernel's blocks: those still to be placed, and how long a wave of them takes."""

    __slots__ = ("blocks", "later", "left", "op", "running", "started", "threads", "wave_ns")

    def __init__(self, op: Op, threads: int, blocks: int, wave_ns: float) -> None:
        self.op, self.threads, self.blocks = op, threads, blocks
        self.left, self.wave_ns = blocks, wave_ns
        self.later: tuple[int, float] | None = None  # blocks, and their time, once those have ended
        self.running = 0  # waves
        self.started = False


class Wave:
    """Blocks of one kernel that were placed together, and end together."""

    __slots__ = ("blocks", "grid")

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.blocks = 0


class Sms:
    """The multiprocessors, and the line of kernels that have blocks left to place.

    Only the kernel at the head of the line places blocks, on the emptiest SM first; the next
    one begins once all of them are placed.
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
        self.line: deque[Grid] = deque()
        self.kernels = 0  # that run
        self.last = NONE  # the op that ended last
        self.groups = [self._idle(compute.sms)]
        #: A kernel that has the device to itself is not placed on SMs until another one comes.
        self.alone: Wave | None = None

    def _idle(self, count: int) -> Group:
        return Group(count, self.costs.threads_per_sm, self.costs.blocks_per_sm, {})

    def arrive(self, op: Op) -> None:
        """A kernel is ready: it joins the line."""
        self.line.append(self._grid(op))
        self._place()

    def capacity(self, threads: int) -> int:
        """Blocks of `threads` that the empty device holds."""
        costs = self.costs
        return costs.sms * max(1, min(costs.threads_per_sm // threads, costs.blocks_per_sm))

    def _grid(self, op: Op) -> Grid:
        """A kernel's grid; one that does not say fills the device once."""
        threads = min(max(op.threads, 1), self.costs.threads_per_sm)
        room = self.capacity(threads)
        blocks = op.blocks or room
        waves = -(-blocks // room)
        if op.on_link:  # it waits for the link, not for its turn
            return Grid(op, threads, min(blocks, room), op.work_ns)
        if op.per_block:
            wave_ns = op.work_ns + self.costs.fixed_ns
            if waves > MAX_WAVES:
                return Grid(op, threads, MAX_WAVES * room, wave_ns * waves / MAX_WAVES)
            return Grid(op, threads, blocks, wave_ns)
        return Grid(op, threads, blocks, op.work_ns / waves)

    def _plan(self, grid: Grid) -> None:
        """The kernel is at the head of the line: how its blocks begin.

        Where only the time of the whole kernel is known, and enough of the device is free, it
        goes at its full speed with the room that there is. A grid of many waves is then two
        steps for the simulator: all waves but the last, and the last.
        """
        grid.started = True
        if grid.op.per_block:
            return
        room = self.capacity(grid.threads)
        waves = -(-grid.blocks // room)
        if not self.kernels and waves == 1:
            return
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
        while self.line:
            grid = self.line[0]
            if not grid.started:
                if self.kernels >= self.costs.kernels:
                    return
                if self.alone is not None:  # no longer
                    self._spread(self.alone, self.alone.blocks)
                    self.alone = None
                self._plan(grid)
            placed = self._fill(grid)
            # Blocks that wait for the link end when it is through, wherever they were placed.
            grid.left = 0 if placed and grid.op.on_link else grid.left - placed
            if grid.left or grid.later:
                return
            self.line.popleft()

    def _fill(self, grid: Grid) -> int:
        """Start as many blocks as fit; how many did."""
        wave = Wave(grid)
        if not self.kernels and grid.left <= self.capacity(grid.threads):
            self.alone = wave
            placed = wave.blocks = grid.left
        else:
            placed = self._spread(wave, grid.left)
        if placed:
            self._start(wave)
        return placed

    def _spread(self, wave: Wave, blocks: int) -> int:
        """Place as many of the blocks as fit, one after the other on the emptiest SM."""
        need, threads = blocks, wave.grid.threads
        while need and (group := self._emptiest(threads)) is not None:
            if group.count > need:
                group = group.split(need)
                self.groups.append(group)
            rounds = min(group.room(threads), need // group.count)
            if len(self.groups) > 1:  # until another group is the emptiest
                others = max(g.threads for g in self.groups if g is not group)
                rounds = min(rounds, max(1, (group.threads - others) // threads))
            group.add(wave, rounds)
            need -= rounds * group.count
        return blocks - need

    def _emptiest(self, threads: int) -> Group | None:
        """The group with the most room that still takes a block of `threads`."""
        best = None
        for group in self.groups:
            if group.threads >= threads and group.slots and (best is None or group.emptier(best)):
                best = group
        return best

    def _start(self, wave: Wave) -> None:
        grid, op, now = wave.grid, wave.grid.op, self.agenda.now
        if not op.start_ns:
            op.start_ns = now
            self.kernels += 1
            if now > op.ready_ns:
                op.after = self.last
        grid.running += 1
        self._run(op, grid.wave_ns, lambda: self._end(wave))

    def _end(self, wave: Wave) -> None:
        """A wave's blocks have ended: their room is free."""
        grid = wave.grid
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
        for group in self.groups:
            group.remove(wave)
        if len(self.groups) == 1:
            return
        idle = sum(group.count for group in self.groups if not group.blocks)
        self.groups = [group for group in self.groups if group.blocks]
        if idle:
            self.groups.append(self._idle(idle))
