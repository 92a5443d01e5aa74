"""The edits of a context, each sent by itself or collected in a block and sent together."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

from kvweave.chunk.identity import Kind
from kvweave.client import parse
from kvweave.client.block import Block, OneEdit
from kvweave.client.faces import Awaited, Blocking, Editing
from kvweave.weave.parts import Mode, Part, TextOrTokens

AnyPart = str | int | Part


class EditVerbs:
    """The edits of `kvweave.weave.context.Context`; a part is addressed by its name, its chunk's
    ``#id``, its index, or the `Part` itself."""

    @Editing
    def append(
        self, content: TextOrTokens, *, kind: Kind = "document", name: str | None = None
    ) -> OneEdit[Part]:
        """Add text or token ids at the end; ``name`` stores it by that name."""
        return _append(**content_of(content), kind=kind, name=name)

    @Editing
    def append_chunk(self, ref: str) -> OneEdit[Part]:
        """Add a stored chunk at the end. Raises ChunkNotFound."""
        return _append(chunk=ref)

    @Editing
    def append_slice(self, ref: str, start: int, stop: int) -> OneEdit[Part]:
        """Add tokens ``[start, stop)`` of a stored chunk at the end."""
        return _append(chunk=ref, start=start, stop=stop)

    @Editing
    def insert(
        self, index: int, content: TextOrTokens, *, kind: Kind = "document", name: str | None = None
    ) -> OneEdit[Part]:
        """Add text or token ids before the part at ``index``."""
        return _append(**content_of(content), kind=kind, name=name, at=index)

    @Editing
    def insert_chunk(self, index: int, ref: str) -> OneEdit[Part]:
        """Add a stored chunk before the part at ``index``. Raises ChunkNotFound."""
        return _append(chunk=ref, at=index)

    @Editing
    def insert_slice(self, index: int, ref: str, start: int, stop: int) -> OneEdit[Part]:
        """Add tokens ``[start, stop)`` of a stored chunk before the part at ``index``."""
        return _append(chunk=ref, start=start, stop=stop, at=index)

    @Editing
    def message(self, role: Kind, content: str) -> OneEdit[Part]:
        """Add one chat message, wrapped by the model's chat template."""
        return OneEdit("message", {"role": role, "content": content}, parse.part)

    @Editing
    def drop(self, *refs: AnyPart, mode: Mode | None = None) -> OneEdit[None]:
        """Remove parts: ``forget`` them, or ``evict`` only their memory; all of them or none."""
        return _edit("drop", parts=refs_of(refs), mode=mode)

    @Editing
    def replace(
        self, ref: AnyPart, content: TextOrTokens, *, kind: Kind = "document"
    ) -> OneEdit[Part]:
        """Put new text in the place of a part; what stands behind is woven anew."""
        body = {"part": ref_of(ref), "kind": kind, **content_of(content)}
        return OneEdit("replace", body, parse.part)

    @Editing
    def amend(
        self,
        ref: AnyPart,
        content: TextOrTokens,
        *,
        kind: Kind | None = None,
        role: Kind | None = None,
    ) -> OneEdit[Part]:
        """Add an erratum of a part at the end; what stands there is left as it is."""
        body = {"part": ref_of(ref), **content_of(content), "kind": kind, "role": role}
        return OneEdit("amend", {k: v for k, v in body.items() if v is not None}, parse.part)

    @Editing
    def reorder(self, order: Sequence[AnyPart]) -> OneEdit[None]:
        """Put the parts in another order; ``order`` names each of them once."""
        return _edit("reorder", order=refs_of(order))

    @Editing
    def leave(self, *ranges: tuple[int, int]) -> OneEdit[None]:
        """Leave only these half-open, increasing ranges of the context's tokens."""
        return _edit("leave", ranges=[list(each) for each in ranges])


class EditBlock(Block, EditVerbs, Blocking):
    """A block of edits of a `RemoteContext`."""

    def __enter__(self) -> EditBlock:
        self._enter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._leave()
        if kind is None:
            self._wire.run(self._course())


class AsyncEditBlock(Block, EditVerbs, Awaited):
    """A block of edits of an `AsyncRemoteContext`; within it nothing is awaited."""

    async def __aenter__(self) -> AsyncEditBlock:
        self._enter()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._leave()
        if kind is None:
            await self._wire.run(self._course())


def content_of(content: TextOrTokens) -> dict[str, object]:
    """Return text or token ids as fields of a request."""
    return {"text": content} if isinstance(content, str) else {"tokens": [*map(int, content)]}


def ref_of(ref: AnyPart) -> str | int | dict[str, int]:
    """Return a part as a request addresses it: a `Part` by its uid, which no edit changes."""
    return {"uid": ref.uid} if isinstance(ref, Part) else ref


def refs_of(refs: Sequence[AnyPart]) -> list[str | int | dict[str, int]]:
    """Return parts as a request addresses them."""
    return [ref_of(ref) for ref in refs]


def _append(**body: object) -> OneEdit[Part]:
    return OneEdit("append", {k: v for k, v in body.items() if v is not None}, parse.part)


def _edit(verb: str, **body: object) -> OneEdit[None]:
    return OneEdit(verb, {k: v for k, v in body.items() if v is not None}, _nothing)


def _nothing(_: Any) -> None:
    return None
