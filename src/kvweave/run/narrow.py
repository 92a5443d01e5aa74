"""The last layer of a pass, computed only for rows of which something is wanted.

Nothing reads what the last layer makes of a row but its logits and who watches its attention; of
all other rows it owes their keys and values. So it is called twice: for all rows, until these are
written, and then for the few. A repair of 140 rows whose last one is asked saves most of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kvweave.run import attention
from kvweave.run.base import Backend, Ints, LayerInfo, Work, n_numbers, readers_of
from kvweave.run.batch import Batch, KeysWritten
from kvweave.run.part import BatchPart
from kvweave.run.trouble import is_resource_error
from kvweave.run.verify import TOLERANCE
from kvweave.run.widen import widened

FEWER = 8  # rows that have to be saved: the layer is called twice
ROWS, WANTED = 24, (17, 22)  # of the context that it is tried on


def last_layer(model: nn.Module, infos: Sequence[LayerInfo]) -> nn.Module | None:
    """Return the module that is a model's last layer, if it writes the last rows and attends to
    these."""
    last = n_numbers(infos) - 1
    if not infos[-1].attends or infos[-1].handed is not None:
        return None
    if any(x.mixer is not None and x.mixer.number == last for x in infos):
        return None
    if readers_of(infos).get(last) != len(infos) - 1 or infos[-1].readers[:1] not in ((), (last,)):
        return None
    for module in model.modules():  # the outermost come first
        if isinstance(module, nn.ModuleList) and len(module):
            if any(getattr(inner, "layer_idx", None) == last for inner in module[-1].modules()):
                return module[-1]
    return None


def narrowed(batch: Batch) -> Batch | None:
    """Return the batch of those rows of ``batch`` that its last layer has to be computed for; None
    where that is about all of them."""
    if batch.together is not None or batch.last < len(batch.infos) or batch.total < FEWER:
        return None
    works, kept = [], []
    for part in batch.parts:
        rows = _kept(part, batch)
        if len(rows):
            works.append(_only(part.work, rows))
            kept.append(part.span.start + rows)
    if not works or batch.total - sum(len(rows) for rows in kept) < FEWER:
        return None
    small = Batch(works, batch.infos, batch.device)
    small.kept_of = torch.as_tensor(np.concatenate(kept), device=batch.device)
    return small


def _kept(part: BatchPart, batch: Batch) -> Ints:
    """Return the rows of a part that are wanted or watched in the last layer."""
    work, every = part.work, np.arange(part.n)
    if part.last < len(batch.infos):
        return every[:0]
    wanted = np.isin(every, work.want)
    if work.observer is not None:
        first, last = attention.rows_watched(part, len(batch.infos) - 1)
        if work.observer.asks or (first < last and last != part.n):
            return every  # rows that are no end of the work could not be numbered
        wanted[first:last] = True
    return every[wanted]


def _only(work: Work, rows: Ints) -> Work:
    """Return a work of some rows of ``work``; the last ones keep their numbers."""
    return replace(
        work,
        tokens=np.zeros(len(rows), np.int64),
        slots=work.slots[rows],
        positions=work.positions[rows],
        want=np.searchsorted(rows, work.want),
        raw=None,
        at=work.at + work.n - len(rows),
    )


def install(module: nn.Module) -> Any:
    """Make a model's last layer compute a batch that is narrowed; return the hook."""

    def enter(module: nn.Module, args: Any, options: Any) -> Any:
        batch = attention.current.get(None)
        small = None if batch is None else batch.narrow
        if batch is None or small is None:
            return None
        try:
            module.forward(*args, **options)
        except KeysWritten:
            attention.current.set(small)  # who set the whole one takes it back
        assert small.kept_of is not None
        return tuple(_cut(x, batch.total, small.kept_of) for x in args), {
            name: _cut(x, batch.total, small.kept_of) for name, x in options.items()
        }

    return module.register_forward_pre_hook(enter, with_kwargs=True)


def _cut(given: Any, n: int, rows: Tensor) -> Any:
    """Return of what has an entry for each of ``n`` rows those of ``rows``."""
    if isinstance(given, Tensor):
        if given.dim() == 1 and len(given) == n:
            return given[rows]
        return given[:, rows] if given.dim() > 1 and given.shape[:2] == (1, n) else given
    if isinstance(given, tuple):
        return tuple(_cut(each, n, rows) for each in given)
    return given


@torch.inference_mode()
def agrees(backend: Backend) -> bool:
    """Tell whether passes come to the same for a few rows as for all."""
    n = min(ROWS, backend.limit)
    wanted = np.array([at for at in WANTED if at < n], np.int64)
    if n - len(wanted) < FEWER or not len(wanted):
        return False
    every = np.arange(n)
    tokens = (every * 6121 + 29) % backend.n_vocab
    found: list[list[Tensor]] = []
    with widened(backend.dtype):
        try:
            for want in (every, wanted):
                rows = backend.new_rows()
                rows.reserve(n)
                (logits,) = backend.forward([Work(rows, tokens, every, every, want=want)])
                if want is every:
                    logits = logits[torch.as_tensor(wanted, device=logits.device)]
                found.append([logits, *rows.read(len(backend.layers) - 1, every)])
        except Exception as error:
            if is_resource_error(error):
                raise
            return False
    close = TOLERANCE.get(found[0][0].dtype, TOLERANCE[torch.float32])
    return all(
        bool((a - b).abs().max() <= close * a.abs().max().clamp_min(1e-9))
        for a, b in zip(*found, strict=True)
    )
