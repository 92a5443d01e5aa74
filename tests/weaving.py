"""Contexts of random tokens for the tests of weaving."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from conftest import tiny
from oracle import EXACT as EXACT

from kvweave import Context, Engine
from kvweave.run.base import Work
from kvweave.run.rows import KVRows
from kvweave.weave.calibration import Calibration, Curve

ZERO = (0.0,) * 6  # weights: every evidence scores 0
WIDE = ((-9.0,) * 5, (9.0,) * 5)  # of the features, which are logarithms


def text(n: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 101, (n,), generator=generator).tolist()


def chat(engine: Engine, name: str, sizes: list[int], first: int = 0, **options: object) -> Context:
    """A context of a base and stored chunks ``name/0`` and so on, of these sizes."""
    context = engine.context(name, **options)
    base = engine.maker.add(text(5, 1000), kind="system")
    context.set_base(base, "base")
    for i, n in enumerate(sizes, first):
        id = engine.maker.add(text(n, i), base=base)
        engine.table.bind(f"{name}/{i}", id)
        engine.maker.canonicalise([base, id])
        context.append_chunk(f"{name}/{i}")
    return context


def again(engine: Engine, name: str, like: Context, **options: object) -> Context:
    """Another context of the same base and stored chunks as ``like``."""
    context = engine.context(name, **options)
    context.set_base(like.parts[0].id, "base")
    for part in like.parts[1:]:
        context.append_chunk(f"#{part.id}")
    return context


@contextmanager
def passes_of(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[int]]]:
    """The slots of every pass while inside."""
    seen: list[list[int]] = []
    forward = engine.runner.forward

    def watched(works: Sequence[Work], *rest: Any, **named: Any) -> list[torch.Tensor]:
        seen.extend(work.slots.tolist() for work in works)
        return forward(works, *rest, **named)

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "forward", watched)
        yield seen


def rows(context: Context) -> KVRows:
    return context.session.state.rows


def tensors(rows: KVRows) -> list[torch.Tensor]:
    """Keys as rotated and values [slot, head, dim], layer by layer."""
    return [t for layer in range(len(rows.infos)) for t in rows.read(layer)]


def same_rows(a: KVRows, b: KVRows) -> bool:
    pairs = zip(tensors(a), tensors(b), strict=True)
    same = a.n == b.n and np.array_equal(a.positions[: a.n], b.positions[: b.n])
    return same and all(torch.equal(x, y) for x, y in pairs)


def flat(**bounds: float) -> Calibration:
    """A calibration that gives every evidence at share .25 the same bounds."""
    curves = [
        Curve(0.25, float(share[1:]) / 100, ZERO, (0.0,), (bound,), *WIDE)
        for share, bound in bounds.items()
    ]
    return Calibration(tiny().fingerprint, 0.95, 100, tuple(curves))
