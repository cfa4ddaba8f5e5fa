"""Stage 1, on the CPU: parse a request, check its key, clean its text, tokenise it.

Branches, strings and exceptions: work that a GPU cannot do well. It runs in *chunks* of
requests, since one job a text spends more on handing jobs over than on the texts.
"""

from __future__ import annotations

import hmac
import json
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from heterolab.workload import Request

#: A longer body is refused before it is parsed: parsing is what an attacker would make us do.
MAX_BODY_BYTES = 65_536

Tokenize = Callable[[list[str]], list[NDArray[np.int32]]]


@dataclass(frozen=True)
class Prepared:
    """A request that may enter a batch: its clean text and token ids, shape (tokens,)."""

    request: Request
    text: str
    ids: NDArray[np.int32]


@dataclass(frozen=True)
class Rejected:
    """A request that was refused, and why, in words for the client."""

    id: int
    reason: str


class _Refusal(Exception):
    """Ends the preparation of one request; never leaves this module."""


def preprocess(
    requests: Sequence[Request], keys: Sequence[str], tokenize: Tokenize
) -> list[Prepared | Rejected]:
    """Prepare a chunk of requests; the order is kept.

    Parameters
    ----------
    requests
        Bodies as they came from the client: JSON with ``key`` and ``text``.
    keys
        The API keys that are served.
    tokenize
        Texts to token ids, one int32 array a text.
    """
    outcomes: list[Prepared | Rejected | str] = []
    texts: list[str] = []
    for request in requests:
        try:
            if request.refused:
                raise _Refusal(request.refused)
            texts.append(accept(request.body, keys))
            outcomes.append(texts[-1])
        except _Refusal as refusal:
            outcomes.append(Rejected(request.id, str(refusal)))
    tokens = iter(tokenize(texts)) if texts else iter(())
    return [
        Prepared(request, outcome, next(tokens)) if isinstance(outcome, str) else outcome
        for request, outcome in zip(requests, outcomes, strict=True)
    ]


def accept(body: bytes, keys: Sequence[str]) -> str:
    """The clean text of a request whose body is in order and whose key is served."""
    if len(body) > MAX_BODY_BYTES:
        raise _Refusal(f"the body has {len(body)} bytes; at most {MAX_BODY_BYTES} are read")
    try:
        fields = json.loads(body.decode())
    except UnicodeDecodeError as error:
        raise _Refusal(f"the body is not UTF-8 (byte {error.start})") from error
    except (ValueError, RecursionError) as error:
        raise _Refusal(f"the body is not JSON ({error})") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("text"), str):
        raise _Refusal('the body must be a JSON object with a string "text"')
    if not known_key(fields.get("key"), keys):
        raise _Refusal('the API key is missing or wrong: send "key"')
    text = clean(fields["text"])
    if not text:
        raise _Refusal("the text is empty")
    return text


def known_key(key: object, keys: Sequence[str]) -> bool:
    """Whether `key` is served, in a time that does not tell how much of it was right."""
    given = key.encode(errors="surrogatepass") if isinstance(key, str) else b""
    matches = [hmac.compare_digest(given, known.encode()) for known in keys]
    return any(matches)


def clean(text: str) -> str:
    """One line of normalised Unicode, without control characters or lone surrogates."""
    text = text.encode(errors="replace").decode()
    text = unicodedata.normalize("NFC", text)
    text = "".join(c if unicodedata.category(c)[0] != "C" else " " for c in text)
    return " ".join(text.split())
