"""The file verbs on chunks: ls stat cp mv rm pin unpin du find place."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from heapq import nlargest, nsmallest
from typing import Any, Literal

from kvweave.chunk.identity import (
    ChunkId,
    Kind,
    Namespace,
    TierName,
    check_kind,
    check_name,
    check_tier,
    normal_name,
)
from kvweave.chunk.names import directory_of, has_glob, literal_prefix, matching
from kvweave.chunk.record import Record
from kvweave.chunk.table import Table
from kvweave.errors import (
    ChunkInUse,
    ChunkNotFound,
    ChunkPinned,
    InvalidArgument,
    NameTaken,
)
from kvweave.verbs import FromZero, Gate, checked

_Move = Callable[[Record, TierName], int]
"""Moves the KV of a chunk to a tier and returns how many bytes it takes there."""

_Choice = Callable[[list[str]], list[str]]

GROUPS = ("tier", "kind", "namespace", "dir")


@dataclass(frozen=True, slots=True)
class Entry:
    """One name and what stands behind it; a chunk without names is listed as ``#17``."""

    name: str
    id: ChunkId
    n_tokens: int
    n_bytes: int
    kind: Kind
    tier: TierName
    pinned: bool
    refs: int
    """Names + contexts that hold it + chunks it is the base of."""
    created: float
    last_used: float
    n_uses: int

    def to_dict(self) -> dict[str, object]:
        """Return the fields, JSON-ready."""
        return {field: getattr(self, field) for field in self.__slots__}  # a tenth of asdict's time


@dataclass(frozen=True, slots=True)
class Usage:
    """What the chunks of one group take; a chunk counts once, however many names it has."""

    key: str
    n_chunks: int
    n_tokens: int
    n_bytes: int

    def to_dict(self) -> dict[str, object]:
        """Return the fields, JSON-ready."""
        return asdict(self)


SORT_KEYS = tuple(field for field in Entry.__slots__ if field != "refs")


@checked
class Files:
    """The verbs on the chunks of one namespace.

    Where a verb takes a pattern: a name, ``#17``, a glob (``*`` ``**`` ``?`` ``[a-z]`` ``{a,b}``),
    or ``docs/`` for everything below. A glob may match nothing; anything else that matches nothing
    raises ChunkNotFound. Every verb that changes something is all or nothing, and with ``dry_run``
    returns or raises the same and changes nothing; ``place`` says how it differs.
    """

    closed = False

    def __init__(self, table: Table, namespace: Namespace = "", gate: Gate | None = None) -> None:
        self.table = table
        self.namespace = namespace
        self.gate = gate

    # --- reading ---

    def ls(
        self,
        pattern: str = "",
        *,
        namespace: Namespace | None = None,
        sort: str = "name",
        reverse: bool = False,
        limit: FromZero | None = None,
        after: str | None = None,
    ) -> list[Entry]:
        """Return the names that match, of ``namespace`` if given, in order of an Entry's field; with
        ``after`` only those behind this name."""
        if sort not in SORT_KEYS:
            raise InvalidArgument("sort", f"{sort!r} is none of {', '.join(SORT_KEYS)}")
        files = self if namespace is None else Files(self.table, namespace)
        first = nlargest if reverse else nsmallest

        def some(names: list[str]) -> list[str]:
            """Choose those that are worth looking up."""
            left = [name for name in names if after is None or name > after]
            return left if limit is None or sort != "name" else first(limit, left)

        found = [item for item in files._match(pattern, some) if after is None or item[0] > after]

        def by_field(item: tuple[str, Record]) -> Any:
            return getattr(item[1], sort), item[0]

        key: Callable[[tuple[str, Record]], Any] = _name if sort == "name" else by_field
        if limit is None:
            found.sort(key=key, reverse=reverse)
        else:
            found = first(limit, found, key=key)
        return files._entries(found)

    def stat(self, ref: str) -> Entry:
        """Return the entry of one name or ``#17``; raise ChunkNotFound."""
        record = self.table.resolve(ref, self.namespace)
        return self._entries([(self._shown(ref, record), record)])[0]

    def find(
        self,
        pattern: str = "**",
        *,
        kind: Kind | None = None,
        tier: TierName | None = None,
        pinned: bool | None = None,
        min_tokens: int | None = None,
        unused_since: float | None = None,
    ) -> list[Entry]:
        """Return the names that match and whose chunk is as asked, by name.

        ``unused_since`` is a time (seconds since 1970): only chunks not used since.
        """
        if kind is not None:
            check_kind(kind)
        if tier is not None:
            check_tier(tier)
        return self._entries(
            (name, record)
            for name, record in sorted(self._match(pattern), key=_name)
            if (kind is None or record.kind == kind)
            and (tier is None or record.tier == tier)
            and (pinned is None or record.pinned == pinned)
            and (min_tokens is None or record.n_tokens >= min_tokens)
            and (unused_since is None or record.last_used < unused_since)
        )

    def du(
        self,
        pattern: str = "",
        by: Literal["tier", "kind", "namespace", "dir"] = "tier",
        *,
        all_namespaces: bool = False,
    ) -> list[Usage]:
        """Return what the chunks that match take, the largest group first.

        With no pattern, chunks without names count too. ``dir`` groups by the next directory below
        the pattern's own. ``all_namespaces`` is for who owns the machine, never for a tenant.
        """
        if by not in GROUPS:
            raise InvalidArgument("by", f"{by!r} is none of {', '.join(GROUPS)}")
        spaces = self.table.namespaces() if all_namespaces else [self.namespace]
        totals: dict[str, list[int]] = {}

        def add(key: str, *more: int) -> None:
            total = totals.setdefault(key, [0, 0, 0])
            total[:] = map(operator.add, total, more)

        for space in spaces:
            files = Files(self.table, space)
            if not pattern and by != "dir":  # the database adds up by itself
                for size in self.table.sizes(space):
                    add(space if by == "namespace" else getattr(size, by), *size[2:])
                continue
            for name, record in files._chunks(pattern) if pattern else files._everything():
                key = directory_of(name, pattern) if by == "dir" else getattr(record, by)
                add(key, 1, record.n_tokens, record.n_bytes)
        usages = [Usage(key, *total) for key, total in totals.items()]
        return sorted(usages, key=lambda usage: (-usage.n_bytes, -usage.n_tokens, usage.key))

    # --- names ---

    def cp(
        self, src: str, dst: str, replace: bool = False, *, dry_run: bool = False
    ) -> list[Entry]:
        """Give chunks another name and return the new entries; no KV is copied.

        ``src`` may be a glob or ``docs/`` when ``dst`` ends in '/'. Raises NameTaken without
        ``replace``, and ChunkPinned when that would take the last name of a pinned chunk.
        """
        return self._rename(src, dst, replace=replace, keep=True, dry_run=dry_run)

    def mv(
        self, src: str, dst: str, replace: bool = False, *, dry_run: bool = False
    ) -> list[Entry]:
        """As ``cp``, and take the old names away; ids, holders and KV stay as they are."""
        return self._rename(src, dst, replace=replace, keep=False, dry_run=dry_run)

    def rm(self, pattern: str, *, dry_run: bool = False, force: bool = False) -> list[Entry]:
        """Remove names and return them as they were; a chunk nothing else keeps is freed.

        ``#17`` stands for all names of that chunk. Raises ChunkPinned when a pinned chunk would
        lose its last name, and ChunkInUse when one a context holds would; ``force`` overrides the
        latter, and the chunk lives until the context lets go.
        """
        if not pattern:
            raise InvalidArgument("pattern", "it is empty; '**' stands for everything")
        with self.table.transaction():
            found = self._match(pattern)
            entries = self._entries(sorted(found, key=_name))
            self._refuse_last_names(found, force=force)
            if not dry_run:
                named = [(name, record.id) for name, record in found if not name.startswith("#")]
                self.table.unbind_all(named)
                if not named:
                    self.table.collect(record.id for _, record in found)
        return entries

    # --- attributes ---

    def pin(self, pattern: str, *, dry_run: bool = False) -> list[Entry]:
        """Keep chunks from being removed or evicted; return their entries as they are then."""
        return self._set_pinned(pattern, True, dry_run)

    def unpin(self, pattern: str, *, dry_run: bool = False) -> list[Entry]:
        """Take back ``pin``; nothing is freed by it."""
        return self._set_pinned(pattern, False, dry_run)

    def place(
        self,
        pattern: str,
        tier: TierName,
        mover: _Move,
        *,
        again: bool = False,
        dry_run: bool = False,
    ) -> list[Entry]:
        """Move the KV of chunks to a tier and return the entries of those it moved: those that are
        elsewhere, with ``again`` all.

        All is checked first, then each chunk is moved and recorded by itself: when ``mover`` raises
        for one, those before it are moved and the table says so, since bytes cannot be rolled back.
        Raises for tier ``none`` ChunkPinned for a pinned chunk, InvalidArgument for rows no token made.
        """
        check_tier(tier)
        found = [item for item in self._chunks(pattern) if again or item[1].tier != tier]
        for name, record in found:
            if record.pinned and tier == "none":
                raise ChunkPinned(name, record.id)
            if tier == "none" and self.table.is_virtual(record.id):
                why = f"{name} is rows that no token made: nothing of it would be left"
                raise InvalidArgument("tier", why, "rm removes it")
        if not dry_run:
            for _, record in found:
                self.table.update(record.id, tier=tier, n_bytes=mover(record, tier))
        return self._entries(found)

    # --- how ---

    def _entries(self, found: Iterable[tuple[str, Record]]) -> list[Entry]:
        found = list(found)
        refs = self.table.refs(record for _, record in found)
        return [
            Entry(
                name, x.id, x.n_tokens, x.n_bytes, x.kind, x.tier, x.pinned,
                refs[x.id], x.created, x.last_used, x.n_uses,
            )
            for name, x in found
        ]  # fmt: skip

    def _shown(self, ref: str, record: Record) -> str:
        if not ref.startswith("#"):
            return normal_name(ref)
        return record.names[0] if record.linked else f"#{record.id}"

    def _match(self, pattern: str, some: _Choice | None = None) -> list[tuple[str, Record]]:
        """Return the names a pattern stands for, with their records; ``#17`` for no name. Of the many of
        a glob only ``some``."""
        table = self.table
        if pattern.startswith("#"):
            record = table.resolve(pattern, self.namespace)
            return [(name, record) for name in record.names or (f"#{record.id}",)]
        pattern = normal_name(pattern)
        if pattern and not has_glob(pattern) and not pattern.endswith("/"):
            return [(pattern, table.resolve(pattern, self.namespace))]
        names = matching(table.names(self.namespace, literal_prefix(pattern)), pattern)
        if not names and pattern and not has_glob(pattern):
            raise ChunkNotFound(pattern, table.similar_names(pattern.rstrip("/"), self.namespace))
        return table.lookup_all(names if some is None else some(names), self.namespace)

    def _chunks(self, pattern: str) -> list[tuple[str, Record]]:
        """Return each chunk once, under the first of its names that match."""
        found: dict[ChunkId, tuple[str, Record]] = {}
        # the first of the names, so that who asks twice is told the same
        for name, record in sorted(self._match(pattern), key=_name):
            found.setdefault(record.id, (name, record))
        return list(found.values())

    def _everything(self) -> Iterator[tuple[str, Record]]:
        """Yield each chunk once, also those without names."""
        for record in self.table:
            if record.namespace == self.namespace:
                yield self._shown("#", record), record

    def _refuse_last_names(self, leaving: Iterable[tuple[str, Record]], *, force: bool) -> None:
        """Raise ChunkPinned or ChunkInUse if a chunk that is needed would lose its last name."""
        n_leaving: dict[ChunkId, int] = {}
        for name, record in leaving:
            n_leaving[record.id] = n_leaving.get(record.id, 0) + 1
            if n_leaving[record.id] < record.n_names:
                continue
            if record.pinned:
                raise ChunkPinned(name, record.id)
            contexts = self.table.contexts_of(record.id)
            if contexts and not force:
                called = tuple(self.table.called.get(key, key) for key in contexts)
                raise ChunkInUse(name, record.id, called)
            if not record.linked and self.table.n_children(record.id):
                users = tuple(f"#{other.id}" for other in self.table if other.base == record.id)
                raise ChunkInUse(name, record.id, users)

    def _set_pinned(self, pattern: str, pinned: bool, dry_run: bool) -> list[Entry]:
        with self.table.transaction():
            found = self._chunks(pattern)
            if not dry_run:
                self.table.pin([r.id for _, r in found if r.pinned != pinned], pinned)
            return self._entries(found)

    def _rename(
        self, src: str, dst: str, *, replace: bool, keep: bool, dry_run: bool
    ) -> list[Entry]:
        table, space = self.table, self.namespace
        with table.transaction():
            moves = self._moves(src, dst, one_name=not keep)
            leaving = {} if keep else {old: r.id for old, _, r in moves if not old.startswith("#")}
            given = {new: record for _, new, record in moves}
            replaced = []
            for new, other in table.lookup_all(list(given), space):
                if other is given[new] or new in leaving:
                    continue
                if not replace:
                    raise NameTaken(new, other.id)
                replaced.append((new, other))
            # A context goes on with what it holds; only a pin says "never lose this".
            self._refuse_last_names(replaced, force=True)
            if not dry_run:
                table.unbind_all(leaving.items())
                table.bind_all(((new, record.id) for _, new, record in moves), space, replace)
            return self._entries((new, record) for _, new, record in moves)

    def _moves(self, src: str, dst: str, *, one_name: bool) -> list[tuple[str, str, Record]]:
        """Return old name, new name and record of each; raise before two get the same name."""
        found = sorted(self._match(src), key=_name)
        into = dst.endswith("/")
        if src.startswith("#"):
            if one_name and len(found) > 1:
                names = ", ".join(name for name, _ in found)
                raise InvalidArgument("src", f"{src} has several names, say which: {names}")
            found = found[:1]
            if into and found[0][0].startswith("#"):
                raise InvalidArgument("dst", f"{src} has no name to put below {dst!r}", "write one")
        several = has_glob(src) or src.endswith("/") or not src
        if several and not into:
            raise InvalidArgument("dst", f"{dst!r} must end in '/' to take all of {src!r}")
        moves: list[tuple[str, str, Record]] = []
        taken: dict[str, ChunkId] = {}
        whole_tree = several and not has_glob(src)
        for name, record in found:
            kept = name[len(src) :] if whole_tree else name.rsplit("/", 1)[-1]
            new = check_name(dst + kept if into else dst)
            if new in taken:
                raise NameTaken(new, taken[new])
            taken[new] = record.id
            moves.append((name, new, record))
        return moves


def _name(item: tuple[str, Record]) -> str:
    return item[0]
