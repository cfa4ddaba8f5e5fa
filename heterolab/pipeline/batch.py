"""Stage 2, on the CPU: make batches of the requests that are there.

A batch goes when it is full, or when its oldest request has waited `max_delay_ns`. Rows of a
batch are padded to its longest text, so it can pay to take texts of like length together.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from heterolab.pipeline.preprocess import Prepared

#: Lengths are rounded up to a multiple of this: fewer distinct shapes, aligned rows.
LENGTH_STEP = 8


@dataclass(frozen=True)
class Batch:
    """Requests that are served together.

    Attributes
    ----------
    number
        Counts from 0; the ``batch`` of its spans.
    items
        Its requests, oldest first.
    length
        Tokens in a padded row.
    formed_ns
        When it was made.
    """

    number: int
    items: tuple[Prepared, ...]
    length: int
    formed_ns: int

    def __len__(self) -> int:
        return len(self.items)


class Batcher:
    """The dynamic batcher.

    Parameters
    ----------
    max_batch
        Most requests in a batch.
    max_delay_ns
        Longest time the oldest request waits for company.
    length_aware
        Beside the oldest request, take those nearest to it in length instead of the next in
        line. The oldest always goes, so nobody starves.
    """

    def __init__(self, max_batch: int, max_delay_ns: int, length_aware: bool = True) -> None:
        self.max_batch = max_batch
        self.max_delay_ns = max_delay_ns
        self.length_aware = length_aware
        self.queue: deque[tuple[int, Prepared]] = deque()
        self._formed = 0

    def __len__(self) -> int:
        return len(self.queue)

    def add(self, item: Prepared, now_ns: int) -> None:
        self.queue.append((now_ns, item))

    def deadline_ns(self) -> int | None:
        """When the oldest request will have waited long enough; None when nobody waits."""
        return self.queue[0][0] + self.max_delay_ns if self.queue else None

    def ready(self, now_ns: int, no_more: bool = False) -> bool:
        """Whether a batch should go now. With `no_more` to come, waiting buys nothing."""
        deadline = self.deadline_ns()
        if deadline is None:
            return False
        return len(self.queue) >= self.max_batch or now_ns >= deadline or no_more

    def take(self, now_ns: int) -> Batch:
        """Form a batch of those who wait."""
        chosen = self._nearest_in_length() if self.length_aware else range(len(self.queue))
        indices = sorted(list(chosen)[: self.max_batch])
        items = tuple(self.queue[i][1] for i in indices)
        gone = set(indices)
        self.queue = deque(entry for i, entry in enumerate(self.queue) if i not in gone)
        longest = max(len(item.ids) for item in items)
        length = -(-longest // LENGTH_STEP) * LENGTH_STEP
        batch = Batch(self._formed, items, length, now_ns)
        self._formed += 1
        return batch

    def _nearest_in_length(self) -> list[int]:
        """Places in the queue: the oldest first, then by distance in length, then by age."""
        oldest = len(self.queue[0][1].ids)
        distance = {i: abs(len(item.ids) - oldest) for i, (_, item) in enumerate(self.queue)}
        return sorted(distance, key=lambda i: (i != 0, distance[i], i))
