"""What a miss costs (KU2): how far a head's output is off without the pages that a ranking would not have had.

Mass alone does not say it: a page of much attention whose values are alike to the others' is missed cheaply. A recorded
decode is taken up again, its tokens given, and after each step every layer's attention is weighed with its values:
``o`` over all rows and ``o'`` over those that a ranking had, their attention renormalised; the cost is |o' - o| / |o|.
Each layer sees true inputs: errors do not add up from layer to layer (`ablate` lets them).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvweave.errors import ContextTooLong
from kvweave.probe.ablation import prompt_of
from kvweave.probe.recalling import PageBudget, mean_there, ranking, resident
from kvweave.probe.recorder import Probed, Progress, prefill
from kvweave.probe.trace import Bools, Numbers, PageTrace
from kvweave.run.base import Backend, Ints, Observer, Rows, Work

NAMES = ("newest", "recent", "cumulative", "ema", "milestone", "random", "oracle")
LEAST = 1e-9  # of attention that is left


@dataclass(frozen=True, slots=True)
class MissCost:
    """By ranking, the mean over heads [step] of the ``error`` of the output and of the attention ``missed``, of all of
    the step's; NaN in steps in which no page counts."""

    error: Mapping[str, Numbers]
    missed: Mapping[str, Numbers]

    def mean(self, name: str, which: str = "error") -> float:
        """Return the mean over the steps that count; NaN where none does."""
        return mean_there(getattr(self, which)[name])


class StepWeights(Observer):
    """Keeps the attention of the one row of a pass: by layer the first slot and [head, key]."""

    def __init__(self) -> None:
        self.found: dict[int, tuple[int, Tensor]] = {}

    def begin(self) -> None:
        """A pass begins."""
        self.found = {}

    def see(self, layer: int, first: int, begin: int, weights: Tensor) -> None:
        """Take a layer's."""
        self.found[layer] = begin, weights[:, -1]


@torch.inference_mode()
def miss_cost(
    engine: Probed,
    trace: PageTrace,
    names: Sequence[str] = NAMES,
    budget: PageBudget | None = None,
    progress: Progress | None = None,
) -> MissCost:
    """Take a recorded decode up, and weigh what each ranking would have missed.

    Of latents the output is that in front of what expands it. ``progress`` is told of each step. Raises
    InvalidArgument (another model, a trace that cannot be taken up, a ranking), ContextTooLong, CannotRun.
    """
    backend, budget = engine.runner, budget or PageBudget()
    rankings = {
        name: ranking(name, len(trace.header.heads), trace.n_pages) for name in dict.fromkeys(names)
    }
    prompt = prompt_of(backend, trace)
    if len(prompt) + trace.n_steps > backend.limit:
        raise ContextTooLong(len(prompt) + trace.n_steps, backend.limit)
    rows, _ = prefill(backend, prompt, len(prompt) + trace.n_steps)
    errors: dict[str, list[float]] = {name: [] for name in rankings}
    missed: dict[str, list[float]] = {name: [] for name in rankings}
    seen = StepWeights()
    for (mass, access), token in zip(trace.each(), trace.notes["tokens"], strict=False):
        slot = np.array([rows.n])
        # logits of no use, but a pass that wants none may stop before the last layer's attention
        work = Work(rows, np.array([token]), slot, slot, np.array([0]), observer=seen)
        backend.forward([work])
        there = {}
        for name, each in rankings.items():
            each.foresee(mass)
            there[name] = resident(each.scores(), access.shape[1], budget)
            each.see(mass, access)
        first, last = budget.between(access.shape[1])
        found = _costs(backend, rows, trace, seen, list(there.values())) if first < last else None
        for i, name in enumerate(rankings):
            errors[name].append(np.nan if found is None else float(found[0][i].mean()))
            missed[name].append(np.nan if found is None else float(found[1][i].mean()))
        if progress is not None:
            progress(1)
    return MissCost(*({n: np.array(v) for n, v in each.items()} for each in (errors, missed)))


def _costs(
    backend: Backend, rows: Rows, trace: PageTrace, seen: StepWeights, there: Sequence[Bools]
) -> tuple[Numbers, Numbers]:
    """Return errors and missed attention [ranking, head] of one step."""
    errors, missed = (np.zeros((len(there), len(trace.header.heads))) for _ in range(2))
    layers = trace.header.layers
    for layer in np.unique(layers).tolist():
        begin, weights = seen.found[layer]
        heads = np.flatnonzero(layers == layer)
        slots: Ints = np.arange(begin, begin + weights.shape[-1])
        values = rows.read(layer, slots)[1].to(weights.dtype).transpose(0, 1)  # [head, key, dim]
        own = weights.reshape(len(heads), -1, weights.shape[-1])  # [kv head, query head, key]
        whole = own @ values
        size = whole.norm(dim=-1).clamp_min(torch.finfo(whole.dtype).tiny)
        pages = slots // trace.header.page
        for i, each in enumerate(there):
            kept = own * torch.from_numpy(each[heads][:, pages]).to(own)[:, None]
            lost = own.sum(-1) - kept.sum(-1)
            # what stands beside the rows (a sink of its own) keeps its part
            part = kept / (1 - lost).clamp_min(LEAST)[..., None]
            error = (part @ values - whole).norm(dim=-1) / size
            errors[i, heads], missed[i, heads] = error.mean(-1).cpu(), lost.mean(-1).cpu()
    return errors, missed
