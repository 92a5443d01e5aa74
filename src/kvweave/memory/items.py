"""The long-term store: chunks by their names below one root, and nothing beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from kvweave.chunk.identity import NO_TOKEN, ChunkId, Kind, check_name
from kvweave.chunk.names import has_glob, matching
from kvweave.chunk.record import Record
from kvweave.chunk.table import Table
from kvweave.errors import ChunkLost, ChunkNotFound, InvalidArgument, NameTaken
from kvweave.weave.context import Context
from kvweave.weave.maker import Maker
from kvweave.weave.parts import Part, TextOrTokens
from kvweave.weave.special import PlainText
from kvweave.weave.thinning import named_by

ROLES = ("user", "assistant", "system", "tool")  # whose wrapping is taken off a text
ANCHORS = "anchors"  # directory of what was anchored


@dataclass(frozen=True, slots=True)
class Bound:
    """What a name stands for: enough to make the chunk again after it was freed."""

    id: ChunkId
    digest: bytes
    kind: Kind
    base: ChunkId | None
    tokens: NDArray[np.uint32]
    pinned: bool
    pinned_by: object = None  # a memory, if nobody else has pinned it


# which memory, so that several may share a root, has pinned a chunk that nobody else had
_PINS: WeakKeyDictionary[Table, dict[ChunkId, object]] = WeakKeyDictionary()


LONGEST = "sum-000000~2000"  # of what items of a conversation are called below its name


class Items:
    """Names below ``root`` in the namespace of a context, and the chunks they stand for.

    Every change of a name goes through `bind`, `unbind` and `pin`, which note what was there before
    in ``noted`` (None: nothing), where that is a dict.
    """

    def __init__(self, context: Context, table: Table, maker: Maker, root: str) -> None:
        self.root = check_name(root)
        self.table, self.maker, self.namespace = table, maker, context.namespace
        self._pins, self._mine = _PINS.setdefault(table, {}), object()
        self.noted: dict[str, Bound | None] | None = None
        self._context = context
        context.names.make_room(len(f"{self.root}//{LONGEST}"))
        self._n_made: dict[str, int] = {}  # names tried by `free`

    # ---- names

    @property
    def own(self) -> str:
        """Return what names of the conversation's messages and summaries begin with."""
        return self._context.name + "/"

    def is_said(self, part: Part) -> bool:
        """Tell whether a part is text of the conversation, and no item that was placed in it: written into
        this context, or into another that it is a copy of, or named like that."""
        return part.literal or self._context.names.gives(part.name)

    def full(self, name: str) -> str:
        """Return the whole name of an item: ``name`` is that, or what stands below the root."""
        return name if name.startswith(self.root + "/") else f"{self.root}/{name}"

    def new(self, name: str) -> str:
        """Return the whole name of an item to be written. Raises InvalidName."""
        return check_name(self.full(name))

    def some(self, name: str) -> str:
        """Return what `full` does. Raises InvalidArgument for "", which would be all of them."""
        if not name:
            raise InvalidArgument("name", "it is empty", "'**' stands for everything")
        return self.full(name)

    def names(self, pattern: str = "**") -> list[str]:
        """Return whole names that a name, a glob or a ``directory/`` means, sorted. Raises
        ChunkNotFound for a name that is not there."""
        pattern = self.full(pattern)
        if not has_glob(pattern) and not pattern.endswith("/"):
            self.get(pattern)
            return [pattern]
        return matching(self.table.names(self.namespace, self.root + "/"), pattern)

    def find(self, name: str) -> Record | None:
        """Return what an item's whole name stands for, if anything."""
        return self.table.lookup(name, self.namespace)

    def get(self, name: str) -> Record:
        """Return what an item's whole name stands for. Raises ChunkNotFound."""
        return self.table.resolve(name, self.namespace)

    def free(self, stem: str) -> str:
        """Return ``ROOT/STEM``, or the first of ``ROOT/STEM~2``, ... that names nothing."""
        name = self.full(stem)
        number = self._n_made.get(name, 1)
        while self.find(name if number == 1 else f"{name}~{number}") is not None:
            number += 1
        self._n_made[name] = number if number > 1 else 1
        return name if number == 1 else f"{name}~{number}"

    # ---- texts

    def encode(self, content: TextOrTokens, role: Kind) -> list[int]:
        """Return the tokens of a chunk that says ``content`` as a message of ``role``; token ids
        are taken as they are. Raises InvalidArgument where the text cannot be read back."""
        if not isinstance(content, str):
            return self.maker.tokens(content)
        tokens = self.maker.message(role, PlainText(content))
        if self.decode(tokens) != content:
            reason = "this model's tokenizer does not give it back as it is"
            raise InvalidArgument("text", reason, "leave out unusual characters")
        return tokens

    def decode(self, tokens: Sequence[int] | NDArray[np.uint32]) -> str:
        """Return the text of a chunk without a message's wrapping; "" without a tokenizer."""
        tokenizer = self.maker.backend.tokenizer
        if tokenizer is None:
            return ""
        ids = [int(t) for t in tokens]
        text = str(
            tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )
        for role in ROLES:
            try:
                wrap = self.maker.chat.wrap(role)
            except InvalidArgument:  # a role that the model's template does not know
                continue
            inside = len(text) >= len(wrap.before) + len(wrap.after)
            if wrap.before and inside and text.startswith(wrap.before):
                if text.endswith(wrap.after):
                    return text[len(wrap.before) : len(text) - len(wrap.after)]
        return text

    def text(self, name: str) -> str:
        """Return what an item says. Raises ChunkNotFound."""
        return self.decode(self.table.tokens(self.get(name).id))

    # ---- changes, each noted

    def make(self, tokens: Sequence[int], kind: Kind, base: ChunkId | None) -> ChunkId:
        """Return the chunk of these tokens behind the conversation's base."""
        return self.maker.add(tokens, kind=kind, base=base, namespace=self.namespace)

    def bound(self, id: ChunkId) -> Bound:
        """Return what is needed to make a chunk again."""
        record = self.table.get(id)
        tokens = self.table.tokens(id)
        by = self._pins.get(id)
        return Bound(id, record.digest, record.kind, record.base, tokens, record.pinned, by)

    def note(self, name: str) -> None:
        """Note what ``name`` stands for, unless that was noted before."""
        if self.noted is not None and name not in self.noted:
            record = self.find(name)
            self.noted[name] = None if record is None else self.bound(record.id)

    def bind(self, name: str, id: ChunkId, *, replace: bool = False) -> None:
        """Let a name stand for a chunk, pinned where the one before was. Raises NameTaken."""
        old = self.find(name)
        if old is not None and old.id == id:
            return
        if old is not None and not replace:
            raise NameTaken(name, old.id)
        self.note(name)
        pinned, by = old is not None and old.pinned, None if old is None else self._pins.get(old.id)
        if old is not None:
            self._leaves(name, old)
        self.table.bind(name, id, namespace=self.namespace, replace=replace)
        if pinned:
            self._pin(id, by)

    def unbind(self, name: str) -> None:
        """Remove a name, pinned or not. Raises ChunkNotFound."""
        record = self.get(name)
        self.note(name)
        self._leaves(name, record)
        self.table.unbind(name, self.namespace)

    def move(self, old: str, new: str) -> None:
        """Let a chunk go by another name, pinned as it was. Raises ChunkNotFound, NameTaken."""
        self.bind(new, self.get(old).id)
        self.note(old)
        self.table.unbind(old, self.namespace)

    def pin(self, name: str) -> None:
        """Keep a name's chunk from being let go of."""
        self.note(name)
        self._pin(self.get(name).id, self._mine)

    def unpin(self) -> None:
        """Take back all pins that others had not set before."""
        for id in [id for id, by in self._pins.items() if by is self._mine]:
            if self.there(id) is not None:
                self.table.pin([id], False)
            del self._pins[id]

    def there(self, id: ChunkId) -> Record | None:
        """Return a chunk, None for one that is gone."""
        try:
            return self.table.get(id)
        except ChunkNotFound:
            return None

    def _pin(self, id: ChunkId, by: object) -> None:
        if not self.table.get(id).pinned:
            self.table.pin([id])
            self._note_pin(id, by)

    def _note_pin(self, id: ChunkId, by: object) -> None:
        old = self._pins.pop(id, None)
        if by is not None:
            self._pins[id] = by

        def put_back() -> None:
            self._pins.pop(id, None)
            if old is not None:
                self._pins[id] = old

        self.table.if_undone(put_back)

    def _leaves(self, name: str, record: Record) -> None:
        """Unpin a chunk that a name does not stand for any more, if nothing else asks for the pin."""
        others = [each for each in record.names if each != name]
        anchors = [each for each in others if each.startswith(self.full(ANCHORS) + "/")]
        if record.pinned and (not others or (record.id in self._pins and not anchors)):
            self._unpin(record.id)

    def _unpin(self, id: ChunkId) -> None:
        self.table.pin([id], False)
        self._note_pin(id, None)

    def put_back(self, name: str, bound: Bound | None) -> None:
        """Let a name stand for what it stood for; a chunk that was freed is made again."""
        if bound is None:
            if self.find(name) is not None:
                self.unbind(name)
            return
        id = self.again(bound)
        self.bind(name, id, replace=True)
        if bound.pinned:
            self._pin(id, bound.pinned_by)
        elif self.table.get(id).pinned:
            self._unpin(id)

    def again(self, bound: Bound) -> ChunkId:
        """Return a chunk, made again from its tokens where it is gone. Raises ChunkLost for one
        whose rows no token made."""
        if self.there(bound.id) is not None:
            return bound.id
        tokens = [int(t) for t in bound.tokens]
        if NO_TOKEN in tokens:
            raise ChunkLost(f"#{bound.id}")
        id = self.make(tokens, bound.kind, bound.base)
        if self.table.get(id).digest != bound.digest:
            keep = named_by(self.table.get(id).digest, bound.digest)
            id = id if keep is None else self.maker.thin(id, keep)
        return id
