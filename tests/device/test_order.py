"""The order check against the definition: a race is a conflict with no path between the two."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import heterolab as hl
from heterolab.device.base import Buffer, Memory
from heterolab.device.order import DEFAULT, HOST, Order, RaceWarning
from heterolab.errors import InputError, RaceError

BYTES = 8


def buffers() -> list[Buffer]:
    """Two allocations, and parts of the first, of which some overlap."""
    first, second = (Buffer(None, np.zeros(BYTES, np.uint8), Memory.MAPPED) for _ in range(2))
    return [first, second, first[:5], first[3:], first[6:]]


@dataclass
class Graph:
    """Happens-before as what it is: a graph of nodes, and paths in it."""

    blocking: dict[int, bool]
    before: list[set[int]] = field(default_factory=list)  # node → all nodes in its past
    touched: dict[int, list[tuple[int, int, int, bool]]] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)

    def node(self, actor: int, *parents: int | None) -> int:
        """A new node of `actor`, behind its last one and the parents."""
        past: set[int] = set()
        for parent in (self.last.get(actor), *parents):
            if parent is not None:
                past |= self.before[parent] | {parent}
        self.before.append(past)
        self.last[actor] = len(self.before) - 1
        return self.last[actor]

    def issued(self, stream: int) -> int:
        """A new node of a stream: behind what the host did, and the legacy default's barrier."""
        parents = [self.last.get(HOST)]
        if stream == DEFAULT:
            parents += [self.last.get(s) for s, blocking in self.blocking.items() if blocking]
        elif self.blocking[stream]:
            parents.append(self.last.get(DEFAULT))
        return self.node(stream, *parents)

    def races(self, node: int, touches: list[tuple[int, int, int, bool]]) -> bool:
        """Whether `node`, which makes these touches, races with an earlier one."""
        found = any(
            storage == other_storage and (writes or other_writes) and start < other_end and other_start < end
            for other, theirs in self.touched.items()
            if other not in self.before[node]
            for other_storage, other_start, other_end, other_writes in theirs
            for storage, start, end, writes in touches
        )
        self.touched[node] = touches
        return found


streams = st.integers(-1, 1)
which = st.integers(0, 4)
some = st.lists(which, max_size=1)
steps = st.one_of(
    st.tuples(st.just("op"), streams, some, some),
    st.tuples(st.just("op"), streams, st.just([0]), st.just([])),  # mostly the same bytes
    st.tuples(st.just("op"), streams, st.just([]), st.just([0])),
    st.tuples(st.just("host"), st.booleans(), which),
    st.tuples(st.just("record"), streams),
    st.tuples(st.just("wait"), streams, st.integers(0, 3)),
    st.tuples(st.just("saw"), st.integers(0, 3)),
    st.tuples(st.just("sync"), streams),
)


# Short programs: in a long one nearly every operation races, and one race hides another.
@settings(max_examples=1500, deadline=None)
@given(st.lists(st.booleans(), min_size=2, max_size=2), st.lists(steps, max_size=12))
def test_it_finds_exactly_the_conflicts_without_a_path(blocking: list[bool], program: list[tuple]) -> None:
    order, graph, known = Order("show"), Graph(dict(enumerate(blocking))), buffers()
    for stream, blocks in enumerate(blocking):
        order.add_stream(stream, blocks)
    events: list[tuple[dict[int, int], int]] = []
    for step, *args in program:
        if step == "op":
            stream, read, written = args[0], [known[i] for i in args[1]], [known[i] for i in args[2]]
            node = graph.issued(stream)
            touches = [_touch(b, False) for b in read] + [_touch(b, True) for b in written]
            expected = graph.races(node, touches)
            found = reports(order, order.device_op, stream, "op", read, written)
        elif step == "host":
            writes, index = args
            node = graph.node(HOST)
            expected = graph.races(node, [_touch(known[index], writes)])
            side = {"writes" if writes else "reads": [known[index]]}
            found = reports(order, order.host_op, "a touch", **side)
        else:
            expected = found = False
            _order_only(step, args, order, graph, events)
        assert found == expected, (step, args)


def _touch(buffer: Buffer, writes: bool) -> tuple[int, int, int, bool]:
    return buffer.storage, buffer.offset, buffer.offset + buffer.nbytes, writes


def _order_only(step: str, args: list[int], order: Order, graph: Graph, events: list) -> None:
    """The steps that touch nothing, and pass the past on."""
    if step == "record":
        node = graph.issued(args[0])
        events.append((order.record(args[0]), node))
    elif step == "sync":
        order.host_synchronized([args[0]])
        graph.node(HOST, graph.last.get(args[0]))
    elif args[-1] < len(events):
        clock, node = events[args[-1]]
        if step == "wait":
            order.wait(args[0], clock)
            graph.node(args[0], node)
        else:
            order.host_saw(clock)
            graph.node(HOST, node)


def reports(order: Order, call: Callable[..., None], *args: Any, **side: Any) -> bool:
    """Whether the check finds at least one race in this operation."""
    before = len(order.found)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RaceWarning)
        call(*args, **side)
    return len(order.found) > before


def test_a_race_between_streams_names_both_ops_and_the_missing_event() -> None:
    order, (buffer, *_) = Order(), buffers()
    order.add_stream(0, False)
    order.add_stream(1, False)
    order.device_op(0, "copy", writes=[buffer])
    with pytest.raises(RaceError, match=r"add on stream 1 reads.*copy on stream 0 writes") as error:
        order.device_op(1, "add", reads=[buffer])
    assert "done = stream 0.record() behind the first, then stream 1.wait(done)" in str(error.value)


def test_a_race_with_the_host_says_to_wait() -> None:
    order, (buffer, *_) = Order(), buffers()
    order.add_stream(0, False)
    order.device_op(0, "copy", reads=[buffer])
    with pytest.raises(RaceError, match=r"a write by the host.*Let the host wait first"):
        order.host_op("a write", writes=[buffer])


def test_show_warns_and_goes_on() -> None:
    order, (buffer, *_) = Order("show"), buffers()
    order.add_stream(0, False)
    order.device_op(0, "copy", writes=[buffer])
    with pytest.warns(RaceWarning, match="Race on"):
        order.host_op("a read", reads=[buffer])
    assert len(order.found) == 1


def test_the_warning_points_at_the_users_line() -> None:
    device = hl.open_device("sim:h200", races="show")
    one, two = device.stream(), device.stream()
    here, there = device.buffer(4, memory="pinned"), device.buffer(4)
    one.copy(there, here)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        two.copy(here, there)
        here.read()
        here[:2].write()
    assert {(w.category, w.filename) for w in caught} == {(RaceWarning, __file__)}
    assert len({w.lineno for w in caught}) == 3


def test_a_refused_operation_has_touched_nothing() -> None:
    order, (one, two, *_) = Order(), buffers()
    order.add_stream(0, False)
    order.add_stream(1, False)
    order.device_op(0, "copy", writes=[one])
    with pytest.raises(RaceError, match="add on stream 1"):
        order.device_op(1, "add", reads=[two], writes=[one])
    order.host_synchronized([0])
    order.device_op(0, "copy", writes=[two])
    assert order.record(1)[1] == 0, "stream 1 has done nothing"


def test_what_was_ordered_is_forgotten() -> None:
    """A long run must not remember every access it ever made."""
    order, (buffer, *_) = Order(), buffers()
    order.add_stream(0, False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(100):
            order.device_op(0, "copy", writes=[buffer])
            order.device_op(0, "add", reads=[buffer])
    assert len(order._accesses[buffer.storage]) <= 2
    order.forget(buffer.storage)
    assert not order._accesses


def test_another_mode_is_refused() -> None:
    with pytest.raises(InputError, match="races='maybe'"):
        Order("maybe")
