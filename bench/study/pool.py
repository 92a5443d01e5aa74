"""Chains to train on, made once with all cores: models draw from them, under other names each time.

cd bench; python -m study.pool --workers 2      # two minutes; what is there stays
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from study.tasks import FAMILIES, NAMES, PAD, Task, make, vocabulary

POOL = Path(__file__).resolve().parents[1] / ".cache" / "study" / "pool"
STAGES = (24, 48, 96, 200, 400, 1000)  # words of a chain
SIZES = (
    (0.6, 0.8),
    (0.8, 0.95),
    (0.95, 1.06),
)  # of a stage; a batch is of one, so little is padded
TOKENS = (1, 1, 2, 3, 4, 12)  # millions of a stage
HARD = (
    6  # weight of words that are no copies of the prompt, and of the way up: few, and learned last
)
BLOCK = 64  # rows are padded to a multiple: sliding layers see blocks


class Rows(NamedTuple):
    """Chains as numbers: ids [chain, row], and what it weighs to foretell each (0: nothing is asked)."""

    ids: NDArray[np.uint16]
    weight: NDArray[np.uint8]


def is_hard(task: Task, at: int) -> bool:
    """Tell whether a word is a sum, a value taken up again, or where a search goes back to."""
    first = min((min(slots) for slots in task.needs.get(at, ())), default=task.start)
    return (task.words[at].isdigit() and first >= task.start) or task.phases[at] == "up"


def rows_of(made: Sequence[Task]) -> Rows:
    """Return tasks as numbers, padded to the longest."""
    ids = {word: i for i, word in enumerate(vocabulary())}
    length = -(-max(len(task.words) for task in made) // BLOCK) * BLOCK
    rows = Rows(np.full((len(made), length), ids[PAD], np.uint16), np.zeros((len(made), length), np.uint8))  # fmt: skip
    for i, task in enumerate(made):
        rows.ids[i, : len(task.words)] = [ids[word] for word in task.words]
        rows.weight[i, task.start : len(task.words)] = [
            HARD if is_hard(task, at) else 1 for at in range(task.start, len(task.words))
        ]
    return rows


def cell(stage: int, size: int, share: float = 1.0) -> Rows:
    """Return as many chains of each family, family after family, of a stage and size."""
    least, most = (STAGES[stage] * end for end in SIZES[size])
    n = max(2, round(share * TOKENS[stage] * 1e6 / len(FAMILIES) / len(SIZES) / (1.6 * most)))
    rng = random.Random(f"pool/{stage}/{size}")
    return rows_of([
        make(family, round(rng.uniform(least, most)), f"pool/{stage}/{size}/{i}")
        for family in FAMILIES for i in range(n)
    ])  # fmt: skip


def where(stage: int, size: int, folder: Path = POOL) -> Path:
    """Return the file of a cell."""
    return folder / f"{stage}-{size}.npz"


def write(job: tuple[int, int, float, Path]) -> None:
    """Make the file of a cell."""
    stage, size, share, folder = job
    part = where(stage, size, folder).with_suffix(".tmp.npz")
    np.savez_compressed(part, **cell(stage, size, share)._asdict())
    part.rename(where(stage, size, folder))


def fill(workers: int, folder: Path = POOL, share: float = 1.0) -> None:
    """Make what is not there, ``share`` of the usual tokens, in processes beside."""
    folder.mkdir(exist_ok=True, parents=True)
    jobs = [
        (stage, size, share, folder)
        for stage in reversed(range(len(STAGES))) for size in range(len(SIZES))
        if not where(stage, size, folder).exists()
    ]  # fmt: skip
    if jobs:
        with get_context("spawn").Pool(workers) as beside:
            beside.map(write, jobs, chunksize=1)


def turned(ids: Tensor, by: Tensor) -> Tensor:
    """Return chains [chain, row] under other names: these are a ring, so all follows as before."""
    first = len(vocabulary()) - 3 * NAMES
    at = ids - first
    other = first + at // NAMES * NAMES + (at % NAMES + by[:, None]) % NAMES
    return torch.where(at >= 0, other, ids)


class Batch(NamedTuple):
    """Chains to learn from: ids and weight [chain, row], the number of each one's family."""

    ids: Tensor
    weight: Tensor
    family: Tensor


class Draws:
    """Batches of the chains in a folder, which are kept on the device from the first use on."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._folder, self._device = folder, device
        self._cells: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def batch(self, rng: np.random.Generator, stage: int, tokens: int, odds: Sequence[float]) -> Batch:  # fmt: skip
        """Return about ``tokens`` of one size, of families by their ``odds``."""
        size = int(rng.integers(len(SIZES)))
        ids, weight = self._cell(stage, size)
        n = max(1, tokens // ids.shape[1])
        share = np.array(odds) / sum(odds)
        family = rng.choice(len(share), n, p=share)
        each = len(ids) // len(share)
        at = self._put(family * each + rng.integers(each, size=n))
        by = self._put(rng.integers(NAMES, size=n))
        return Batch(turned(ids[at].long(), by), weight[at], self._put(family))

    def _put(self, numbers: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(numbers).to(self._device, non_blocking=True)

    def _cell(self, stage: int, size: int) -> tuple[Tensor, Tensor]:
        if (stage, size) not in self._cells:
            with np.load(where(stage, size, self._folder)) as file:
                parts = file["ids"].astype(np.int16), file["weight"]
            ids, weight = (torch.from_numpy(part).to(self._device) for part in parts)
            self._cells[stage, size] = ids, weight
        return self._cells[stage, size]


def main() -> None:
    """Make what is not there."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)  # fmt: skip
    made.add_argument("--workers", type=int, default=2)
    made.add_argument("--pool", type=Path, default=POOL)
    options = made.parse_args()
    fill(options.workers, options.pool)


if __name__ == "__main__":
    main()
