"""Which items stand in the context again: by name, by what they say, or by what a question looks at."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvweave.chunk.identity import ChunkId
from kvweave.errors import ChunkNotFound, InvalidArgument
from kvweave.memory.grams import Ranking
from kvweave.memory.ground import Ground
from kvweave.memory.looking import attending
from kvweave.memory.told import RANKED, WAYS, By
from kvweave.run.loop import Task
from kvweave.weave.parts import TextOrTokens

LOOKED_AT = 8  # items whose KV a question looks at, those that rank highest before
LOOKED_THROUGH = 256  # items a call of `look_through` takes


class Recaller:
    """Ranks the items of one memory and puts those that fit between anchors and summaries."""

    def __init__(self, ground: Ground, ranking: Ranking) -> None:
        self.ground, self.ranking = ground, ranking
        self._unseen: list[str] = []  # names to look through
        self.sync()

    # ---- what is known of the items

    def sync(self) -> None:
        """Learn which items there are: some 2 us each."""
        items, known = self.ground.items, self.ranking.known()
        names = items.table.names(items.namespace, items.root + "/")
        for name in known.keys() - set(names):
            self.ranking.remove(name)
        for name in names:
            if name not in known:
                self._learn(name)

    def look_through(self, n: int = LOOKED_THROUGH) -> list[str]:
        """Look which of the next ``n`` items were edited under their names; return all of these."""
        if not self._unseen:
            names = self.ground.items.names()
            self._unseen = [*dict.fromkeys([*self.ranking.known(), *names])]
        seen = self._unseen[-n:]
        for name in seen:
            self._learn(name)
        del self._unseen[-n:]
        return seen

    def forget(self, names: Iterable[str]) -> None:
        """Learn these anew when something is ranked next."""
        for name in names:
            self.ranking.remove(name)

    def _learn(self, name: str) -> None:
        items, record = self.ground.items, self.ground.items.find(name)
        if record is None:
            self.ranking.remove(name)
        elif self.ranking.known().get(name) != record.id and not items.table.is_virtual(record.id):
            self.ranking.add(name, record.id, items.table.tokens(record.id).tolist())

    # ---- ranking

    def ranking_by(self, question: TextOrTokens, by: By) -> Task[list[tuple[str, float]]]:
        """Return whole names and scores, the best first, of what is not in the context otherwise. A
        task of the loop: the model looks beside others.

        By ``name``: ``question`` is a name or a glob; the score is 1. Raises InvalidArgument,
        ChunkNotFound.
        """
        if by not in WAYS:
            raise InvalidArgument("by", f"{by!r} is none of {', '.join(WAYS)}")
        if by == "name":
            if not isinstance(question, str):
                raise InvalidArgument("question", "names are text", "give a name or a glob")
            return [(name, 1.0) for name in self._usable(self.ground.items.names(question))]
        tokens = self.ground.items.encode(question, "user")
        self.sync()
        found = self._ranked(tokens)
        if by == "embedding":
            return found
        names = [name for name, _ in found[:LOOKED_AT]]
        ids = [self.ground.items.get(name).id for name in names]
        scores = yield from attending(self.ground.engine, self.ground.context, ids, tokens)
        return sorted(zip(names, scores, strict=True), key=lambda item: -item[1])

    def _ranked(self, tokens: Sequence[int]) -> list[tuple[str, float]]:
        """Return items by their rank; one that was edited since it was learned is ranked anew."""
        n = 2 * RANKED
        while True:
            found = dict(self.ranking.rank(tokens, n))
            changed = [name for name in found if self._is_stale(name)]
            for name in changed:
                self._learn(name)
            usable = [] if changed else self._usable(list(found))
            if not changed and (len(usable) >= RANKED or len(found) < n):
                return [(name, found[name]) for name in usable[:RANKED]]
            n *= 1 if changed else 4  # many names of one chunk, or what stands in the context

    def _is_stale(self, name: str) -> bool:
        record = self.ground.items.find(name)
        return record is None or record.id != self.ranking.known()[name]

    def _usable(self, names: Sequence[str]) -> list[str]:
        """Leave out what stands in the context already, but for what was recalled, and the second
        of two names of one chunk."""
        ground = self.ground
        there = {p.id for p in ground.context.parts if ground.zones.of(p) != "recalled"}
        found: dict[ChunkId, str] = {}
        for name in names:
            record = ground.items.find(name)
            if record is not None and record.id not in there:
                found.setdefault(record.id, name)
        return list(found.values())

    # ---- placing

    def place(self, names: Sequence[str]) -> list[str]:
        """Let the recalled zone hold those of ``names`` that fit, the first served first, and nothing
        else; return them in the order they stand: the older chunk first. Inside an edit."""
        ground = self.ground
        left, chosen = ground.budget.recalled, []
        for name in names:
            record = ground.items.get(name)
            if record.n_tokens <= left:
                left -= record.n_tokens
                chosen.append((record.id, name))
        wanted = [name for _, name in sorted(chosen)]
        ids = {name: id for id, name in chosen}
        gone, newest = [], -1
        for part in ground.parts("recalled"):  # one that was made again is younger than it stands
            stays = ids.get(part.name) == part.id and part.id > newest
            gone += [] if stays else [part]
            newest = int(part.id) if stays else newest
        if gone:
            ground.context.drop(*gone)
        for name in wanted:
            there = {part.name: part for part in ground.parts("recalled")}
            if name not in there:
                later = [p for p in there.values() if p.id > ids[name]]
                index = ground.context.index(later[0]) if later else self._end()
                ground.place(index, name, "recalled")
        return wanted

    def release(self, pattern: str) -> list[str]:
        """Take recalled items out of the context; return their names. Raises ChunkNotFound."""
        found = set(self.ground.items.names(pattern))
        parts = [part for part in self.ground.parts("recalled") if part.name in found]
        if not parts and "*" not in pattern:
            raise ChunkNotFound(pattern)
        if parts:
            self.ground.context.drop(*parts)
        return [part.name for part in parts]

    def _end(self) -> int:
        """Return the index behind the recalled zone: in front of summaries and turns."""
        return self.ground.first("summary", "turn")
