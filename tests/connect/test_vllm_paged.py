"""Where rows stand in a block, seen by writing: every order of a cache's axes, and those that are none."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("vllm", reason="no vLLM here: make setup-vllm, then make test-vllm")

import torch

from kvweave.connect.vllm.paged import places

ROWS, HEADS, DIM = 4, 3, 16
SHAPES = [(ROWS, HEADS, DIM)] * 2


@pytest.mark.parametrize("order", itertools.permutations(range(4)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_are_found_in_any_order_of_axes(order, dtype):
    """Axes of a block are key or value, row, head, dim, in some order, in memory that goes on behind it."""
    sizes = [(2, ROWS, HEADS, DIM)[axis] for axis in order]
    block = torch.zeros(5, *sizes, dtype=dtype)[:, None].expand(-1, 2, *sizes).contiguous()[3, 1]
    both = block.permute([order.index(axis) for axis in range(4)])

    def write(keys, values):
        both[0], both[1] = keys, values

    found = places(block, SHAPES, write)
    rows = [torch.randn(ROWS, HEADS, DIM).to(dtype) for _ in range(2)]
    write(*rows)
    for (first, strides), wanted in zip(found, rows, strict=True):
        at = block.storage_offset() + first
        assert torch.equal(block.as_strided((ROWS, HEADS, DIM), strides, at), wanted)


def packed(block, keys, values):
    """Two rows beside each other, value by value, as matrix units want them: steps, but not of one axis."""
    pairs = keys.view(2, 2, HEADS, DIM).transpose(1, 3).reshape(-1)
    block.view(-1)[: keys.numel()] = pairs
    block.view(-1)[keys.numel() :] = values.reshape(-1)


def rounded(block, keys, values):
    block.view(-1)[: keys.numel()] = keys.reshape(-1) // 2
    block.view(-1)[keys.numel() :] = values.reshape(-1)


def elsewhere(block, keys, values):
    return None


@pytest.mark.parametrize("write", [packed, rounded, elsewhere])
def test_what_is_no_such_order_is_not_read(write):
    block = torch.zeros(2, ROWS, HEADS, DIM)
    assert places(block, SHAPES, lambda keys, values: write(block, keys, values)) is None
    assert places(block[0], SHAPES, lambda keys, values: write(block, keys, values)) is None
