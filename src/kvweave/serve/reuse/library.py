"""What the chunks of each namespace say, to be found again in a prompt.

By runs of tokens at any offset (`Matcher`), and answers also by their text: a client sends back
text, and the model may have written it with other tokens than the tokenizer would.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvweave.chunk.identity import ChunkId
from kvweave.chunk.match import Match, Matcher
from kvweave.chunk.rolling import Tokens
from kvweave.chunk.table import Table
from kvweave.serve.reuse.latest import LatestOfEach
from kvweave.serve.reuse.said import Answers

MAX_ANSWERS = 10_000  # texts of answers that are remembered, the latest


class Library:
    """Finds the chunks of a table; each namespace by itself. Used in the driver's thread only."""

    def __init__(self, table: Table, width: int = 16) -> None:
        """Learn all chunks there are; ``width`` is the shortest run that is found, in tokens."""
        self.table, self.width, self.said = table, width, Answers()
        self._matchers: dict[str, Matcher] = {}
        self._answers: LatestOfEach[tuple[ChunkId | None, str], tuple[ChunkId, ...]] = LatestOfEach(
            MAX_ANSWERS
        )
        self.sync()

    def sync(self) -> None:
        """Learn every chunk of the table that is not known yet; takes one pass over all."""
        for record in self.table:
            self.note(record.namespace, record.id)

    def note(self, namespace: str, id: ChunkId) -> None:
        """Learn a chunk of ``namespace``; doing it twice does nothing. Raises ChunkNotFound."""
        matcher = self._matchers.get(namespace)
        if matcher is None:
            matcher = self._matchers[namespace] = Matcher(self.width)
        if id not in matcher:
            matcher.add(id, self.table.tokens(id))

    def find(self, namespace: str, tokens: Sequence[int] | Tokens) -> list[Match]:
        """Return what of ``tokens`` is in chunks of ``namespace``: in order, not overlapping.

        Chunks the table no longer has are forgotten when they are met here.
        """
        matcher = self._matchers.get(namespace)
        while matcher is not None:
            found = matcher.find(tokens)
            gone = {m.id for m in found if not self.is_here(namespace, m.id)}
            if not gone:
                return found
            for id in gone:
                matcher.remove(id)
        return []

    def is_here(self, namespace: str, id: ChunkId) -> bool:
        """Tell whether the table has this chunk in this namespace."""
        return self.table.lookup(f"#{id}", namespace) is not None

    def note_answer(self, namespace: str, text: str, ids: tuple[ChunkId, ...]) -> None:
        """Remember that a message of this text is these chunks, all of one base."""
        self._answers.note(namespace, (self.table.get(ids[0]).base, text), ids)

    def find_answer(self, namespace: str, base: ChunkId | None, text: str) -> tuple[ChunkId, ...]:
        """Return the chunks that are an answer of this text, put after ``base``; () for none."""
        ids = self._answers.find(namespace, (base, text)) or ()
        return ids if all(self.is_here(namespace, id) for id in ids) else ()

    def expire(self, before: float) -> None:
        """Forget the texts of answers that were not used since ``before``."""
        self._answers.expire(before)
        self.said.expire(before)
