"""The verbs of a context that a running answer uses: it knows no more of it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from kvweave.chunk.identity import Kind
from kvweave.weave.costs import AnswerCost, Costs
from kvweave.weave.parts import Mode, Part, Snapshot, TextOrTokens
from kvweave.weave.plan import Plan


class Editor(Protocol):
    """What a running answer asks of the context it is an answer of."""

    name: str
    closed: bool
    costs: Costs

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts in order."""
        ...

    def edit(self, verb: str = "edit") -> AbstractContextManager[object]:
        """Batch edits: all of them happen, or none."""
        ...

    def append(
        self, content: TextOrTokens, *, kind: Kind = "document", label: str | None = None
    ) -> Part:
        """Add text or token ids at the end."""
        ...

    def answer_part(self, kind: Kind, tokens: Sequence[int]) -> Part:
        """Add tokens the model wrote."""
        ...

    def drop(self, *refs: str | int | Part, mode: Mode | None = None) -> None:
        """Remove parts."""
        ...

    def leave(self, *ranges: tuple[int, int]) -> None:
        """Leave only these ranges of the context's tokens."""
        ...

    def snapshot(self) -> Snapshot:
        """Return the parts as they are."""
        ...

    def restore(self, snapshot: Snapshot) -> None:
        """Bring back the parts of a snapshot."""
        ...

    def answered(self, plan: Plan, n_tokens: int) -> AnswerCost:
        """Note an answer of so many tokens in the ledger."""
        ...

    def wove(self, parts: tuple[Part, ...], plan: Plan) -> None:
        """Note what the weave before it did."""
        ...
