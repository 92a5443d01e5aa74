"""From what a transaction changed to the rows that make the journal say the same."""

from __future__ import annotations

from collections.abc import Collection

from kvweave.chunk.changes import Changes
from kvweave.chunk.format import tokens_sum
from kvweave.chunk.identity import ChunkId
from kvweave.chunk.journal import WriteBatch
from kvweave.chunk.record import to_row
from kvweave.chunk.state import IndexState


def make_batch(state: IndexState, changes: Changes, uses: Collection[ChunkId]) -> WriteBatch:
    """Return the rows to write so that the journal is as ``state`` is, where it changed.

    ``uses`` are the chunks whose use statistics are written besides.
    """
    batch, records = WriteBatch(), state.records
    for id in changes.chunks:
        record = records.get(id)
        if record is None:
            batch.drop_chunks.append((id,))
        else:
            batch.put_chunks.append(to_row(record))
    for namespace, name in changes.names:
        bound = state.names[namespace].get(name)
        if bound is None:
            batch.drop_names.append((namespace, name))
        else:
            batch.put_names.append((namespace, name, bound))
    for id, data in changes.tokens.items():
        if id in records:
            batch.put_tokens.append((id, tokens_sum(id, data), data))
    for id in uses:
        record = records.get(id)
        if record is not None:
            batch.uses.append(to_row(record))
    return batch
