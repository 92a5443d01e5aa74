"""Rows in a file without a name, against a tensor: any slots, in any order, of any width."""

from __future__ import annotations

import gc
import os

import numpy as np
import pytest
import torch

from kvweave.run import spill
from kvweave.run.spill import SpillFile


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [spill.BLOCK, 100])
def test_what_is_read_is_what_was_written(
    dtype: torch.dtype, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spill, "BLOCK", block)
    draw = np.random.default_rng(3)
    shapes = [(3, 120, 8), (3, 120, 5), (3, 120, 0)]
    kept = SpillFile.of().rows(shapes, dtype)
    wanted = [torch.zeros(shape, dtype=dtype) for shape in shapes]
    for _ in range(60):
        head, n = int(draw.integers(3)), int(draw.integers(90))
        slots, asked = draw.permutation(120)[:n], draw.permutation(120)[: int(draw.integers(120))]
        for rows, twin in zip(kept, wanted, strict=True):
            new = torch.randn(n, rows.dim).to(dtype)
            rows.write(head, slots, new)
            twin[head, torch.from_numpy(slots)] = new
            assert torch.equal(rows.read(head, asked), twin[head, torch.from_numpy(asked)])


def test_sheets_share_files_and_the_last_one_closes_it() -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else None
    sheets = [SpillFile.of().rows([(1, 4, 2)], torch.float32)[0] for _ in range(spill.SHARED * 2)]
    files = {sheet.file.number for sheet in sheets}
    assert len(files) <= 3
    for i, sheet in enumerate(sheets):
        sheet.write(0, np.arange(4), torch.full((4, 2), float(i)))
    assert [float(s.read(0, np.array([3]))[0, 1]) for s in sheets] == [
        *map(float, range(len(sheets)))
    ]
    del sheets, sheet
    gc.collect()
    if before is not None:
        assert len(os.listdir("/proc/self/fd")) <= before
