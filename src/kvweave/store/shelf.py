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
import time
from collections.abc import Iterable

from kvweave.errors import InvalidArgument, LoadFailed, OverBudget, StoreError
from kvweave.keep.base import Policy
from kvweave.store.arriving import Arriving
from kvweave.store.codec import CodecSpec
from kvweave.store.holdings import Holdings
from kvweave.store.kv import KV
from kvweave.store.level import Level
from kvweave.store.patches import Patch, Patches, PatchKey
from kvweave.store.ram import Exact, Ram, Stretches
from kvweave.store.tier.base import Outcome

HIGH, LOW = 0.9, 0.8  # of the budget: over the first, what is over the second is written behind
log = logging.getLogger("kvweave.store")


class Shelf(Holdings):
    """Holds KV by chunk id within ``budget`` bytes of memory, and below it where ``mover`` says."""

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
        level = self.level(tier)
        if tier == "none":
            self._goes(key, "none", 0)
            self.drop(key)
            return 0
        kv = self.get(key)
        if kv is None:
            return 0
        if level is None:
            self._goes(key, self.memory, kv.n_bytes)
            self.mover.drop(key)
            return kv.n_bytes
        level.confirm(key, time.monotonic() + self.mover.seconds)  # what is in memory goes
        self.mover.save(key, kv, on=level, choice=choice)
        return self._leave(key, level)

    def _goes(self, key: int, tier: str, n_bytes: int) -> None:
        """Have the index keep first that a chunk is on no level: whose process dies in between has no
        KV that is counted on and gone."""
        self.on_tier(key, tier, n_bytes)
        if self.mover.level_of(key) is not None:
            self.mover.told()

    def sink(self, keys: Iterable[int]) -> None:
        """Move what is only in memory below, to the first level that has room.

        Raises OverBudget where none had room for some, when all others are there; StoreError.
        """
        levels = [level for level in self.mover.levels if level.place != "ram"]
        over: OverBudget | None = None
        for key in keys if levels else ():
            kv = self.get(key) if key in self.ram else None
            if kv is None:
                continue
            tried = None
            for level in levels:
                try:
                    self.mover.save(key, kv, on=level)
                except OverBudget as error:
                    tried = error
                else:
                    self._leave(key, level)
                    break
            else:
                over = over or tried
        if over is not None:
            raise over

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

    def put_in_context(self, key: int, seen: Stretches, kv: KV) -> None:
        """Keep exact in-context KV, the latest one per chunk; skipped when memory is short."""
        old = self._in_context.get(key)
        freed = old.n_bytes if old else 0
        if self.n_bytes - freed + kv.n_bytes <= self.budget:
            self._in_context.put(
                key, Exact(seen, kv.clone())
            )  # a view would keep all of its buffer
            self.on_in_context(key, seen)

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
            if self.mover.beside(self.ram) and self.mover.let_go(self.ram):
                return self.reserve(n_bytes)
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

    def close(self) -> None:
        """Let go of all that is in memory, whoever still knows this shelf, and close what is below."""
        self.ram, self._in_context, self.patches = Ram(), Ram(), Patches(0)
        self.mover.close()
