"""Replies of a model, as logits of the expected one and, where it may word them freely, as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from kvweave.run.base import Backend, Rows, Work

LIMIT = 64  # tokens a model writes by itself at most; three steps take some 30


@dataclass(frozen=True, slots=True)
class Heard:
    """``logits`` [token, vocab] for the expected reply, whose tokens are forced; ``said`` is what
    greedy decoding writes, or None where only the expected reply is right."""

    logits: Tensor
    said: str | None = None


def written(backend: Backend, woven: Rows, start: int, tokens: Sequence[int]) -> str:
    """Return the line that greedy decoding writes behind ``tokens``, which stand at ``start``.

    They are run over a copy of the rows; changes nothing.
    """
    rows, ids, out = woven.clone(), np.array(tokens, np.int64), list[int]()
    rows.truncate(start)
    rows.reserve(start + len(ids) + LIMIT)
    slot, place = start, int(rows.positions[start - 1]) + 1 if start else 0
    text = ""
    while len(out) < LIMIT and "\n" not in text.lstrip():
        n = np.arange(len(ids))
        work = Work(rows, ids, slot + n, place + n, n[-1:])
        token = int(backend.forward([work])[0][-1].argmax())
        if token in backend.ends:
            break
        out.append(token)
        text = backend.tokenizer.decode(out, skip_special_tokens=True)
        slot, place, ids = slot + len(ids), place + len(ids), np.array([token], np.int64)
    return text
