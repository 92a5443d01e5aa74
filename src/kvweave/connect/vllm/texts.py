"""The text of stored chunks, for content parts that name them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kvweave.chunk.record import Record
from kvweave.engine import Engine
from kvweave.errors import KVWeaveError

FoundText = (
    tuple[int, str | None] | None
)  # tokens of a chunk, and its text; None: there is no chunk
MOST_READ = 8192  # tokens decoded in one call: others' steps wait meanwhile
MOST_KEPT = 1 << 20  # characters of texts that are remembered


class ChunkTexts:
    """Chunks as text that has their tokens again. Used in the worker's main thread only."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._known: OrderedDict[bytes, str | None] = OrderedDict()  # by digest
        self._n_kept = 0

    def of(self, names: Sequence[str], namespace: str) -> list[FoundText]:
        """Return what is found of the first of ``names``: one at least, and no more than take a moment."""
        found: list[FoundText] = []
        n_read = 0
        for name in names:
            record = self._record(name, namespace)
            if record is None:
                return [*found, None]
            n_read += 0 if record.digest in self._known else record.n_tokens
            if found and n_read > MOST_READ:
                break
            found.append((record.n_tokens, self._text(record)))
        return found

    def _record(self, name: str, namespace: str) -> Record | None:
        try:
            return self.engine.table.lookup(name, namespace)
        except KVWeaveError:  # no name at all
            return None

    def _text(self, record: Record) -> str | None:
        """Return a chunk's text; None where text does not have these tokens."""
        if record.digest in self._known:
            self._known.move_to_end(record.digest)
            return self._known[record.digest]
        tokenizer, text = self.engine.runner.tokenizer, None
        if tokenizer is not None:
            ids = [int(token) for token in self.engine.table.tokens(record.id)]
            text = str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))
            if self.engine.maker.tokens(text) != ids:
                text = None
        self._known[record.digest] = text
        self._n_kept += len(text or "")
        while self._n_kept > MOST_KEPT and len(self._known) > 1:
            self._n_kept -= len(self._known.popitem(last=False)[1] or "")
        return text
