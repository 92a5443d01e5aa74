"""What a memory does while nobody asks: one bounded step a call."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable

from kvweave.chunk.identity import TierName
from kvweave.chunk.record import Record
from kvweave.memory.ground import Ground
from kvweave.memory.told import Slept
from kvweave.run.loop import Task

Compress = Callable[[str], object]  # given an item's whole name; it may bind the name anew
LOOKED_THROUGH = 16  # items a call looks through at most before it finds one to lay down


class Sleep:
    """Which items' KV is in memory, the one used longest ago first; those over ``budget.warm``
    tokens lie down."""

    def __init__(self, ground: Ground, compress: Compress | None = None) -> None:
        self.ground, self.compress = ground, compress
        self._warm: OrderedDict[str, int] = OrderedDict()  # whole name -> tokens
        self._n_warm = 0
        self._new: deque[str] = deque()  # written, perhaps without canonical KV
        items = ground.items
        for name in items.table.names(items.namespace, items.root + "/"):
            record = items.find(name)
            if record is not None and record.tier == ground.engine.shelf.memory:
                self.used(name)

    @property
    def cold(self) -> TierName:
        """The tier items lie on: the first below memory, or only tokens are kept where none is."""
        levels = self.ground.engine.shelf.mover.levels
        below: TierName = levels[0].place if levels else "none"  # type: ignore[assignment]
        return self.ground.budget.cold or below

    def used(self, name: str) -> None:
        """Note that an item's KV is in memory now, or will be."""
        record = self.ground.items.find(name)
        self._forget(name)
        if record is not None:
            self._warm[name] = record.n_tokens
            self._n_warm += record.n_tokens

    def notice(self, names: Iterable[str]) -> bool:
        """Count those whose KV is in memory and that others brought there, or named so; tell if any."""
        memory, found = self.ground.engine.shelf.memory, False
        for name in names if self.cold != memory else ():
            record = self._there(name)
            if record is None or record.tier != memory or self._warm.get(name) == record.n_tokens:
                continue
            if not record.pinned and self.ground.engine.maker.thinned_by(record.id) is None:
                self.used(name)
                found = True
        return found

    def wrote(self, name: str) -> None:
        """Note an item that may have no canonical KV yet."""
        self._new.append(name)
        self.used(name)

    def stepping(self) -> Task[Slept | None]:
        """Do the next thing; None: there was nothing to do. A task of the loop. Raises what the hook
        and tiers raise, the item stays where it was then."""
        return (yield from self._denoising()) or self._lay_down()

    def _denoising(self) -> Task[Slept | None]:
        while self._new:
            name = self._new.popleft()
            try:
                n = yield from self._computing(name)
            except GeneratorExit:  # given up: another time
                self._new.appendleft(name)
                raise
            if n:
                return Slept("denoise", name, n)
        return None

    def _computing(self, name: str) -> Task[int]:
        """Compute canonical KV of an item, and before that of its base, where it is missing."""
        maker, n = self.ground.engine.maker, 0
        for of in ("base", "id"):
            record = self._there(name)
            if record is not None and (id := getattr(record, of)) is not None:
                n = yield from maker.computing(id, record.namespace)
        return n

    def _lay_down(self) -> Slept | None:
        ground, held = self.ground, {part.id for part in self.ground.context.parts}
        for _ in range(LOOKED_THROUGH):
            if self._n_warm <= ground.budget.warm or not self._warm:
                return None
            name = next(iter(self._warm))
            record = self._there(name)
            if record is None or record.pinned:
                self._forget(name)
            elif record.id in held:
                self._warm.move_to_end(name)
            elif record.tier != ground.engine.shelf.memory:
                self._forget(name)
            else:
                return self._place(name, record)
        return None

    def _place(self, name: str, record: Record) -> Slept:
        if self.compress is not None:
            self.compress(name)
            now = self._there(name)
            if now is not None and self.ground.engine.maker.thinned_by(now.id) is not None:
                self._forget(name)  # thinned rows rest in memory
                return Slept("compress", name, record.n_tokens)
        self.ground.engine.place(name, self.cold, namespace=self.ground.items.namespace)
        self._forget(name)
        return Slept("place", name, record.n_tokens)

    def _forget(self, name: str) -> None:
        self._n_warm -= self._warm.pop(name, 0)

    def _there(self, name: str) -> Record | None:
        record = self.ground.items.find(name)
        return None if record is None or self.ground.items.table.is_virtual(record.id) else record
