"""What a mixer (`run/mixer.py`) makes of the rows of a pass, from what contexts keep of it.

The rows of a pass are written among the others first. Then the mixer runs from the last state that
is known in front of them; what was placed as it is, and holds none of them, carries the state over
by its map (`run/carry.py`), but for its first rows, which the convolutions reach from outside.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from torch import Tensor

from kvweave.run import attention
from kvweave.run.base import Ints
from kvweave.run.batch import Batch
from kvweave.run.carry import RoundedMap, carried, outputs_of, without_outputs
from kvweave.run.mixer import EMPTY, Mixer, MixerState
from kvweave.run.part import BatchPart
from kvweave.run.primed import (
    MixerCall,
    Outputs,
    joined_outputs,
    last_outputs,
    picked_outputs,
    rows_given,
    run_mixer,
)
from kvweave.run.states import MAPS, MapHolder, PlacedSpan, StateRows
from kvweave.run.upload import up

PIECE = 1024  # rows that a mixer runs at once
LEAST = 48  # rows of a chunk that is worth a map
STEP = 16  # one row from a state costs about as much as so many at once


@dataclass(frozen=True, slots=True)
class ReplaySpan:
    """Slots ``[start, stop)`` to run, ``picked`` of which are of the pass; or to be carried over."""

    start: int
    stop: int
    picked: Ints
    holder: MapHolder | None = None
    exact: bool = True


def install(layer: int, mixer: Mixer, passing: type) -> None:
    """Have the module of a mixer, of our copy of a model, compute passes as layer ``layer``: where
    its cache is a ``passing``. With any other cache it does what it did."""

    def forward(*args: Any, **options: Any) -> Outputs:
        call = MixerCall(args, options)
        if not isinstance(call.cache, passing):
            out: Outputs = mixer.forward(*args, **options)
            return out
        return replayed(attention.current.get(), layer, mixer, call)

    module: Any = mixer.forward.__self__  # type: ignore[attr-defined]
    module.forward = forward


def replayed(batch: Batch, layer: int, mixer: Mixer, call: MixerCall) -> Outputs:
    """Write the rows of a pass in a layer, and return what the mixer makes of them, one part behind
    the other. Raises StopPass behind the last layer that is wanted, LoadFailed."""
    rows, half = rows_given(mixer, call)[0, :, None], mixer.shape.k_dim
    batch.write(layer, rows[..., :half], rows[..., half:])
    outs: list[Outputs | None] = []
    for part in batch.parts:
        outs.append(_part(part, layer, mixer, call) if layer < part.last else None)
    like = next(out for out in outs if out is not None)
    every = [
        _zeros(like, part.n) if out is None else out
        for out, part in zip(outs, batch.parts, strict=True)
    ]
    return joined_outputs(every)


def _zeros(like: Outputs, n: int) -> Outputs:
    if isinstance(like, Tensor):
        return like.new_zeros(like.shape[0], n, *like.shape[2:]) if like.dim() > 1 else like
    return tuple(_zeros(t, n) if isinstance(t, Tensor) else t for t in like)


def _part(part: BatchPart, layer: int, mixer: Mixer, call: MixerCall) -> Outputs:
    rows = part.rows.layers[layer]
    assert isinstance(rows, StateRows)
    if not mixer.sums:
        return _tails(rows, part, call)
    start, state = rows.latest(part.first)
    if mixer.stepwise and state and (part.stop - start) * STEP > part.stop:
        start, state = 0, EMPTY
    outs: list[Outputs] = []
    for segment in _segments(rows, start, part):
        if segment.holder is not None:
            state = _carry(rows, segment, segment.holder, call, state)
        else:
            out, state = _run(rows, segment, call, state)
            if len(segment.picked):
                outs.append(out)
        rows.mark(segment.stop, state)
    return joined_outputs(outs)


def _tails(rows: StateRows, part: BatchPart, call: MixerCall) -> Outputs:
    """Return what a mixer makes of a part whose rows depend on few before them: those alone are run
    again, for rows that do not follow each other a window for each."""
    border, slots = rows.mixer.border, part.work.slots
    first = max(0, part.first - border)
    if part.contiguous or part.n * (border + 1) >= part.stop - first or part.first < border:
        return _run(rows, ReplaySpan(first, part.stop, slots - first), call, EMPTY)[0]
    device = rows.k.device
    windows = up((slots[:, None] + np.arange(-border, 1)).reshape(-1), device)
    inputs = rows.picked(windows).view(part.n, border + 1, -1)
    out, _ = run_mixer(rows.mixer, call, inputs, EMPTY)
    return last_outputs(out, border + 1)


def _segments(rows: StateRows, start: int, part: BatchPart) -> Iterator[ReplaySpan]:
    """Cut slots from ``start`` to the last of a part: where chunks begin that are carried over, at
    the first of its slots, and where they are too many for one call."""
    slots = part.work.slots
    found: list[tuple[int, int, PlacedSpan | None]] = []
    at = start
    for span in rows.spans if rows.mixer.form is not None and not rows.mixer.stepwise else ():
        least = max(LEAST, rows.mixer.border + 1)
        if span.start < at or span.stop > part.stop or span.stop - span.start < least:
            continue
        if np.searchsorted(slots, span.start) == np.searchsorted(slots, span.stop):
            found += [(at, span.start, None), (span.start, span.stop, span)]
            at = span.stop
    found.append((at, part.stop, None))
    for first, last, placed in found:
        if placed is not None:
            yield ReplaySpan(first, last, slots[:0], placed.holder, placed.exact)
            continue
        behind = int(np.searchsorted(slots, first))
        cuts = {*range(first, last, PIECE), last}
        if behind < len(slots) and first < slots[behind] < last:
            cuts.add(int(slots[behind]))
        edges = sorted(cuts)
        for a, b in pairwise(edges):
            picked = slots[np.searchsorted(slots, a) : np.searchsorted(slots, b)]
            yield ReplaySpan(a, b, picked - a)


def _run(
    rows: StateRows, segment: ReplaySpan, call: MixerCall, state: MixerState
) -> tuple[Outputs, MixerState]:
    n, picked = segment.stop - segment.start, segment.picked
    inputs, mixer = rows.inputs(segment.start, segment.stop), rows.mixer
    if not len(picked):
        with without_outputs(mixer):
            return run_mixer(mixer, call, inputs, state)
    if len(picked) == n:
        return run_mixer(mixer, call, inputs, state)
    wanted = up(picked, inputs.device)
    with outputs_of(mixer, n, wanted):
        out, state = run_mixer(mixer, call, inputs, state)
    return picked_outputs(out, n, wanted), state


def _carry(
    rows: StateRows, segment: ReplaySpan, holder: MapHolder, call: MixerCall, state: MixerState
) -> MixerState:
    """Return the state behind a chunk that was placed as it is."""
    mixer = rows.mixer
    inner = segment.start + max(1, mixer.border)
    with without_outputs(mixer):
        _, state = run_mixer(mixer, call, rows.inputs(segment.start, inner), state)
    found = holder.map
    if found is None or (segment.exact and isinstance(found, RoundedMap)):
        assert mixer.form is not None
        inputs = rows.inputs(inner, segment.stop)
        found = carried(mixer, call, inputs, state, mixer.form)
        MAPS.keep(holder, found)
    else:
        MAPS.used(holder)
    return (found.whole() if isinstance(found, RoundedMap) else found)(state)
