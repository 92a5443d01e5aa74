"""Traces made by hand, in which all that an analysis says is known."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kvweave.probe.trace import PageTrace, TraceHeader, TraceSteps, write


def steps(mass: np.ndarray, over: float = 0.0, first: int = 0) -> TraceSteps:
    """Steps of ``mass`` [head, page, step]; what has more than ``over`` is read."""
    mass = mass.astype(np.float32)
    tokens = np.arange(first, first + mass.shape[-1], dtype=np.int32)
    return TraceSteps(first, tokens, mass, mass > over)


def blocks(some: TraceSteps, size: int) -> list[TraceSteps]:
    """The same steps in blocks of ``size``."""
    cuts = range(0, some.n, size)
    return [
        TraceSteps(
            some.first + at,
            some.tokens[at : at + size],
            some.mass[..., at : at + size],
            some.access[..., at : at + size],
        )
        for at in cuts
    ]


def trace(
    path: Path, some: TraceSteps, size: int = 5, page: int = 4, prompt: int = 8, **notes: object
) -> PageTrace:
    """A trace on disk."""
    heads = tuple((h // 2, h % 2) for h in range(some.mass.shape[0]))
    return PageTrace(write(path, TraceHeader(page, heads, prompt), blocks(some, size), **notes))
