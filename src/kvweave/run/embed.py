"""A vector of a text: the mean of the model's last hidden states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvweave.errors import CannotRun
from kvweave.run.base import Backend, Observer, Work

PIECE = 256  # rows of one pass: what others may have to wait for
NO_STATES = "its last hidden states cannot be had: no vectors"


class _Enough(Exception):
    """Ends a pass when the last hidden states are there: nobody wants logits of all rows."""


class _Unseen(Observer):
    """Shown nothing; a pass that it stands in is not played from a recording."""

    sees = False


class Embedding:
    """The vector of one text, made piece by piece; nothing of it is kept.

    Raises CannotRun for a model whose last hidden states cannot be had.
    """

    def __init__(self, backend: Backend, tokens: Sequence[int], n_front: int = 0) -> None:
        """The first ``n_front`` tokens are read, and not counted in."""
        self._head = head_of(backend)
        self._backend, self._n_front = backend, n_front
        self._tokens = np.asarray(tokens, np.int64)
        self._rows = backend.new_rows()
        self._sum: Tensor | None = None
        self._done = 0

    @property
    def n_bytes(self) -> int:
        """Bytes of the rows that are there while it is made."""
        return self._rows.bytes_for(len(self._tokens))

    @property
    def is_done(self) -> bool:
        return self._done == len(self._tokens)

    def step(self) -> None:
        """Read the next piece. Raises ContextTooLong."""
        piece = self._tokens[self._done : self._done + PIECE]
        slots = self._done + np.arange(len(piece))
        self._rows.reserve(len(self._tokens))
        work = Work(self._rows, piece, slots, slots, np.arange(len(piece)), observer=_Unseen())
        with _caught(self._head) as found, suppress(_Enough):
            self._backend.forward([work])
        if not found or found[0].shape[-2] < len(piece):  # more: rows that fill a pass up
            raise CannotRun(NO_STATES)
        states = found[0].flatten(0, -2)[: len(piece)][max(0, self._n_front - self._done) :]
        total = states.to(torch.float32).sum(0)
        self._sum = total if self._sum is None else self._sum + total
        self._done += len(piece)

    @property
    def vector(self) -> NDArray[np.float32]:
        """The mean [d], of length 1; zeros where nothing was counted."""
        assert self._sum is not None, "nothing was read"
        made = self._sum / max(float(self._sum.norm()), 1e-12)
        return made.cpu().numpy().astype(np.float32)


def head_of(backend: Backend) -> Any:
    """Return the module that makes logits of last hidden states. Raises CannotRun."""
    backend.require_run()
    model: Any = getattr(backend, "model", None)
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is None:
        raise CannotRun(NO_STATES)
    return head


@contextmanager
def _caught(head: Any) -> Iterator[list[Tensor]]:
    """Collect what ``head`` is given, and end the pass there."""
    found: list[Tensor] = []

    def take(module: Any, args: Any) -> None:
        found.append(args[0])
        raise _Enough

    hook = head.register_forward_pre_hook(take)
    try:
        yield found
    finally:
        hook.remove()
