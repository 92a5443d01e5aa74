"""What a model says when it thinks by itself, all words of many chains at once.

The true chain is read as a first guess, what comes out of it is read as the next, until nothing changes: then every word
is what the words before it lead to, as when one is said after the other (Jacobi). A chain without a fault takes one round.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from study.pool import rows_of
from study.tasks import FAMILIES, make

SECONDS = 6.0  # that a family may take


@torch.inference_mode()
def said(model: Any, ids: Tensor, start: int, end: int, seconds: float = SECONDS) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return chains [chain, row] with greedy words from ``start`` to ``end``, and how many rows of each are settled."""
    now, left = ids.clone(), torch.arange(len(ids), device=ids.device)
    settled = torch.full((len(ids),), end, device=ids.device)
    until = time.monotonic() + seconds
    while len(left):
        hidden = model.base_model(input_ids=now[left, : end - 1], use_cache=False)
        words = model.get_output_embeddings()(hidden.last_hidden_state[:, start - 1 :]).argmax(-1)
        other = words != now[left, start:end]
        same = ~other.any(1)
        settled[left] = torch.where(same, end, start + other.int().argmax(1) + 1)
        now[left, start:end] = words
        left = left[~same]
        if time.monotonic() > until:
            break
    return now, settled


def ask(model: Any, n: int, words: int) -> dict[str, dict[str, Any]]:
    """Return what the study's score says of ``n`` chains of each family that are neither trained nor reported on.

    Words that were not settled in time count as wrong: shares are then at least what they would be.
    """
    found: dict[str, dict[str, Any]] = {}
    for family in FAMILIES:
        made = [make(family, words, f"choose/{i}") for i in range(n)]
        start, end = made[0].start, len(made[0].words)
        assert {(task.start, len(task.words)) for task in made} == {(start, end)}
        true = torch.from_numpy(rows_of(made).ids.astype("int64")).to(model.device)
        ids, settled = said(model, true, start, end)
        rows = torch.arange(start, end, device=ids.device)
        right = (ids == true)[:, start:end] & (rows < settled[:, None])
        first = [int(r.int().argmin()) if not r.all() else None for r in right.cpu()]
        found[family] = {
            "n": n, "words": end - start, "right": round(right.float().mean().item(), 4),
            "whole": sum(f is None for f in first) / n, "first_wrong": first,
            "settled": bool((settled == end).all()),
        }  # fmt: skip
    return found
