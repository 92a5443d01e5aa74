"""One pass over works of several contexts, whatever calls the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from kvweave.errors import ContextTooLong
from kvweave.interrupts import let_in
from kvweave.run import attention
from kvweave.run.base import Work
from kvweave.run.batch import Batch


def one_pass(
    works: Sequence[Work], limit: int, make: Callable[[], Batch], call: Callable[[Batch], Tensor]
) -> list[Tensor]:
    """Run works in one pass; return each one's logits [want, vocab].

    Args:
        works: of different contexts.
        limit: positions that the model has.
        make: makes the batch of them.
        call: calls the model, while its attention reads that batch.

    Raises ContextTooLong before anything is written.
    """
    last = max(int(work.positions[-1]) for work in works)
    if last >= limit:
        raise ContextTooLong(last + 1, limit)
    let_in()
    batch = make()
    token = attention.current.set(batch)
    try:
        batch.begin()
        found = call(batch)
        batch.end()
    finally:
        attention.current.reset(token)
    return batch.split(found)
