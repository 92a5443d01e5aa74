"""A message and its answer, of which nothing is left where they are interrupted."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import kvweave
from kvweave.errors import ContextBusy, KVWeaveError, Unreachable

if TYPE_CHECKING:
    from kvweave.client import RemoteContext, RemoteTurn
    from kvweave.weave.answer import Answer
    from kvweave.weave.parts import Part
    from kvweave.weave.turn import Turn


def answer_to(
    weaver: kvweave.Engine | kvweave.Client,
    context: kvweave.Context | RemoteContext,
    said: str,
    sampling: kvweave.Sampling,
    show: Callable[[str], None],
) -> Answer:
    """Put a message to a context, ``show`` the answer as it comes, and return it.

    What fails or is interrupted leaves nothing, and what others said meanwhile stays.
    """
    from kvweave.client import RemoteContext

    before = context.snapshot()
    turn: Turn | RemoteTurn | None = None
    try:
        if isinstance(context, RemoteContext):  # one request: nobody's message in between
            turn = context.begin(sampling, chat=True, content=said)
        else:
            context.message("user", said)
            turn = context.begin(sampling, chat=True)
        for piece in turn.stream():
            show(piece)
        return turn.finish()
    except BaseException as error:
        if turn is not None:
            turn.cancel()
        if not isinstance(context, RemoteContext):
            left = context.parts[len(before.parts) :]
        elif isinstance(error, ContextBusy):
            left = ()  # it never began
        else:
            failed = isinstance(error, KVWeaveError) and not isinstance(error, Unreachable)
            known = {part.uid for part in before.parts}
            left = _said(context, weaver.files, said, known, answered=not failed)
        if left:
            context.drop(*left, mode="forget")
        for part in left:
            with suppress(KVWeaveError):
                weaver.files.rm(part.name)
        raise


def _said(
    context: RemoteContext, files: Any, said: str, known: set[int], *, answered: bool
) -> tuple[Part, ...]:
    """Return the part of a message that was given up, and where some was ``answered`` those of that; a
    server leaves nothing of an answer that fails, so what has one then is somebody else's."""
    new = [part for part in context.parts if part.uid not in known]
    for i in reversed(range(len(new))):
        name, behind = new[i].name, new[i + 1 :]
        if "/u-" not in name or not (answered or not behind or "/u-" in behind[0].name):
            continue
        if _letters(said) in _letters(files.text(name)["text"]):
            return new[i], *takewhile(lambda part: "/a-" in part.name, behind)
    return ()


def _letters(text: str) -> str:
    return "".join(filter(str.isalnum, text))
