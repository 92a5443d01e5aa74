"""Where the KV of chunks is: canonical KV in memory and on the levels below it, exact in-context KV
beside it, one budget.

The budget counts memory: canonical rows, in-context rows, patches, and the rows of woven contexts.
When it is reached, patches and in-context KV go first (the canonical rows can stand for them), then
canonical KV of unpinned chunks in the policy's order: one level down when there is one, else only
the tokens stay and the chunk is prefilled again when it is needed. Above a watermark the chunks that
would go first are written behind, so that letting go of them is free.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator

from kvweave.errors import InvalidArgument, LoadFailed, OverBudget, StoreError
from kvweave.keep.base import UNKNOWN, Facts, Policy
from kvweave.store.arriving import Arriving
from kvweave.store.codec import CodecSpec
from kvweave.store.kv import KV
from kvweave.store.level import Level
from kvweave.store.mover import Mover
from kvweave.store.patches import Patch, Patches, PatchKey
from kvweave.store.ram import Exact, Ram, Stretches
from kvweave.store.record.transfer import Expected, codec_of
from kvweave.store.tier.base import Outcome

PATCHES = 8  # the part of the budget that patches may take is one in so many
HIGH, LOW = 0.9, 0.8  # of the budget: over the first, what is over the second is written behind
log = logging.getLogger("kvweave.store")


def _nothing(id: int) -> Expected:
    raise AssertionError(f"#{id} is on no level: there is none")


class Shelf:
    """Holds KV by chunk id within ``budget`` bytes of memory, and below it where ``mover`` says."""

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
        self.ram: Ram[KV] = Ram()
        self.patches = Patches(budget // PATCHES)
        self.is_pinned = is_pinned
        self.memory = memory  # "gpu" where the model's device is one
        self.facts: Callable[[int], Facts] = lambda key: UNKNOWN
        self.session = ""  # whose weave is using chunks now
        self.on_tier: Callable[[int, str, int], None] = lambda key, tier, n_bytes: None
        self.on_in_context: Callable[[int, Stretches], None] = lambda key, seen: None
        self._in_context: Ram[Exact] = Ram()
        self._charged: dict[str, int] = {}  # context name -> bytes of its rows
        self.may_charge: Callable[[str, int], None] = lambda context, n_bytes: None
        self._n_charged = 0  # of all
        self.spare: Callable[[], None] = lambda: None  # lets go of what may wait, for others' room
        self._busy: set[int] = set()  # chunks a weave is reading: not to be let go of now
        self._to_clean = 0  # bytes stored since the last look for what to write behind

    @property
    def n_bytes(self) -> int:
        """Bytes of memory in use."""
        beside = self._in_context.n_bytes + self.patches.n_bytes
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
        """Return what the canonical KV that there is went through: raw, a codec's name, or lossy
        where its record is gone."""
        if not self.is_lossy(key):
            return "raw"
        level = self.mover.level_of(key)
        found = "raw" if level is None else codec_of(level.held[key].key)
        return "lossy" if found == "raw" else found

    def put(self, key: int, kv: KV) -> None:
        """Keep canonical KV in memory. Raises OverBudget, with nothing changed."""
        if key not in self.ram:
            self.policy.missed(key, kv.n_bytes)
        self.reserve(kv.n_bytes)
        self.ram.put(key, kv)
        self.policy.used(key, kv.n_bytes, self.facts(key))
        self.on_tier(key, self.memory, kv.n_bytes)
        self._to_clean += kv.n_bytes
        if self.mover.levels and self._to_clean > self.budget // 100:
            self._clean()

    def begin(self, keys: Iterable[int]) -> None:
        """Begin to bring chunks to memory; `get` waits for what is not there yet.

        Room for all is made before anything is read. Raises OverBudget.
        """
        away = [k for k in dict.fromkeys(keys) if k not in self.ram and self.mover.level_of(k)]
        if away:
            self.reserve(sum(self.mover.about(key).n_bytes for key in away))
            for key, kv in self.mover.load(away).items():
                self.put(key, kv)

    def get(self, key: int, *, wait: bool = True) -> KV | None:
        """Return canonical KV, brought to memory if need be; None if it is nowhere.

        Without ``wait`` it may still be arriving, and asking for a layer can raise LoadFailed: say
        so to `lost`.
        """
        self.begin([key])
        kv = self.ram.get(key)
        if isinstance(kv, Arriving) and (wait or kv.load.ended):
            kv = self._landed(key, kv)
        if kv is not None:
            facts = self.facts(key)
            self.policy.used(key, kv.n_bytes, facts)
            level = self.mover.level_of(key)
            if level is not None:
                level.used(key, facts)
        return kv

    def lost(self, error: LoadFailed) -> None:
        """Note that a chunk could not be loaded: it is nowhere, and computed when it is needed."""
        key = int(str(error.id))
        self.ram.pop(key)
        self.policy.dropped(key)
        state, _, why = str(error.reason).partition(": ")
        known = state in ("late", "missing", "wrong")
        self.mover.failed(key, Outcome(state if known else "failed", why or state))  # type: ignore[arg-type]
        self.on_tier(key, self.tier(key), 0)

    def place(self, key: int, tier: str, choice: CodecSpec | None = None) -> int:
        """Move canonical KV to ``tier`` and return its bytes there; 0 when there is none yet.

        ``choice`` codes it otherwise than the level does. Raises InvalidArgument, OverBudget, StoreError.
        """
        level = self._level(tier)
        if tier == "none":
            self.drop(key)
            self.on_tier(key, "none", 0)
            return 0
        kv = self.get(key)
        if kv is None:
            return 0
        if level is None:
            self.mover.drop(key)
            self.on_tier(key, self.memory, kv.n_bytes)
            return kv.n_bytes
        self.mover.save(key, kv, on=level, choice=choice)
        return self._leave(key, level)

    def sink(self, keys: Iterable[int]) -> None:
        """Move what is only in memory to the first level that is not, if there is one."""
        below = next((x.place for x in self.mover.levels if x.place != "ram"), None)
        for key in keys if below is not None else ():
            if key in self.ram and below is not None:
                self.place(key, below)

    def durable_level(self) -> Level | None:
        """Return the first level that keeps what it has for us, None if none does."""
        return next((level for level in self.mover.levels if level.keeps), None)

    def save(self, key: int) -> None:
        """Have canonical KV on the first level that keeps it, durably; it stays in memory too.

        Where others use that level, what is not committed may be swept: save again after it is.

        Raises OverBudget when it does not fit there, StoreError when it cannot be written, and
        InvalidArgument when there is no level that keeps anything for us.
        """
        if not self.mover.levels:
            raise InvalidArgument("durable", "there is no home directory", "pass home=")
        first = self.durable_level()
        if first is None:
            reason = "what is below memory here is a cache that others may empty"
            raise InvalidArgument("durable", reason, "pass home=, or shared=yes with its path=")
        kv = self.get(key)
        if kv is None:
            raise LoadFailed(key, "failed: it has no KV now")
        self.mover.save(key, kv, on=first, durable=True)

    def require_tier(self, tier: str) -> None:
        """Raise InvalidArgument for a place that this engine has not."""
        self._level(tier)

    def _level(self, tier: str) -> Level | None:
        """Return the level of a place, None for memory and for none."""
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

    def put_in_context(self, key: int, seen: Stretches, kv: KV) -> None:
        """Keep exact in-context KV, the latest one per chunk; skipped when memory is short."""
        old = self._in_context.get(key)
        freed = old.n_bytes if old else 0
        if self.n_bytes - freed + kv.n_bytes <= self.budget:
            self._in_context.put(
                key, Exact(seen, kv.clone())
            )  # a view would keep all of its buffer
            self.on_in_context(key, seen)

    def in_context(self, key: int, seen: Stretches) -> KV | None:
        """Return exact in-context KV computed after exactly ``seen``."""
        found = self._in_context.get(key)
        return found.kv if found is not None and found.seen == seen else None

    def put_patch(self, key: PatchKey, patch: Patch) -> None:
        """Keep a patch; older ones make room, nothing else does."""
        self.patches.put(key, patch, self.budget - self.n_bytes)

    def drop(self, key: int) -> None:
        """Let go of all KV of a chunk."""
        self.ram.pop(key)
        self.patches.drop(key)
        self.mover.drop(key)
        self._in_context.pop(key)
        self.policy.dropped(key)

    def charge(self, context: str, n_bytes: int) -> None:
        """Set the bytes a context's rows take; ``may_charge`` is asked before they grow.

        Raises OverBudget, and what that raises, with nothing changed.
        """
        more = n_bytes - self._charged.get(context, 0)
        if more > 0:
            self.may_charge(context, n_bytes)
            self.reserve(more)
        self._charged[context] = n_bytes
        self._n_charged += more
        if n_bytes == 0:
            del self._charged[context]

    def charged(self) -> Iterator[tuple[str, int]]:
        """Yield contexts and the bytes of their rows."""
        yield from self._charged.items()

    def busy(self, keys: Iterable[int], session: str = "") -> None:
        """Declare which chunks must stay in memory until the next call, and who uses them."""
        self._busy, self.session = set(keys), session

    def pruned(self, keys: Iterable[int]) -> None:
        """Tell the policies that a context let go of chunks."""
        for key in keys:
            for policy in self._policies():
                policy.pruned(key)

    def ended(self, session: str) -> None:
        """Tell the policies that whoever used chunks is gone."""
        for policy in self._policies():
            policy.ended(session)

    def upcoming(self, keys: Iterable[int]) -> None:
        """Tell the policies what will be used next, soonest first."""
        wanted = list(keys)
        for policy in self._policies():
            policy.upcoming(wanted)

    def _policies(self) -> list[Policy]:
        return [self.policy, *(level.policy for level in self.mover.levels)]

    def reserve(self, n_bytes: int) -> None:
        """Make room for ``n_bytes``. Raises OverBudget before letting go of anything."""
        if n_bytes > self.room:
            self.spare()
        short = n_bytes - self.room
        if short <= 0:
            return
        loose = self._in_context.n_bytes + self.patches.n_bytes
        victims, freed = [], 0
        for key in self.policy.victims() if short > loose else ():
            kv = self.ram.get(key)
            if kv is None or not self._may_go(key):
                continue
            victims.append(key)
            freed += kv.n_bytes
            if short <= loose + freed:
                break
        if short > loose + freed:
            raise OverBudget(self.n_bytes + n_bytes, self.budget, loose + freed)
        short -= self.patches.shrink(short)
        for key in list(self._in_context):
            if short <= 0:
                return
            short -= self._in_context.pop(key)
            self.on_in_context(key, ())
        for key in victims:
            self._let_go(key)

    def _may_go(self, key: int) -> bool:
        return key not in self._busy and not self.is_pinned(key)

    def _let_go(self, key: int) -> None:
        """Let go of what is in memory; a chunk that no level takes is computed again one day."""
        kv = self.ram.get(key)
        assert kv is not None
        if isinstance(kv, Arriving):  # it is below already
            level = self.mover.level_of(key)
        else:
            try:
                level = self.mover.save(key, kv) if self.mover.levels else None
            except (OverBudget, StoreError) as error:
                log.warning("#%s is let go of: %s", key, error.__cause__ or error)
                level = None
        self._leave(key, level)

    def _leave(self, key: int, level: Level | None) -> int:
        self.ram.pop(key)
        self.policy.evicted(key)
        n_bytes = 0 if level is None else level.held[key].n_bytes
        self.on_tier(key, "none" if level is None else level.place, n_bytes)
        return n_bytes

    def _landed(self, key: int, kv: Arriving) -> KV | None:
        """Wait for all of it; None if it did not come."""
        try:
            whole = kv.whole()
        except LoadFailed as error:
            self.lost(error)
            return None
        self.ram.put(key, whole)
        return whole

    def _sunk(self, key: int, place: str, n_bytes: int) -> None:
        if key not in self.ram:
            self.on_tier(key, place, n_bytes)

    def _clean(self) -> None:
        """Have what would go first written behind, while memory is nearly full."""
        self._to_clean = 0
        over = self.n_bytes - int(LOW * self.budget)
        for key in self.policy.victims() if self.n_bytes > HIGH * self.budget else ():
            kv = self.ram.get(key)
            if over <= 0:
                return
            if kv is None or isinstance(kv, Arriving) or not self._may_go(key):
                continue
            over -= kv.n_bytes
            if self.mover.level_of(key) is None and not self.mover.clean(key, kv):
                return

    def check_integrity(self) -> None:
        """Raise AssertionError when accounting and content differ."""
        self.ram.check_integrity()
        self._in_context.check_integrity()
        assert self._n_charged == sum(self._charged.values()), "rows of contexts"
        self.patches.check_integrity()
        self.mover.check_integrity()
        assert self.n_bytes <= self.budget, f"{self.n_bytes} bytes over {self.budget}"
