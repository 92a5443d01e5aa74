"""What KV there is and where, in memory and below it, as far as it can be asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvweave.errors import InvalidArgument
from kvweave.keep.base import UNKNOWN, Facts, Policy
from kvweave.store.arriving import Arriving
from kvweave.store.kv import KV
from kvweave.store.level import Level
from kvweave.store.mover import Mover
from kvweave.store.patches import Patches
from kvweave.store.ram import Exact, Ram, Stretches
from kvweave.store.record.transfer import Expected, codec_of, losses

PATCHES = 8  # the part of the budget that patches may take is one in so many


def _nothing(id: int) -> Expected:
    raise AssertionError(f"#{id} is on no level: there is none")


class Holdings:
    """What a shelf can tell. Nothing here changes anything."""

    def __init__(
        self,
        budget: int,
        policy: Policy,
        mover: Mover | None = None,
        is_pinned: Callable[[int], bool] = lambda key: False,
        memory: str = "ram",
    ) -> None:
        self.budget = budget
        self.policy = policy
        self.mover = Mover((), _nothing) if mover is None else mover
        self.mover.on_tier = self._sunk
        self.ram: Ram[int, KV] = Ram()
        self.patches = Patches(budget // PATCHES)
        self.is_pinned = is_pinned
        self.memory = memory  # "gpu" where the model's device is one
        self.facts: Callable[[int], Facts] = lambda key: UNKNOWN
        self.session = ""  # whose weave is using chunks now
        self.on_tier: Callable[[int, str, int], None] = lambda key, tier, n_bytes: None
        self.on_in_context: Callable[[int, Stretches], None] = lambda key, seen: None
        self._in_context: Ram[int, Exact] = Ram()
        self._charged: dict[str, int] = {}  # context name -> bytes of its rows
        self.may_charge: Callable[[str, int], None] = lambda context, n_bytes: None
        self._n_charged = 0  # of all
        self.spare: Callable[[], None] = lambda: None  # lets go of what may wait, for others' room
        self._busy: set[int] = set()  # chunks a weave is reading: not to be let go of now
        self._to_clean = 0  # bytes stored since the last look for what to write behind

    @property
    def n_bytes(self) -> int:
        """Bytes of memory in use."""
        beside = self._in_context.n_bytes + self.patches.n_bytes + self.mover.beside(self.ram)
        return self.ram.n_bytes + beside + self._n_charged

    @property
    def room(self) -> int:
        """Bytes of memory that nothing has; below 0 where more is in use than the budget."""
        return self.budget - self.n_bytes

    def levels(self) -> list[tuple[str, int, int | None]]:
        """Return place, bytes used and budget of memory and of every level below."""
        below = [(x.place, x.n_bytes, x.budget) for x in self.mover.levels]
        return [(self.memory, self.n_bytes, self.budget), *below]

    def tier(self, key: int) -> str:
        """Return where the canonical KV is: ram (gpu), disk, remote or none."""
        if key in self.ram:
            return self.memory
        level = self.mover.level_of(key)
        return "none" if level is None else level.place

    def at_hand(self, key: int) -> KV | None:
        """Return the canonical KV that is in memory, all of it; nobody counts it as used."""
        kv = self.ram.get(key)
        return None if isinstance(kv, Arriving) else kv

    def is_lossy(self, key: int) -> bool:
        """Tell whether the canonical KV that there is went through a codec that loses something."""
        kv = self.ram.get(key)
        if kv is not None:
            return kv.lossy
        level = self.mover.level_of(key)
        return level is not None and level.lossy(key)

    def thinned(self, key: int) -> bool:
        """Tell whether canonical KV of a chunk is of some of its rows only, wherever it is."""
        kv = self.ram.get(key)
        return self.mover.about(key).n_rows is not None if kv is None else kv.kept is not None

    def codec(self, key: int) -> str:
        """Return what the canonical KV that there is went through: raw, a codec's name, or lossy where its
        record is gone, or something was lost before it went through that."""
        if not self.is_lossy(key):
            return "raw"
        level = self.mover.level_of(key)
        record = "" if level is None else level.held[key].key
        return codec_of(record) if record and losses(record) == 1 else "lossy"

    def durable_level(self) -> Level | None:
        """Return the first level that keeps what it has for us, None if none does."""
        return next((level for level in self.mover.levels if level.keeps), None)

    def level(self, tier: str) -> Level | None:
        """Return the level of a place, None for memory and for none. Raises InvalidArgument for a place
        that this engine has not."""
        if tier in (self.memory, "none"):
            return None
        places = {level.place: level for level in reversed(self.mover.levels)}
        if tier in places:
            return places[tier]
        if tier == "disk" and not places:
            raise InvalidArgument("tier", "this engine has no home directory", "pass home=")
        *first, last = self.memory, *places, "none"
        hint = f"use {', '.join(first)} or {last}"
        raise InvalidArgument("tier", f"{tier!r} is not available here", hint)

    def in_context(self, key: int, seen: Stretches) -> KV | None:
        """Return exact in-context KV computed after exactly ``seen``."""
        found = self._in_context.get(key)
        return found.kv if found is not None and found.seen == seen else None

    def _sunk(self, key: int, place: str, n_bytes: int) -> None:
        if key not in self.ram:
            self.on_tier(key, place, n_bytes)

    def charged(self) -> Iterator[tuple[str, int]]:
        """Yield contexts and the bytes of their rows."""
        yield from self._charged.items()

    def check_integrity(self) -> None:
        """Raise AssertionError when accounting and content differ."""
        self.ram.check_integrity()
        self._in_context.check_integrity()
        assert self._n_charged == sum(self._charged.values()), "rows of contexts"
        self.patches.check_integrity()
        self.mover.check_integrity()
        assert self.n_bytes <= self.budget, f"{self.n_bytes} bytes over {self.budget}"
