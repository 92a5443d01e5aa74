"""Reading tokens again behind their rows, for a policy that goes by what is looked at then (`kvzip`).

A prompt's rows are read again by works of the loop (`Keeper.rereading`), those of a chunk and those
decoded since the last choice here and now, on the rows themselves, which are as before afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar, cast

import numpy as np

from kvweave.errors import ContextTooLong
from kvweave.keep.tokens.base import TokenPolicy, TokenWatch
from kvweave.keep.tokens.kvzip import OVERLAP, KVzip, Replay, Replayed
from kvweave.run.base import Backend, Ints, Rows, Steps, Work

T = TypeVar("T")

LEAST = 32  # tokens that are read again at once, at least
PIECE = 512  # rows of one pass


def _asks(policy: KVzip, backend: Backend) -> tuple[Ints, Ints]:
    """Return what is asked before the first part is read again, and before others; nothing, where a
    vocabulary has no words for it."""
    return _tokens_of(backend, policy.prompt), _tokens_of(backend, policy.further)


def _tokens_of(backend: Backend, text: str) -> Ints:
    tokenizer = backend.tokenizer
    ids = [] if tokenizer is None else tokenizer.encode(text, add_special_tokens=False)
    known = tokenizer is not None and tokenizer.unk_token_id not in ids
    return np.array(ids if known else [], np.int64)


def replays(
    policy: KVzip, backend: Backend, first: int, tokens: Ints, start: int = 0
) -> Iterator[Replay]:
    """Return what to run from position ``first`` on to have ``tokens`` read again from slot
    ``start`` on. Raises ContextTooLong where there are no positions for it."""
    asks = _asks(policy, backend)
    room = backend.limit - first - max(map(len, asks)) - OVERLAP
    if room < min(len(tokens) - start, LEAST):
        raise ContextTooLong(first + LEAST, backend.limit)
    return policy.within(room).replays(tokens, *asks, start)


def reread_rows(policy: TokenPolicy, backend: Backend, n: int) -> int:
    """Return how many rows stand behind ``n`` while a policy has them read again, at most."""
    if not isinstance(policy, KVzip):
        return 0
    return min(n, policy.span) + max(map(len, _asks(policy, backend))) + OVERLAP


def read_again(
    backend: Backend, rows: Rows, tokens: Ints, watch: TokenWatch, again: Iterable[Replay]
) -> None:
    """As `reading_again`, here and now."""
    at_once(backend, reading_again(rows, tokens, watch, again))


def at_once(backend: Backend, steps: Steps[T]) -> T:
    """Run steps here and now; return what they do."""
    try:
        work = next(steps)
        while True:
            work = steps.send(backend.forward([work])[0])
    except StopIteration as done:
        result: T = done.value
        return result


def reading_again(
    rows: Rows, tokens: Ints, watch: TokenWatch, again: Iterable[Replay]
) -> Steps[None]:
    """Yield what runs ``again`` behind ``rows`` of all ``tokens`` [slot], under ``watch``."""
    n, tally = len(tokens), cast(Replayed, watch.tally)
    first = int(rows.positions[n - 1]) + 1 - n
    watch.until = watch.start = 0
    try:
        for replay in again:
            tally.read(replay)
            rows.reserve(n + len(replay.tokens))
            for start in range(0, len(replay.tokens), PIECE):
                piece = replay.tokens[start : start + PIECE]
                slots = n + start + np.arange(len(piece))
                yield Work(rows, piece, slots, slots + first, observer=watch, at=start)
            rows.truncate(n)
    finally:
        tally.read(None)
        rows.truncate(n)
