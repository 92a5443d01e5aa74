"""Look which modules of a model keep a state, what they are given, and how they go on from one.

A mixer is the innermost module that runs when the cache is asked for a state. What is found here is
of a call of two tokens; `run/verify.py` compares what comes of it with the model's own forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from kvweave.run.carry import behind_the_state, form_of
from kvweave.run.looking import KeptLayer, Refused
from kvweave.run.mixer import EMPTY, Mixer, MixerState
from kvweave.run.primed import MixerCall, PrimedLayer, rows_given, run_mixer
from kvweave.run.trouble import is_resource_error, said
from kvweave.run.widen import HALF, widened

ROWS, FRONT = 8, 5  # rows of a test, and how many of them in front of a state
CLOSE = 1e-3  # relative, in float32


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What a plain cache keeps of a layer."""

    n_states: int | None  # None: no state
    rows: bool
    rate: int = 0  # rows that are pooled into one


@dataclass(slots=True)
class SeenMixer:
    """One module that was seen to keep a state."""

    module: nn.Module
    number: int
    call: MixerCall


@dataclass(slots=True)
class MixerWatch:
    """Notes which module asks for a state, in the order of the layers."""

    running: list[tuple[nn.Module, MixerCall]] = field(default_factory=list)
    found: dict[tuple[int, int], SeenMixer] = field(default_factory=dict)  # by layer and module

    def asked(self, number: int) -> tuple[int, int] | None:
        """A state of layer ``number`` is asked for; return the key of a mixer not seen before."""
        if not self.running:
            raise Refused(f"layer {number} keeps a state that no module of its own asks for")
        module, call = self.running[-1]
        key = number, id(module)
        new = key not in self.found
        self.found.setdefault(key, SeenMixer(module, number, call))
        return key if new else None

    @contextmanager
    def over(self, model: nn.Module) -> Iterator[None]:
        """Watch which modules run."""

        def enter(module: nn.Module, args: Any, options: Any) -> None:
            self.running.append((module, MixerCall(args, options)))

        def leave(module: nn.Module, args: Any, out: Any) -> None:
            self.running.pop()

        hooks: list[Any] = []
        for module in model.modules():
            hooks.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            hooks.append(module.register_forward_hook(leave))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


class SeenStates(PrimedLayer):
    """A layer of states that tells the watch who asks for them."""

    def __init__(self, n_states: int, number: int, watch: MixerWatch, order: list[Any]) -> None:
        super().__init__(n_states)
        self.number, self.watch, self.order = number, watch, order

    def _note(self) -> None:
        key = self.watch.asked(self.number)
        if key is not None:
            self.order.append(key)

    def update_conv_state(self, conv_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Note who calls, and do it."""
        self._note()
        return super().update_conv_state(conv_states, *args, **kwargs)

    def update_recurrent_state(self, recurrent_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Note who calls, and do it."""
        self._note()
        return super().update_recurrent_state(recurrent_states, *args, **kwargs)


class StatesBeside(PrimedLayer, KeptLayer):  # type: ignore[no-untyped-call, override]
    """A layer of states that keeps rows besides: derive with either's own part."""

    is_compileable = False

    def __init__(self, n_states: int) -> None:
        KeptLayer.__init__(self)
        PrimedLayer.__init__(self, n_states)

    def lazy_initialization(self, *args: Any, **options: Any) -> None:
        """Make room for states; rows need none."""
        if options:
            PrimedLayer.lazy_initialization(self, **options)

    get_max_length = KeptLayer.get_max_length


class SeenBoth(SeenStates, StatesBeside):  # type: ignore[no-untyped-call, override]
    """A layer of rows and of states that tells the watch who asks for these."""

    def __init__(self, n_states: int, number: int, watch: MixerWatch, order: list[Any]) -> None:
        StatesBeside.__init__(self, n_states)
        self.number, self.watch, self.order = number, watch, order


def learn_mixer(seen: SeenMixer, n_states: int, dtype: torch.dtype) -> Mixer:
    """Return what a mixer of a model in ``dtype`` is given, keeps, and how it goes on from a state.

    Raises Refused where what it keeps depends on more than its input rows.
    """
    module, call, number = seen.module, seen.call, seen.number
    if not call.places:
        raise Refused(f"layer {number} keeps a state of other things than rows")
    given = [call[where] for where in call.places]
    if any(t.shape[:2] != given[0].shape[:2] for t in given):
        raise Refused(f"layer {number} keeps a state of rows of different kinds")
    if not all(_alike(t) for t in given):
        raise Refused(f"layer {number} keeps a state of rows that change with their position")
    widths = tuple(t.shape[-1] for t in given)
    one = MixerCall(*(_first(each) for each in (call.args, call.options)))
    mixer = Mixer(module.forward, number, n_states, call.places, widths, 0, 0)
    try:
        with widened(dtype):
            mixer = _tried(mixer, one, given[0])
        return replace(mixer, n_bytes=_n_bytes(mixer, one, dtype))
    except Refused:
        raise
    except Exception as error:
        if is_resource_error(error):
            raise
        raise Refused(f"layer {number} cannot go on from a state: {said(error)}") from error


def _tried(mixer: Mixer, call: MixerCall, like: Tensor) -> Mixer:
    draw = torch.Generator().manual_seed(0)
    shape = 1, ROWS, sum(mixer.widths)
    rows = torch.randn(shape, generator=draw, dtype=torch.float64).to(like.device, like.dtype)
    rows = rows * like.float().square().mean().sqrt().clamp_min(1e-3).to(like.dtype)
    _, front = run_mixer(mixer, call, rows[:, :FRONT], EMPTY)
    border = max((tail.shape[-1] for tail in front.convs.values()), default=0)
    mixer = replace(mixer, border=border, sums=bool(front.sums))
    _, whole = run_mixer(mixer, call, rows, EMPTY)
    for stepwise in (False, True):
        mixer = replace(mixer, stepwise=stepwise)
        _, behind = run_mixer(mixer, call, rows[:, FRONT:], front)
        if _close(behind, whole):
            break
    else:
        raise Refused(f"layer {mixer.number} does not go on from the state that it left")
    mixer = replace(mixer, behind=behind_the_state(mixer, call, rows))
    if mixer.stepwise:
        return mixer
    return replace(mixer, form=form_of(mixer, call, rows[:, FRONT:], front))


def _n_bytes(mixer: Mixer, call: MixerCall, dtype: torch.dtype) -> int:
    """Return what a state takes in ``dtype``; it was learned in a wider one."""
    if dtype in HALF:
        call = MixerCall(*(_first(each, dtype) for each in (call.args, call.options)))
    rows = torch.zeros_like(rows_given(mixer, call)[:, :1]).expand(-1, FRONT, -1)
    return run_mixer(mixer, call, rows, EMPTY)[1].n_bytes


def _alike(inputs: Tensor) -> bool:
    """Tell whether ``inputs`` [position, row, width] are the same wherever they stand."""
    scale = inputs.abs().max().clamp_min(1e-9)
    return bool(((inputs - inputs[:1]).abs() <= CLOSE * scale).all())


def _close(a: MixerState, b: MixerState) -> bool:
    pairs = [(x[j], y[j]) for x, y in ((a.convs, b.convs), (a.sums, b.sums)) for j in y]
    return all(bool((x - y).abs().max() <= CLOSE * y.abs().max().clamp_min(1e-9)) for x, y in pairs)


def _first(given: Any, dtype: torch.dtype | None = None) -> Any:
    """Return arguments of which every tensor has its first of the batch only, in ``dtype``."""
    if isinstance(given, Tensor):
        own = given.to(dtype) if dtype is not None and given.is_floating_point() else given
        return own[:1] if own.dim() > 1 else own
    if isinstance(given, tuple):
        return tuple(_first(each, dtype) for each in given)
    if isinstance(given, dict):
        return {k: _first(v, dtype) for k, v in given.items()}
    return given


def layers_of(
    kinds: Sequence[LayerKind],
    offset: int = 0,
    watch: MixerWatch | None = None,
    order: list[Any] | None = None,
) -> list[Any]:
    """Return a layer of a probing cache for each of a model's, whose tokens are at ``offset`` + 0, 1,
    ...; mixers that ask for a state are told to ``watch`` and added to ``order``."""
    made: list[Any] = []
    for i, kind in enumerate(kinds):
        if kind.n_states is None:
            made.append(KeptLayer(offset))
        elif watch is None:
            made.append((StatesBeside if kind.rows else PrimedLayer)(kind.n_states))
        else:
            what = SeenBoth if kind.rows else SeenStates
            made.append(what(kind.n_states, i, watch, [] if order is None else order))
        if kind.n_states is not None and kind.rows:
            made[-1].offset = offset
        if kind.rows:
            made[-1].rate = kind.rate
    return made
