"""Launches of passes of one form, recorded once and played again: CUDA graphs.

A pass of few rows is over sooner than Python can launch it. Passes over pools of one size differ in
numbers only, which are uploaded to where the last pass of this size had them (`run/together.py`), so
what was launched for one can be launched again for the next, in one call::

    first pass of a form     runs as it is, and compiles what it needs
    second                   is recorded, and played
    third and so on          played

Rows that have moved to another buffer end all that was recorded. Weights may change in place only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

MOST = 32  # forms that are kept: each holds the unrotated rows of a pass
Form = tuple[int, ...]

log = logging.getLogger("kvweave.run")


class Recordable(Protocol):
    """A pass before it runs."""

    beside: Any  # what it finds beside logits

    @property
    def form(self) -> Form | None:
        """What passes have in common that launch the same; None: no other pass will."""

    def forget(self) -> None:
        """Forget what has been computed so far."""


P = TypeVar("P", bound=Recordable)


@dataclass(slots=True)
class Recorded:
    """A pass that can be played again over other numbers, and where it leaves what it finds."""

    play: Callable[[], object]
    logits: Tensor
    beside: Any


class Graphs:
    """What was recorded of passes over one model's pools."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: dict[Form, Recorded | None] = {}  # None: seen once
        self._n_moves = 0
        self._memory: Any = None  # that all of them compute in
        self._works = True
        self.n_played = 0

    def run(self, batch: P, call: Callable[[P], Tensor], n_moves: int) -> Tensor:
        """Return the logits that ``call`` finds for a batch; ``n_moves`` is of the pools."""
        form = batch.form
        if form is None or not self._works:
            return call(batch)
        if n_moves != self._n_moves or len(self._known) > MOST:
            self._drop()
            self._n_moves = n_moves
        if form not in self._known:
            self._known[form] = None
            return call(batch)
        known = self._known[form]
        if known is None:
            try:
                known = self._known[form] = self.record(batch, call)
            except RuntimeError as error:  # a model that waits for the device amid a pass
                log.warning("passes are launched one by one: %s", error)
                self._works = False
                batch.forget()
                return call(batch)
        known.play()
        self.n_played += 1
        batch.beside = known.beside
        return known.logits.clone()

    def _drop(self) -> None:
        """Forget all that was recorded."""
        if self._memory is not None:
            torch.cuda.synchronize(self._device)  # the last one may be playing
        self._known, self._memory = {}, None  # memory goes with the last graph that has it

    def record(self, batch: P, call: Callable[[P], Tensor]) -> Recorded:
        """Record a pass, which does not run. Raises RuntimeError where this is not possible."""
        if self._memory is None:
            self._memory = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        aside: Any = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(aside):
            # other threads go on: they copy chunks up and down
            graph.capture_begin(pool=self._memory, capture_error_mode="thread_local")
            try:
                logits = call(batch)
            finally:
                graph.capture_end()
        torch.cuda.current_stream(self._device).wait_stream(aside)
        return Recorded(graph.replay, logits, batch.beside)
