"""Where the KV of chunks is: canonical KV on tiers, exact in-context KV beside it, one budget.

The budget counts memory: canonical rows, in-context rows, patches, and the rows of woven contexts.
When it is reached, patches and in-context KV go first (the canonical rows can stand for them), then
canonical KV of unpinned chunks in the policy's order: to disk when there is one, else only the
tokens stay and the chunk is prefilled again when it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvweave.errors import InvalidArgument, OverBudget
from kvweave.keep.base import Policy
from kvweave.store.disk import Disk
from kvweave.store.kv import KV
from kvweave.store.patches import Key, Patch, Patches
from kvweave.store.ram import Ram

PATCHES = 8  # the part of the budget that patches may take is one in so many

# What KV was computed after: (id, its position minus ours, and, of chunks, which tokens)
Seen = tuple[tuple[int, ...], ...]


class Shelf:
    """Holds KV by chunk id within ``budget`` bytes of memory."""

    def __init__(
        self,
        budget: int,
        policy: Policy,
        disk: Disk | None = None,
        is_pinned: Callable[[int], bool] = lambda key: False,
        memory: str = "ram",
    ) -> None:
        self.budget = budget
        self.policy = policy
        self.disk = disk
        self.ram = Ram()
        self.patches = Patches(budget // PATCHES)
        self.is_pinned = is_pinned
        self.memory = memory  # "gpu" where the model's device is one
        self.on_tier: Callable[[int, str, int], None] = lambda key, tier, n_bytes: None
        self.on_in_context: Callable[[int, Seen], None] = lambda key, seen: None
        self._in_context: dict[int, tuple[Seen, KV]] = {}
        self._charged: dict[str, int] = {}  # context name -> bytes of its rows
        self._busy: set[int] = set()  # chunks a weave is reading: not to be let go of now

    @property
    def n_bytes(self) -> int:
        """Bytes of memory in use."""
        in_context = sum(kv.n_bytes for _, kv in self._in_context.values())
        charged = sum(self._charged.values())
        return self.ram.n_bytes + in_context + self.patches.n_bytes + charged

    def tier(self, key: int) -> str:
        """Return where the canonical KV is: ram (gpu), disk or none."""
        if key in self.ram:
            return self.memory
        return "disk" if self.disk is not None and key in self.disk else "none"

    def put(self, key: int, kv: KV) -> None:
        """Keep canonical KV in memory. Raises OverBudget, with nothing changed."""
        if key not in self.ram:
            self.policy.missed(key, kv.n_bytes)
        self.reserve(kv.n_bytes)
        self.ram.put(key, kv)
        self.policy.used(key, kv.n_bytes)
        self.on_tier(key, self.memory, kv.n_bytes)

    def get(self, key: int) -> KV | None:
        """Return canonical KV, brought to memory from disk if need be; None if it is nowhere."""
        kv = self.ram.get(key)
        if kv is None and self.disk is not None:
            kv = self.disk.get(key)
            if kv is not None:
                self.put(key, kv)
        elif kv is not None:
            self.policy.used(key, kv.n_bytes)
        return kv

    def place(self, key: int, tier: str) -> int:
        """Move canonical KV to ``tier`` and return its bytes there; 0 when there is none yet."""
        if tier == "disk" and self.disk is None:
            raise InvalidArgument("tier", "this engine has no home directory", "pass home=")
        if tier not in (self.memory, "disk", "none"):
            hint = f"use {self.memory}, disk or none"
            raise InvalidArgument("tier", f"{tier!r} is not available here", hint)
        if tier == "none":
            self.drop(key)
            self.on_tier(key, "none", 0)
            return 0
        kv = self.get(key)
        if kv is None:
            return 0
        if tier == self.memory:
            if self.disk is not None:
                self.disk.delete(key)
            self.on_tier(key, self.memory, kv.n_bytes)
            return kv.n_bytes
        assert self.disk is not None
        return self._spill(key, kv, self.disk)

    def put_in_context(self, key: int, seen: Seen, kv: KV) -> None:
        """Keep exact in-context KV, the latest one per chunk; skipped when memory is short."""
        old = self._in_context.get(key)
        freed = old[1].n_bytes if old else 0
        if self.n_bytes - freed + kv.n_bytes <= self.budget:
            self._in_context[key] = (seen, kv)
            self.on_in_context(key, seen)

    def in_context(self, key: int, seen: Seen) -> KV | None:
        """Return exact in-context KV computed after exactly ``seen``."""
        found = self._in_context.get(key)
        return found[1] if found is not None and found[0] == seen else None

    def put_patch(self, key: Key, patch: Patch) -> None:
        """Keep a patch; older ones make room, nothing else does."""
        self.patches.put(key, patch, self.budget - self.n_bytes)

    def drop(self, key: int) -> None:
        """Let go of all KV of a chunk."""
        self.ram.delete(key)
        self.patches.drop(key)
        if self.disk is not None:
            self.disk.delete(key)
        self._in_context.pop(key, None)
        self.policy.dropped(key)

    def charge(self, context: str, n_bytes: int) -> None:
        """Set the bytes a context's rows take. Raises OverBudget, with nothing changed."""
        more = n_bytes - self._charged.get(context, 0)
        if more > 0:
            self.reserve(more)
        self._charged[context] = n_bytes
        if n_bytes == 0:
            del self._charged[context]

    def busy(self, keys: Iterable[int]) -> None:
        """Declare which chunks must stay in memory until the next call."""
        self._busy = set(keys)

    def reserve(self, n_bytes: int) -> None:
        """Make room for ``n_bytes``. Raises OverBudget before letting go of anything."""
        short = self.n_bytes + n_bytes - self.budget
        if short <= 0:
            return
        loose = sum(kv.n_bytes for _, kv in self._in_context.values()) + self.patches.n_bytes
        victims = [k for k in self.policy.victims() if k in self.ram and self._may_go(k)]
        sizes = {k: kv.n_bytes for k in victims if (kv := self.ram.get(k)) is not None}
        evictable = loose + sum(sizes.values())
        if short > evictable:
            raise OverBudget(self.n_bytes + n_bytes, self.budget, evictable)
        short -= self.patches.shrink(short)
        for key in list(self._in_context):
            if short <= 0:
                return
            short -= self._in_context.pop(key)[1].n_bytes
            self.on_in_context(key, ())
        for key in victims:
            if short <= 0:
                return
            self._let_go(key)
            short -= sizes[key]

    def _may_go(self, key: int) -> bool:
        return key not in self._busy and not self.is_pinned(key)

    def _let_go(self, key: int) -> None:
        kv = self.ram.get(key)
        assert kv is not None
        if self.disk is not None:
            self._spill(key, kv, self.disk)
            return
        self.ram.delete(key)
        self.policy.evicted(key)
        self.on_tier(key, "none", 0)

    def _spill(self, key: int, kv: KV, disk: Disk) -> int:
        n_bytes = disk.size(key) or disk.put(key, kv)  # content never changes: write it once
        self.ram.delete(key)
        self.policy.evicted(key)
        self.on_tier(key, "disk", n_bytes)
        return n_bytes

    def check_integrity(self) -> None:
        """Raise AssertionError when accounting and content differ."""
        self.ram.check_integrity()
        self.patches.check_integrity()
        if self.disk is not None:
            self.disk.check_integrity()
        assert self.n_bytes <= self.budget, f"{self.n_bytes} bytes over {self.budget}"
