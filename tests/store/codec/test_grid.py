"""Symbols and bytes: exact values."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvweave.errors import CorruptChunk
from kvweave.store.codec import grid


def test_packed_symbols_are_where_the_docstring_says():
    q = torch.tensor([1, 2, 3, 4, 5, 6, 7, 8], dtype=torch.uint8)
    assert grid.pack(q, 4).tolist() == [0x21, 0x43, 0x65, 0x87]
    word = sum(int(x) << (5 * i) for i, x in enumerate(q))
    assert bytes(grid.pack(q, 5).tolist()) == word.to_bytes(5, "little")
    assert grid.pack(q, 8).tolist() == q.tolist()


@given(bits=st.sampled_from([4, 5, 8]), data=st.data())
def test_packing_loses_nothing(bits, data):
    q = torch.tensor(data.draw(st.lists(st.integers(0, 2**bits - 1))), dtype=torch.uint8)
    packed = grid.pack(q, bits)
    assert len(packed) == grid.packed_size(len(q), bits)
    assert torch.equal(grid.unpack(packed, len(q), bits), q)
    assert torch.equal(grid.unsqueeze(grid.squeeze(packed), len(packed)), packed)


@given(st.floats(0, 2.0**120, width=32))
def test_scales_are_rounded_up(value):
    rounded = float(grid.rounded_up(torch.tensor(value)))
    assert value <= rounded
    assert rounded <= max(value * (1 + 2**-6), 2.0**-119)


def test_symbols_and_values():
    x = torch.tensor([-1.0, -0.4, 0.0, 0.6, 1.0])
    scale = torch.tensor(0.5)
    q = grid.symbols(x, scale, None, 5)
    assert q.tolist() == [0, 1, 2, 3, 4]
    out = torch.empty(5)
    grid.values(q, scale, torch.tensor(10.0), 5, out)
    assert out.tolist() == [9.0, 9.5, 10.0, 10.5, 11.0]
    assert grid.symbols(x + 10, scale, torch.tensor(10.0), 5).tolist() == q.tolist()


def test_a_frame_says_how_long_it_is():
    frame = grid.squeeze(torch.zeros(1 << 20, dtype=torch.uint8))
    assert len(frame) < 1000
    with pytest.raises(CorruptChunk, match="another length"):
        grid.unsqueeze(frame, 100)
