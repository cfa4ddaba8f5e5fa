"""Requests, and how they arrive.

A **load** says what is asked and when; ``load.source()`` plays it once, so the same load can be
run again on another device. An *open* load (:func:`poisson`, :func:`bursts`, :func:`replay`)
arrives whether or not the service keeps up. In a *closed* loop (:func:`closed_loop`) each
client waits for its answer before it asks again. Everything is fixed by the seed.
"""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeGuard

import numpy as np
from numpy.typing import NDArray

from heterolab.errors import InputError

#: The API key that the course's own requests carry.
COURSE_KEY = "heterolab-course-2026"

#: More requests than any run here can mean; a larger `n` is a slip of the keyboard.
MAX_REQUESTS = 1_000_000

#: The longest time in milliseconds that anything here may ask for: thirty years.
MOST_MS = 1e12

#: Clients behind an open load: whose session a request belongs to.
_SESSIONS = 16


@dataclass(frozen=True)
class Request:
    """One arrival.

    Attributes
    ----------
    id
        0, 1, … in order of arrival, one run apart from the next.
    body
        The raw bytes a client sent, as a rule JSON ``{"key": "…", "text": "…"}``. Nothing has
        looked at them yet: that is the first stage's work.
    arrival_ns
        When it was *meant* to arrive. Latency counts from here, so that a service too busy to
        notice a request is not excused (no coordinated omission).
    session
        Whose request it is.
    refused
        Why it cannot be served, where its source knows already: a line of a replay file with
        an impossible time. Empty for all others.
    """

    id: int
    body: bytes
    arrival_ns: int
    session: str
    refused: str = ""


class Source(Protocol):
    """Where a run's requests come from; used up by one run."""

    def due(self, now: int) -> list[Request]:
        """The requests that have arrived by `now` and were not handed out before."""

    def next_ns(self) -> int | None:
        """When the next one arrives; None if that is not known (yet) or none is left."""

    def open(self) -> bool:
        """Whether more may come."""

    def finished(self, request: Request, now: int) -> None:
        """`request` has left the service at `now`: answered, rejected or failed."""


@dataclass(frozen=True, repr=False)
class Load:
    """Requests, and the rule by which they arrive. Make one with :func:`poisson` and its like.

    Attributes
    ----------
    label
        The call that made it, for people.
    requests
        All of them, in order. In a closed loop their arrival times are set as the run goes.
    in_flight
        Clients of a closed loop; 0 means an open load.
    think_ns
        How long such a client waits between an answer and its next request.
    """

    label: str
    requests: tuple[Request, ...]
    in_flight: int = 0
    think_ns: int = 0

    def source(self) -> Source:
        """A fresh source that plays this load once."""
        if self.in_flight:
            return _ClosedLoop(self)
        return _OpenLoop(self.requests)

    def __len__(self) -> int:
        return len(self.requests)

    def __repr__(self) -> str:
        return f"<load {self.label}: {len(self)} requests>"


class _OpenLoop:
    """Arrivals fixed beforehand."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests = requests
        self._next = 0

    def due(self, now: int) -> list[Request]:
        first = self._next
        while self._next < len(self._requests) and self._requests[self._next].arrival_ns <= now:
            self._next += 1
        return list(self._requests[first : self._next])

    def next_ns(self) -> int | None:
        return self._requests[self._next].arrival_ns if self.open() else None

    def open(self) -> bool:
        return self._next < len(self._requests)

    def finished(self, request: Request, now: int) -> None:
        """Nothing: an open load does not care."""


class _ClosedLoop:
    """A fixed number of clients; each asks, waits for its answer, thinks, and asks again."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._next = 0
        # (time of the next request, client), earliest first
        self._ready = [(0, client) for client in range(min(load.in_flight, len(load)))]
        self._client_of: dict[int, int] = {}

    def due(self, now: int) -> list[Request]:
        arrived = []
        while self.open() and self._ready and self._ready[0][0] <= now:
            at, client = heapq.heappop(self._ready)
            asked = self._load.requests[self._next]
            request = Request(self._next, asked.body, at, f"client-{client}", asked.refused)
            self._client_of[request.id] = client
            self._next += 1
            arrived.append(request)
        return arrived

    def next_ns(self) -> int | None:
        return self._ready[0][0] if self.open() and self._ready else None

    def open(self) -> bool:
        return self._next < len(self._load)

    def finished(self, request: Request, now: int) -> None:
        client = self._client_of.pop(request.id, None)
        if client is not None:
            heapq.heappush(self._ready, (now + self._load.think_ns, client))


def poisson(rate: float, n: int, seed: int = 0, texts: Sequence[str | bytes] | None = None) -> Load:
    """Requests at random, independent moments: an open load.

    Parameters
    ----------
    rate
        Mean arrivals per second.
    n
        How many.
    seed
        Fixes the arrival times, the texts and the sessions.
    texts
        What is asked, drawn at random from these; by default real questions. ``bytes`` are
        sent as they are, in place of the JSON.

    Raises
    ------
    InputError
        `rate` is not above 0, `n` is not a count up to 1,000,000, or `texts` is empty.
    """
    rng, n = np.random.default_rng(_seed(seed)), _count("n", n)
    gaps_s = rng.exponential(1 / _rate(rate), n)
    label = f"poisson(rate={rate:g}, n={n}, seed={seed})"
    return Load(label, _requests(rng, _as_ns(np.cumsum(gaps_s)), texts))


def bursts(
    rate: float,
    n: int,
    burst: int = 20,
    share: float = 0.05,
    seed: int = 0,
    texts: Sequence[str | bytes] | None = None,
) -> Load:
    """An open load in which a `share` of the requests comes in bursts, all at the same moment.

    Parameters
    ----------
    rate, n, seed, texts
        As for :func:`poisson`; `rate` is the mean of the whole, bursts included.
    burst
        Requests in one burst.
    share
        Part of all requests that comes in bursts, 0 to 1. As bursts are whole, there is at
        least one where ``share > 0``.

    Raises
    ------
    InputError
        As for :func:`poisson`; or `burst` or `share` cannot be used.
    """
    rng, n = np.random.default_rng(_seed(seed)), _count("n", n)
    burst = _count("burst", burst, at_least=1)
    if not 0 <= share <= 1:
        raise InputError(f"share={share!r} is the part of requests in bursts: give 0 to 1, e.g. 0.05.")
    whole = max(1, round(n * share / burst)) if share > 0 and n >= burst else 0
    whole = min(whole, n // burst)
    sizes = np.ones(n - whole * burst + whole, dtype=np.int64)
    sizes[rng.choice(len(sizes), whole, replace=False)] = burst
    mean_gap_s = n / max(len(sizes), 1) / _rate(rate)
    moments_s = np.cumsum(rng.exponential(mean_gap_s, len(sizes)))
    label = f"bursts(rate={rate:g}, n={n}, burst={burst}, share={share:g}, seed={seed})"
    return Load(label, _requests(rng, _as_ns(np.repeat(moments_s, sizes)), texts))


def closed_loop(
    n: int, in_flight: int, seed: int = 0, think_ms: float = 0, texts: Sequence[str | bytes] | None = None
) -> Load:
    """`in_flight` clients ask `n` requests in all; each waits for its answer, then asks again.

    Parameters
    ----------
    n, seed, texts
        As for :func:`poisson`.
    in_flight
        Clients, hence requests in the service at any moment (while none of them thinks).
    think_ms
        Pause of a client between an answer and its next request, in milliseconds.

    Raises
    ------
    InputError
        A count is not positive, or `think_ms` is negative or endless.
    """
    rng, n = np.random.default_rng(_seed(seed)), _count("n", n)
    in_flight = _count("in_flight", in_flight, at_least=1)
    if not (_is_number(think_ms) and 0 <= think_ms <= MOST_MS):
        raise InputError(f"think_ms={think_ms!r} is a pause in milliseconds: give 0 to {MOST_MS:.0e}.")
    requests = _requests(rng, [0] * n, texts)
    label = f"closed_loop(n={n}, in_flight={in_flight}, seed={seed}, think_ms={think_ms:g})"
    return Load(label, requests, in_flight, round(think_ms * 1e6))


def replay(path: str | Path) -> Load:
    """The requests of a JSONL file, at the times written there: an open load.

    Each line is ``{"text": "…", "at_ms": 12.5}`` or just a JSON string. ``at_ms`` counts from
    the start of the run; without it a request arrives with the line before. ``"key"`` (by
    default the course's valid one) and ``"session"`` may be given. A line that is not such a
    request is sent as it stands, so that the service rejects it, says why, and goes on.

    Raises
    ------
    InputError
        The file cannot be read, or holds no line or more than 1,000,000.
    """
    try:
        lines = [line for line in Path(path).read_bytes().splitlines() if line.strip()]
    except OSError as error:
        reason = error.strerror or error
        raise InputError(
            f"path={str(path)!r} cannot be read ({reason}). Give a file with one JSON request a line, "
            'e.g. {"text": "What is AI?", "at_ms": 0}.'
        ) from error
    if not 0 < len(lines) <= MAX_REQUESTS:
        raise InputError(
            f"path={str(path)!r} holds {len(lines)} requests; give 1 to {MAX_REQUESTS:,}, one a line."
        )
    read: list[Request] = []
    previous_ns = 0
    for line in lines:
        read.append(_read_line(line, previous_ns))
        previous_ns = read[-1].arrival_ns
    read.sort(key=lambda request: request.arrival_ns)  # stable: equal times keep the file's order
    requests = tuple(replace(request, id=i) for i, request in enumerate(read))
    return Load(f"replay({Path(path).name!r})", requests)


def _read_line(line: bytes, previous_ns: int) -> Request:
    """The request of one line of a replay file; its id is set later."""
    as_it_stands = Request(0, line, previous_ns, "replay")
    try:
        item = json.loads(line)
    except (ValueError, RecursionError):
        return as_it_stands
    if isinstance(item, str):
        return replace(as_it_stands, body=body_of(item))
    if not isinstance(item, dict):
        return as_it_stands
    at_ms = item.pop("at_ms", previous_ns / 1e6)
    session = item.pop("session", "replay")
    if not (_is_number(at_ms) and 0 <= at_ms <= MOST_MS):
        return replace(
            as_it_stands, refused=f'"at_ms" is {at_ms!r}: give a number of milliseconds, 0 or more'
        )
    if not isinstance(session, str):
        return replace(as_it_stands, refused=f'"session" is {session!r}: give a string')
    return Request(0, _encode({"key": COURSE_KEY, **item}), round(at_ms * 1e6), session)


def body_of(text: str | bytes, key: str = COURSE_KEY) -> bytes:
    """The body a client sends to ask `text`; ``bytes`` are taken as a body already."""
    return text if isinstance(text, bytes) else _encode({"key": key, "text": text})


def _encode(item: dict[str, Any]) -> bytes:
    # A lone surrogate becomes invalid UTF-8, as a broken client would send it: to be rejected.
    return json.dumps(item, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _requests(
    rng: np.random.Generator, arrivals_ns: Sequence[int], texts: Sequence[str | bytes] | None
) -> tuple[Request, ...]:
    """One request an arrival, with seeded texts and sessions."""
    choice = _texts(texts)
    asked = rng.integers(len(choice), size=len(arrivals_ns)).tolist()
    sessions = rng.integers(_SESSIONS, size=len(arrivals_ns)).tolist()
    return tuple(
        Request(i, body_of(choice[text]), at, f"user-{session}")
        for i, (at, text, session) in enumerate(zip(arrivals_ns, asked, sessions, strict=True))
    )


def _texts(texts: Sequence[str | bytes] | None) -> Sequence[str | bytes]:
    if texts is None:
        return questions()
    if isinstance(texts, str | bytes):
        raise InputError(f"texts={texts!r} is a single text. Give a list of texts: texts=[{texts!r}].")
    if not len(texts) or not all(isinstance(text, str | bytes) for text in texts):
        raise InputError(f"texts={texts!r}: give a list with at least one text, all of them strings.")
    return texts


def questions() -> tuple[str, ...]:
    """The questions of the course's knowledge base: real texts to ask."""
    data = json.loads(Path(__file__).with_name("data").joinpath("knowledge.json").read_bytes())
    return tuple(row["question"] for row in data["rows"])


def _as_ns(seconds: NDArray[np.float64]) -> list[int]:
    return [round(s * 1e9) for s in seconds.tolist()]


def _is_number(value: object) -> TypeGuard[float]:
    """A finite number, NumPy's own included."""
    number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    return number and math.isfinite(value)  # type: ignore[arg-type]


def _rate(rate: float) -> float:
    if not (_is_number(rate) and 1e-3 <= rate <= 1e9):
        raise InputError(f"rate={rate!r} is the mean number of arrivals a second: give one above 0.")
    return rate


def _seed(seed: int) -> int:
    if not isinstance(seed, int | np.integer) or isinstance(seed, bool) or seed < 0:
        raise InputError(f"seed={seed!r} fixes the random choices: give a whole number from 0 on.")
    return int(seed)


def _count(name: str, value: int, at_least: int = 0) -> int:
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not whole or not at_least <= value <= MAX_REQUESTS:
        raise InputError(f"{name}={value!r} is a count: give a whole number, {at_least} to {MAX_REQUESTS:,}.")
    return int(value)
