"""What was done to a context: its versions, how two of them differ, and what an edit cost.

::

    version 7   message u-003     [base][docs/a][docs/b][u-003]
    version 8   drop docs/a       [base][docs/b][u-003]           why: docs/b moved, u-003 computed

A version is a list of parts; no KV is kept for it. Tokens that nothing else keeps are.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from difflib import SequenceMatcher

import numpy as np
from numpy.typing import NDArray

from kvweave.chunk.identity import ChunkId, Kind
from kvweave.errors import InvalidArgument
from kvweave.verbs import Gate, checked
from kvweave.weave.parts import Part
from kvweave.weave.plan import Plan, Span

MOST_VERSIONS = 256  # of one context that can be come back to
MOST_PARTS = 32_768  # in all of these together
MOST_TOKENS = 65_536  # of what nothing else keeps; the first to go are forgotten first
BEGUN = "begin"  # an answer was begun; no version of its own once it is there, or taken back
ANSWERS = (BEGUN, "answer")  # verbs of what a weave was for


@dataclass(frozen=True, slots=True)
class Version:
    """The parts of a context after an edit; ``at`` in seconds since 1970."""

    version: int
    at: float
    verb: str
    parts: tuple[Part, ...] = ()
    base: ChunkId | None = None

    @property
    def n_tokens(self) -> int:
        return sum(part.n for part in self.parts)


@dataclass(frozen=True, slots=True)
class FreedChunk:
    """What a chunk is made again of: its KV is computed after ``base``."""

    kind: Kind
    tokens: NDArray[np.uint32]
    base: ChunkId | None


@dataclass(frozen=True, slots=True)
class Edit:
    """One line of `Context.log`: an edit, and the names it added and removed."""

    version: int
    at: float
    verb: str
    n_tokens: int
    added: tuple[str, ...]
    removed: tuple[str, ...]

    @property
    def says(self) -> str:
        """What was done, in a few words."""
        names = self.removed if self.verb in ("drop", "evict") else self.added or self.removed
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return " ".join([self.verb, ", ".join(names[:3])]).rstrip() + more

    def to_dict(self) -> dict[str, object]:
        """Return it, JSON-ready."""
        return asdict(self) | {"says": self.says}


@dataclass(frozen=True, slots=True)
class Diff:
    """How the parts of version ``to`` differ from those of version ``since``.

    ``moved`` are in both, and not in the same order.
    """

    since: int
    to: int
    added: tuple[Part, ...]
    removed: tuple[Part, ...]
    moved: tuple[Part, ...]

    def to_dict(self) -> dict[str, object]:
        """Return it, JSON-ready."""
        lists = {"added": self.added, "removed": self.removed, "moved": self.moved}
        told = {key: [_named(part) for part in parts] for key, parts in lists.items()}
        return {"from": self.since, "to": self.to, **told}


def _named(part: Part) -> dict[str, object]:
    told = {"uid": part.uid, "name": part.name, "id": int(part.id), "start": part.start}
    return told | {"n_tokens": part.n, "amends": part.amends}


@dataclass(frozen=True, slots=True)
class Cause:
    """Why one part is as it is: ``n_computed`` of its tokens had no KV of use or were repaired.

    ``edit`` is the first edit since the last weave that touched it, or what stands before it; None
    where no edit did.
    """

    uid: int
    name: str
    n_tokens: int
    how: str  # kept, moved, new, computed
    n_computed: int
    edit: Edit | None
    says: str


@dataclass(frozen=True, slots=True)
class Why:
    """What a weave reused, and which edit was the cause of what it did not.

    ``n_kept`` tokens stayed where they were, ``n_moved`` were placed anew, ``n_computed`` went
    through the model. ``pending``: parts were edited since; it is what the next weave would do.
    """

    version: int
    since: int | None  # the version of the weave before; None: there was none
    pending: bool
    n_tokens: int
    n_kept: int
    n_moved: int
    n_computed: int
    parts: tuple[Cause, ...]

    @property
    def says(self) -> str:
        """The whole in a sentence, and who cost most in another."""
        would = "would be" if self.pending else "were"
        first = (
            f"{self.n_tokens - self.n_computed} of {self.n_tokens} tokens {would} reused "
            f"({self.n_kept} where they stood, {self.n_moved} moved), {self.n_computed} computed"
        )
        worst = max(self.parts, key=lambda part: part.n_computed, default=None)
        return first if worst is None or not worst.n_computed else f"{first}; {worst.says}"

    def to_dict(self) -> dict[str, object]:
        """Return it, JSON-ready."""
        parts = [
            {**asdict(part), "edit": None if part.edit is None else part.edit.to_dict()}
            for part in self.parts
        ]
        return {**asdict(self), "says": self.says, "parts": parts}


@checked
class ContextHistory:
    """The versions of one context, the oldest forgotten first."""

    def __init__(self, gate: Gate) -> None:
        self.gate, self.closed = gate, False  # what is known of a closed context can be read
        self._versions: deque[Version] = deque([Version(0, time.time(), "open")])
        self._n_parts = self._n_made = 0  # versions ever: a number is given once
        self._weaves: deque[tuple[int, tuple[Part, ...], Plan]] = deque(maxlen=2)
        self._gone: dict[ChunkId, FreedChunk] = {}
        self._n_gone = 0  # tokens of these

    @property
    def version(self) -> int:
        """The number of the version that stands; every edit makes a higher one."""
        return self._versions[-1].version

    def copy(self) -> ContextHistory:
        """Return what a fork begins with."""
        twin = ContextHistory(self.gate)
        twin._versions, twin._n_parts = self._versions.copy(), self._n_parts
        twin._n_made = self._n_made
        twin._weaves, twin._gone = self._weaves.copy(), dict(self._gone)
        twin._n_gone = self._n_gone
        return twin

    def keep(self, id: ChunkId, gone: FreedChunk) -> None:
        """Remember a chunk that nothing will hold any more."""
        known = self._gone.pop(id, None)
        self._n_gone += len(gone.tokens) - (0 if known is None else len(known.tokens))
        self._gone[id] = gone
        while self._n_gone > MOST_TOKENS:
            self._n_gone -= len(self._gone.pop(next(iter(self._gone))).tokens)

    def gone(self, id: ChunkId) -> FreedChunk | None:
        """Return what `keep` was told of a chunk."""
        return self._gone.get(id)

    def record(self, verb: str, parts: tuple[Part, ...], base: ChunkId | None) -> None:
        """Note an edit, unless it changed nothing."""
        if self._versions[-1].verb == BEGUN:  # its answer is there, or it was given up
            self._forget(-1)
        if (parts, base) == (self._versions[-1].parts, self._versions[-1].base):
            return
        self._n_made += 1
        self._versions.append(Version(self._n_made, time.time(), verb, parts, base))
        self._n_parts += len(parts)
        if len(self._versions) > MOST_VERSIONS or self._n_parts > MOST_PARTS:
            while len(self._versions) > MOST_VERSIONS // 2 or self._n_parts > MOST_PARTS // 2:
                if len(self._versions) == 1:
                    break
                self._forget(0)
            known = {part.id for version in self._versions for part in version.parts}
            self._gone = {id: kept for id, kept in self._gone.items() if id in known}
            self._n_gone = sum(len(gone.tokens) for gone in self._gone.values())

    def wove(self, parts: tuple[Part, ...], plan: Plan) -> None:
        """Note what a weave did."""
        last = self._weaves[-1] if self._weaves else None
        is_news = plan.repaired or plan.prefilled or any(span.placed for span in plan.spans)
        if last is None or is_news or last[1] != parts:
            self._weaves.append((self.version, parts, plan))

    def back_to(self, version: int) -> None:
        """Forget what was done after a version that stands again."""
        now = self._versions[-1]
        while self._versions[-1].version > version and len(self._versions) > 1:
            self._forget(-1)
        if (now.parts, now.base) != (self._versions[-1].parts, self._versions[-1].base):
            self._versions.append(now)
            self._n_parts += len(now.parts)

    def at(self, version: int) -> Version:
        """Return a version. Raises InvalidArgument for one that is not known (any more)."""
        for each in self._versions:
            if each.version == version:
                return each
        first = self._versions[0].version
        reason = f"there is no version {version}"
        raise InvalidArgument("version", reason, f"see the log: {first} to {self.version}")

    def log(self) -> list[Edit]:
        """Return the edits, the newest first; the oldest that is known stands for all before it."""
        return [edit for edit, _ in self._edits(-1, self.version)][::-1]

    def since(self, version: int) -> tuple[str, ...]:
        """Tell in a few words which edits were made after a version, answers left out."""
        edits = self._edits(version, self.version)
        return tuple(edit.says for edit, _ in edits if edit.verb not in ANSWERS)

    def diff(self, since: int, to: int | None = None) -> Diff:
        """Return how two versions differ. Raises InvalidArgument."""
        old, new = self.at(since), self.at(self.version if to is None else to)
        before, after = [p.uid for p in old.parts], [p.uid for p in new.parts]
        same, known = set(before) & set(after), set(before)
        left, right = ([uid for uid in uids if uid in same] for uids in (before, after))
        blocks = SequenceMatcher(None, left, right, autojunk=False).get_matching_blocks()
        still = {uid for b in blocks for uid in right[b.b : b.b + b.size]}
        return Diff(
            old.version,
            new.version,
            tuple(p for p in new.parts if p.uid not in known),
            tuple(p for p in old.parts if p.uid not in same),
            tuple(p for p in new.parts if p.uid in same and p.uid not in still),
        )

    def why(self, parts: tuple[Part, ...], preview: Plan) -> Why:
        """Tell what the last weave did, or, where parts were edited since, what the next would do
        (``preview``). The answer that a weave was for is no such edit."""
        woven = list(self._weaves)
        pending = not woven or (
            woven[-1][1] != parts
            and any(v.version > woven[-1][0] and v.verb not in ANSWERS for v in self._versions)
            and any(_costs(s) for s in preview.spans)
        )
        if pending:
            woven.append((self.version, parts, preview))
        version, now, plan = woven[-1]
        since, before = (woven[-2][0], woven[-2][1]) if len(woven) > 1 else (None, ())
        edits = self._edits(-1 if since is None else since, version)
        places = {part.uid: place for place, part in enumerate(before)}
        same = [(edit, _n_same(before, made.parts)) for edit, made in edits]
        added: dict[int, Edit] = {}
        for edit, made in edits:
            for part in made.parts:
                added.setdefault(part.uid, edit)
        causes = []
        for part, span in zip(now, plan.spans, strict=True):
            how = "computed" if _computed(span) else "moved" if span.placed else "kept"
            if part.uid in places:  # the first edit of what stands up to it
                cause = next((edit for edit, n in same if n <= places[part.uid]), None)
            else:
                how, cause = "new", added.get(part.uid)
            causes.append(_cause(part, span, how, None if how == "kept" else cause))
        n_computed = sum(each.n_computed for each in causes)
        n_moved = sum(
            each.n_tokens - each.n_computed
            for each, span in zip(causes, plan.spans, strict=True)
            if span.placed
        )
        n_kept = plan.n_tokens - n_computed - n_moved
        return Why(
            version, since, pending, plan.n_tokens, n_kept, n_moved, n_computed, tuple(causes)
        )

    def _edits(self, since: int, to: int) -> list[tuple[Edit, Version]]:
        """Return the edits after version ``since`` up to ``to``, with what each made."""
        versions = list(self._versions)
        firsts = [Version(-1, 0.0, ""), *versions]
        pairs = zip(firsts, versions, strict=False)
        return [(_edit(a, b), b) for a, b in pairs if since < b.version <= to]

    def _forget(self, index: int) -> None:
        self._n_parts -= len(self._versions[index].parts)
        del self._versions[index]


def _n_same(a: Sequence[Part], b: Sequence[Part]) -> int:
    """Return how many parts at the front are the same."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x.uid != y.uid), min(len(a), len(b)))


def _edit(before: Version, now: Version) -> Edit:
    old, new = ({part.uid: part.name for part in v.parts} for v in (before, now))
    return Edit(
        now.version,
        now.at,
        now.verb,
        now.n_tokens,
        tuple(name for uid, name in new.items() if uid not in old),
        tuple(name for uid, name in old.items() if uid not in new),
    )


def _computed(span: Span) -> int:
    return span.n_repaired + span.n_prefilled


def _costs(span: Span) -> bool:
    return span.placed or _computed(span) > 0


def _cause(part: Part, span: Span, how: str, edit: Edit | None) -> Cause:
    n = _computed(span)
    by = "" if edit is None else f": {edit.says} (version {edit.version})"
    if how == "kept":
        says = f"{part.name} stayed where it was"
    elif how == "new":
        says = f"{part.name} is new{by}"
    elif edit is None:
        says = f"{part.name}: no edit; its KV was not there any more, or its repair was asked for"
    elif n:
        what = "repaired" if span.n_repaired else "computed"
        says = f"{n} of {part.name} {what}, since what stands before it changed{by}"
    else:
        says = f"{part.name} was placed anew, {span.moved:+d}{by}"
    says += ", its KV is of another base" if "base" in span.approximate else ""
    return Cause(part.uid, part.name, part.n, how, n, edit, says)
