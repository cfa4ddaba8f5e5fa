"""Stage 2: when a batch goes, and who is in it."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from heterolab.pipeline.batch import LENGTH_STEP, Batcher
from heterolab.pipeline.preprocess import Prepared
from heterolab.workload import Request


def item(number: int, tokens: int = 5) -> Prepared:
    return Prepared(Request(number, b"", 0, ""), "text", np.ones(tokens, np.int32))


def ids(batch: object) -> list[int]:
    return [i.request.id for i in batch.items]  # type: ignore[attr-defined]


def test_a_full_batch_goes_at_once_and_a_part_of_one_at_its_deadline() -> None:
    batcher = Batcher(max_batch=2, max_delay_ns=100)
    batcher.add(item(0), 10)
    assert not batcher.ready(109)
    assert batcher.deadline_ns() == 110
    assert batcher.ready(110)
    batcher.add(item(1), 20)
    assert batcher.ready(20)
    assert ids(batcher.take(20)) == [0, 1]
    assert batcher.deadline_ns() is None
    assert not batcher.ready(1_000_000)


def test_without_more_to_come_nobody_waits() -> None:
    batcher = Batcher(8, 100)
    batcher.add(item(0), 0)
    assert batcher.ready(0, no_more=True)


def test_length_aware_takes_the_oldest_and_those_nearest_to_it_in_length() -> None:
    batcher = Batcher(2, 0, length_aware=True)
    for number, tokens in enumerate((10, 100, 12)):
        batcher.add(item(number, tokens), number)
    assert ids(batcher.take(0)) == [0, 2]
    assert ids(batcher.take(0)) == [1]


def test_without_length_awareness_order_of_arrival_decides() -> None:
    batcher = Batcher(2, 0, length_aware=False)
    for number, tokens in enumerate((10, 100, 12)):
        batcher.add(item(number, tokens), number)
    assert ids(batcher.take(0)) == [0, 1]


@given(st.lists(st.integers(1, 128), min_size=1, max_size=60), st.integers(1, 16), st.booleans())
def test_every_request_is_in_one_batch_and_rows_fit(lengths: list[int], limit: int, aware: bool) -> None:
    batcher = Batcher(limit, 0, aware)
    for number, tokens in enumerate(lengths):
        batcher.add(item(number, tokens), 0)
    seen: list[int] = []
    while len(batcher):
        oldest = batcher.queue[0][1].request.id
        batch = batcher.take(0)
        assert 1 <= len(batch) <= limit
        assert batch.items[0].request.id == oldest
        longest = max(len(i.ids) for i in batch.items)
        assert batch.length % LENGTH_STEP == 0
        assert longest <= batch.length < longest + LENGTH_STEP
        seen += ids(batch)
    assert sorted(seen) == list(range(len(lengths)))
