"""Run a mixer (`run/mixer.py`) by its own code, with a layer of transformers' cache that holds a state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import LinearAttentionLayer

from kvweave.run.mixer import EMPTY, Mixer, MixerState

Outputs: TypeAlias = Tensor | tuple[Any, ...]


class PrimedLayer(LinearAttentionLayer):
    """transformers' layer of states, which begins with one."""

    def __init__(self, n_states: int, state: MixerState = EMPTY) -> None:
        super().__init__(n_states)
        for j, tail in state.convs.items():
            self.conv_states[j], self.conv_kernel_size[j] = tail.clone(), tail.shape[-1]
            self.is_conv_states_initialized[j] = self.has_previous_state[j] = True
        for j, each in state.sums.items():
            self.recurrent_states[j] = each.clone()
            self.is_recurrent_states_initialized[j] = self.has_previous_state[j] = True

    def lazy_initialization(
        self,
        conv_states: Tensor | None = None,
        recurrent_states: Tensor | None = None,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
    ) -> None:
        """Make room, as transformers does, but for what compiling and CUDA graphs ask for."""
        if conv_states is not None:
            self.dtype, self.device = conv_states.dtype, conv_states.device  # type: ignore[assignment]
            size = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
            self.conv_kernel_size[state_idx] = size
            self.conv_states[state_idx] = conv_states.new_zeros(*conv_states.shape[:-1], size)
            self.is_conv_states_initialized[state_idx] = True
        if recurrent_states is not None:
            self.recurrent_states[state_idx] = torch.zeros_like(recurrent_states)
            self.is_recurrent_states_initialized[state_idx] = True

    def state(self) -> MixerState:
        """Return what it holds now."""
        return MixerState(*(
            {j: t for j, t in each.items() if t is not None}
            for each in (self.conv_states, self.recurrent_states)
        ))  # fmt: skip


@dataclass(frozen=True, slots=True)
class MixerCall:
    """The arguments that a model gives a mixer, and its cache among them."""

    args: tuple[Any, ...]
    options: Mapping[str, Any]

    @property
    def cache(self) -> Cache | None:
        """The cache that it is given."""
        every = (*self.args, *self.options.values())
        return next((each for each in every if isinstance(each, Cache)), None)

    @property
    def places(self) -> tuple[int | str, ...]:
        """Where its input rows are: every floating [batch, row, width]."""
        every: list[tuple[int | str, Any]] = [*enumerate(self.args), *self.options.items()]
        return tuple(
            where
            for where, t in every
            if isinstance(t, Tensor) and t.is_floating_point() and t.dim() == 3
        )

    def __getitem__(self, where: int | str) -> Any:
        return self.args[where] if isinstance(where, int) else self.options[where]

    def replaced(self, given: Mapping[int | str, Tensor]) -> MixerCall:
        """Return this with other rows."""
        args = tuple(given.get(i, each) for i, each in enumerate(self.args))
        return MixerCall(args, {k: given.get(k, each) for k, each in self.options.items()})


def rows_given(mixer: Mixer, call: MixerCall) -> Tensor:
    """Return the input rows [batch, row, width] of a call."""
    given = [call[where] for where in mixer.places]
    return given[0] if len(given) == 1 else torch.cat(given, -1)


def run_mixer(
    mixer: Mixer, call: MixerCall, rows: Tensor, state: MixerState
) -> tuple[Outputs, MixerState]:
    """Run a mixer over contiguous ``rows`` [batch, row, width] from ``state`` on; return what it
    returns for them, and the state behind them. All else is as in ``call``."""
    if mixer.stepwise and state and rows.shape[1] > 1:
        outs = []
        for i in range(rows.shape[1]):
            out, state = run_mixer(mixer, call, rows[:, i : i + 1], state)
            outs.append(out)
        return joined_outputs(outs), state
    cache = call.cache
    assert cache is not None, "a mixer without a cache"
    before, layer = cache.layers[mixer.number], PrimedLayer(mixer.n_states, state)
    parts = torch.split(rows, list(mixer.widths), -1)
    given = {w: t.to(call[w].dtype) for w, t in zip(mixer.places, parts, strict=True)}
    mine = call.replaced(given)
    cache.layers[mixer.number] = layer
    try:
        out = mixer.forward(*mine.args, **mine.options)
    finally:
        cache.layers[mixer.number] = before
    return out, layer.state()


def picked_outputs(out: Outputs, n: int, rows: Tensor | slice) -> Outputs:
    """Return of what a mixer returned for ``n`` rows that of some."""
    if isinstance(out, Tensor):
        return out[:, rows] if out.dim() > 1 and out.shape[1] == n else out
    return tuple(picked_outputs(t, n, rows) if isinstance(t, Tensor) else t for t in out)


def last_outputs(out: Outputs, n: int) -> Outputs:
    """Return of what a mixer returned for batches of ``n`` rows that of the last of each, as rows of
    one batch."""
    if isinstance(out, Tensor):
        return out[:, -1][None] if out.dim() > 1 and out.shape[1] == n else out
    return tuple(last_outputs(t, n) if isinstance(t, Tensor) else t for t in out)


def joined_outputs(outs: Sequence[Outputs]) -> Outputs:
    """Return what a mixer returned for runs of rows, as if they had been one."""
    if len(outs) == 1:
        return outs[0]
    first = outs[0]
    if isinstance(first, Tensor):
        return torch.cat([out for out in outs if isinstance(out, Tensor)], 1)
    columns = zip(*outs, strict=True)
    return tuple(joined_outputs(list(c)) if isinstance(c[0], Tensor) else c[0] for c in columns)
