"""What a run of rows does to a mixer's state: an affine map, read off the mixer itself.

Of the mixers in use, linear attention, the delta rule and state spaces make of a state S in front
of some rows A S + B behind them (HYPIC, PICASO: arXiv 2502.17605). A and B are what comes of a unit
state and of none, so no code of a model is read. A chunk that was placed as it is carries the state
over by its map, and is not run again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvweave.run.mixer import EMPTY, Mixer, MixerState
from kvweave.run.primed import MixerCall, run_mixer

FORMS = ("elementwise", "left", "right")  # A * S, A @ S, S @ A
STEPS = 127  # to either side of 0
CLOSE = 1e-3  # of what a random state becomes, in float32


@dataclass(frozen=True, slots=True)
class Rounded:
    """Numbers [..., row, dim] in 8 bits each, of rows with a largest of their own."""

    steps: Tensor  # int8
    size: Tensor  # [..., row, 1] of a step

    @classmethod
    def of(cls, numbers: Tensor) -> Rounded:
        """Round ``numbers``."""
        size = numbers.abs().amax(-1, keepdim=True) / STEPS
        least = torch.finfo(size.dtype).tiny
        return cls((numbers / size.clamp_min(least)).round().to(torch.int8), size)

    def whole(self) -> Tensor:
        """Return the numbers, each within half a step."""
        return self.steps * self.size

    @property
    def nbytes(self) -> int:
        return self.steps.nbytes + self.size.nbytes


@dataclass(frozen=True, slots=True)
class StateMap:
    """Makes the state in front of rows that behind them; the convolutions' tails are theirs alone."""

    form: str
    factor: Tensor
    rest: Tensor
    tails: MixerState

    @property
    def n_bytes(self) -> int:
        return self.factor.nbytes + self.rest.nbytes + self.tails.n_bytes

    def __call__(self, state: MixerState) -> MixerState:
        ((j, old),) = state.sums.items()
        if self.form == "elementwise":
            new = self.factor * old + self.rest
        else:
            pair = (self.factor, old) if self.form == "left" else (old, self.factor)
            new = torch.matmul(*pair) + self.rest
        return MixerState(self.tails.convs, {j: new})


@dataclass(frozen=True, slots=True)
class RoundedMap:
    """A `StateMap` in 8 bits."""

    form: str
    factor: Rounded
    rest: Rounded
    tails: MixerState

    @classmethod
    def of(cls, map: StateMap) -> RoundedMap:
        """Round a map."""
        return cls(map.form, Rounded.of(map.factor), Rounded.of(map.rest), map.tails)

    def whole(self) -> StateMap:
        """Return the map, nearly."""
        return StateMap(self.form, self.factor.whole(), self.rest.whole(), self.tails)

    @property
    def n_bytes(self) -> int:
        return self.factor.nbytes + self.rest.nbytes + self.tails.n_bytes


def carried(mixer: Mixer, call: MixerCall, rows: Tensor, front: MixerState, form: str) -> StateMap:
    """Return the map of ``rows`` [1, row, width]; ``front`` is some state in front of them, whose
    convolutions' tails are the true ones."""
    ((j, like),) = front.sums.items()
    first = _units(like, form)
    starts = torch.cat((torch.zeros_like(like), first))
    n = len(starts)
    convs = {k: tail.expand(n, *tail.shape[1:]) for k, tail in front.convs.items()}
    with _only_the_state(mixer, n):
        wide = rows.expand(n, -1, -1)
        _, behind = run_mixer(mixer, call, wide, MixerState(convs, {j: starts}))
    rest = behind.sums[j][:1]
    factor = behind.sums[j][1:] - rest
    if form != "elementwise":
        rows_first = form == "left"
        size = like.shape[-2] if rows_first else like.shape[-1]
        factor = torch.cat(list(factor), -1 if rows_first else -2)[None]
        factor = factor.narrow(-1 if rows_first else -2, 0, size)
    # copies: a view would hold what all unit states became
    tails = {k: tail[:1].clone() for k, tail in behind.convs.items()}
    return StateMap(form, factor.clone(), rest.clone(), MixerState(tails, {}))


def form_of(mixer: Mixer, call: MixerCall, rows: Tensor, front: MixerState) -> str | None:
    """Return the form of a mixer's maps, by what it makes of a random state; None: it has none."""
    if len(front.sums) != 1:
        return None
    ((j, like),) = front.sums.items()
    draw = torch.Generator().manual_seed(0)
    start = torch.randn(like.shape, generator=draw, dtype=torch.float64).to(like)
    _, behind = run_mixer(mixer, call, rows, MixerState(front.convs, {j: start}))
    wanted = behind.sums[j]
    for form in FORMS if like.dim() > 2 else FORMS[:1]:
        try:
            found = carried(mixer, call, rows, front, form)
        except (RuntimeError, IndexError, ValueError):
            continue
        if found.factor.dim() != like.dim():
            continue
        got = found(MixerState(front.convs, {j: start})).sums[j]
        if got.shape == wanted.shape and bool(
            (got - wanted).abs().max() <= CLOSE * wanted.abs().max().clamp_min(1e-9)
        ):
            return form
    return None


def _units(like: Tensor, form: str) -> Tensor:
    """Return the states [n, ...] of which a factor is read off, one behind the other."""
    if form == "elementwise":
        return torch.ones_like(like)
    tall, wide = like.shape[-2:]
    units = []
    size, step = (tall, wide) if form == "left" else (wide, tall)
    for first in range(0, size, step):
        unit = like.new_zeros(tall, wide)
        width = min(step, size - first)
        block = unit[first : first + width] if form == "left" else unit[:, first : first + width].T
        block.diagonal()[:width] = 1
        units.append(unit.expand(like.shape))
    return torch.cat(units)


def behind_the_state(mixer: Mixer, call: MixerCall, rows: Tensor) -> tuple[nn.Linear, ...]:
    """Return the projections of a mixer that its state does not depend on."""
    owner = getattr(mixer.forward, "__self__", None)
    if not isinstance(owner, nn.Module):
        return ()
    _, wanted = run_mixer(mixer, call, rows, EMPTY)
    found = []
    for each in owner.modules():
        if isinstance(each, nn.Linear):
            with _replaced([each], _nothing):
                _, got = run_mixer(mixer, call, rows, EMPTY)
            if _same(got, wanted):
                found.append(each)
    return tuple(found)


@contextmanager
def without_outputs(mixer: Mixer) -> Iterator[None]:
    """Give a context in which a mixer computes its state, and of its outputs only what is in the way."""
    with _replaced(mixer.behind, _nothing):
        yield


@contextmanager
def outputs_of(mixer: Mixer, n: int, picked: Tensor) -> Iterator[None]:
    """The same in which it computes, of the outputs of ``n`` rows, those of the ``picked`` ones."""

    def some(module: nn.Linear, rows: Tensor) -> Tensor:
        if rows.dim() < 2 or rows.shape[-2] != n:
            return type(module).forward(module, rows)
        out = rows.new_zeros(*rows.shape[:-1], module.out_features)
        out[..., picked, :] = type(module).forward(module, rows[..., picked, :])
        return out

    with _replaced(mixer.behind, some):
        yield


@contextmanager
def _only_the_state(mixer: Mixer, n: int) -> Iterator[None]:
    """The same for the same rows ``n`` times over: what they are projected to is computed once."""
    owner = getattr(mixer.forward, "__self__", None)
    every = owner.modules() if isinstance(owner, nn.Module) else ()
    linear = [m for m in every if isinstance(m, nn.Linear) and m not in mixer.behind]
    with _replaced(mixer.behind, _nothing), _replaced(linear, _once):
        yield


def _nothing(module: nn.Linear, rows: Tensor) -> Tensor:
    return rows.new_zeros(1).expand(*rows.shape[:-1], module.out_features)


def _once(module: nn.Linear, rows: Tensor) -> Tensor:
    if rows.dim() < 3 or rows.stride(0) or len(rows) == 1:
        return type(module).forward(module, rows)
    return type(module).forward(module, rows[:1]).expand(len(rows), *(-1,) * (rows.dim() - 1))


@contextmanager
def _replaced(modules: Sequence[nn.Linear], forward: Any) -> Iterator[None]:
    """Have modules of our own copy of a model compute something else."""
    before = [vars(module).get("forward") for module in modules]
    for module in modules:
        module.forward = forward.__get__(module)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for module, old in zip(modules, before, strict=True):
            if old is None:
                del module.forward
            else:
                module.forward = old  # type: ignore[method-assign]


def _same(a: MixerState, b: MixerState) -> bool:
    pairs = [(x[j], y[j]) for x, y in ((a.convs, b.convs), (a.sums, b.sums)) for j in y if j in x]
    return a.convs.keys() == b.convs.keys() and all(torch.equal(x, y) for x, y in pairs)
