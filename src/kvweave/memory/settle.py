"""The loop that keeps the window and the summaries within their budgets.

::

    [turn 1][turn 2][turn 3][turn 4]  ->  [summary of 1-2][turn 3][turn 4]      turns 1, 2: items
    [summary][summary][summary]...    ->  [summary of summaries][summary]...    the old ones: items
"""

from __future__ import annotations

from collections.abc import Sequence

from kvweave.errors import InvalidArgument
from kvweave.memory.ground import Ground
from kvweave.memory.summaries import AskModel, Said, Segment, Summariser
from kvweave.run.loop import Task
from kvweave.weave.edits import with_errata
from kvweave.weave.naming import is_message
from kvweave.weave.parts import Part, TextOrTokens

SUMMARY = "sum"  # items: ROOT/CONTEXT/sum-000


class Settling:
    """Turns that leave become items and a summary; summaries that are too many become one."""

    def __init__(self, ground: Ground, summarise: Summariser) -> None:
        self.ground, self.summarise = ground, summarise
        self._n_summaries = 0  # names tried

    @property
    def is_due(self) -> bool:
        """Whether a budget is exceeded by what can go."""
        return bool(self._leaving() or self._folding())

    def settling(self) -> Task[list[str]]:
        """Bring both zones under their budgets; return the names of new items, summaries too. A task
        of the loop: what the model writes is written beside others.

        Each round is one edit. Raises what the summariser raises, and InvalidArgument for a summary
        that is empty or too long; rounds before that have happened then.
        """
        found: list[str] = []
        while parts := self._leaving():
            found += yield from self._round(parts, "summarise")
        while parts := self._folding():
            found += yield from self._round(parts, "summarise summaries")
        return found

    def _leaving(self) -> list[Part]:
        turns = self.ground.turns()
        n = self.ground.budget.leaving([sum(p.n for p in turn) for turn in turns])
        parts = self.ground.context.parts
        leaving = {parts.index(part) for turn in turns[:n] for part in turn}
        return [parts[i] for i in sorted(with_errata(parts, leaving))]

    def _folding(self) -> list[Part]:
        parts = self.ground.parts("summary")
        return parts[: self.ground.budget.folding([part.n for part in parts])]

    def _round(self, parts: Sequence[Part], verb: str) -> Task[list[str]]:
        """Replace parts by one summary where the first of them stood."""
        ground = self.ground
        tokens = yield from self._summary(parts)
        with ground.context.edit(verb):
            names = [self._archive(part) for part in parts]
            index = ground.context.index(parts[0])
            ground.context.drop(*parts)
            name = self._free_name()
            ground.items.bind(name, ground.items.make(tokens, "summary", ground.base))
            ground.place(index, name, "summary")
        return [*(each for each in names if each is not None), name]

    def _summary(self, parts: Sequence[Part]) -> Task[list[int]]:
        """Return the tokens of a summary. Raises InvalidArgument for one that is none."""
        items, limit = self.ground.items, self.ground.budget.summary
        segment = Segment(tuple(self._said(part) for part in parts), limit, self._count)
        if type(self.summarise) is AskModel:  # another may be called in another way
            with self.ground.away():
                content: TextOrTokens = yield from self.summarise.writing(segment)
        else:
            content = self.summarise(segment)
        is_text = isinstance(content, str)
        if not len(content.strip() if isinstance(content, str) else content):
            raise InvalidArgument("summary", "it is empty", "nothing was cleared; try another")
        tokens = items.encode(content.strip() if isinstance(content, str) else content, "user")
        if len(tokens) > limit:
            reason = f"it has {len(tokens)} tokens, {limit} is the most"
            hint = "shorten it with segment.cut(text)" if is_text else "give fewer tokens"
            raise InvalidArgument("summary", reason, hint)
        return tokens

    def _said(self, part: Part) -> Said:
        items = self.ground.items
        record = items.table.get(part.id)
        tokens = items.table.tokens(part.id)[part.start : part.stop]
        if part.virtual:
            return Said(record.kind, part.name, "", (), part.id)
        text = items.decode(tokens)
        return Said(record.kind, part.name, text, tuple(int(t) for t in tokens), part.id)

    def _count(self, content: TextOrTokens) -> int:
        return len(self.ground.items.encode(content, "user"))

    def _archive(self, part: Part) -> str | None:
        """Give a part that leaves a name below the root, instead of the context's; return it. A name that
        is another context's stays.

        None: it is stored under a name already, as a summary is, and somebody's document.
        """
        items, names = self.ground.items, self.ground.context.names
        bound, leaf = items.find(part.name), part.name.rpartition("/")[2]
        is_bound = bound is not None and bound.id == part.id
        is_placed = part.name.startswith(items.root + "/") and not items.is_said(part)
        is_turn = is_message(part.name) and not is_placed if is_bound else part.literal
        if part.n != items.table.get(part.id).n_tokens or not is_turn:
            return None
        name = items.free(items.own + (leaf if is_bound else "text"))
        items.bind(name, part.id)
        if is_bound and names.gives(part.name):
            items.unbind(part.name)
        return name

    def _free_name(self) -> str:
        items, stem = self.ground.items, f"{self.ground.items.own}{SUMMARY}"
        while items.find(items.full(f"{stem}-{self._n_summaries:03d}")) is not None:
            self._n_summaries += 1
        return items.full(f"{stem}-{self._n_summaries:03d}")
