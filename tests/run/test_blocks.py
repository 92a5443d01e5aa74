"""Query heads that share keys may stand in one block: what comes out is the same."""

from __future__ import annotations

import pytest
import torch

from kvweave.run.attention import FOLD, WIDE, Scaling, VisibleKV, _attention, _fold
from kvweave.run.part import Piece

KV_HEADS, KEYS = 3, 70


@pytest.mark.parametrize("group", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("n", [1, FOLD - 1, FOLD, 48, WIDE // 2, WIDE - 1, WIDE])
def test_however_heads_are_folded_rows_see_what_their_mask_says(n: int, group: int) -> None:
    made = torch.Generator().manual_seed(n * group)
    heads = KV_HEADS * group
    query = torch.randn(n, heads, 8, dtype=torch.float64, generator=made)
    keys = torch.randn(KV_HEADS, KEYS, 8, dtype=torch.float64, generator=made)
    values = torch.randn(KV_HEADS, KEYS, 6, dtype=torch.float64, generator=made)
    seen = torch.rand(n, KEYS, generator=made) < 0.5
    seen[:, 0] = True
    bias = torch.zeros(n, KEYS, dtype=torch.float64).masked_fill_(~seen, -torch.inf)
    piece = Piece(0, n, 0, KEYS, False, False, bias)
    wanted = torch.empty(n, heads, 6, dtype=torch.float64)
    for row in range(n):
        for head in range(heads):
            mine = seen[row]
            share = (keys[head // group, mine] @ query[row, head] * 0.3).softmax(0)
            wanted[row, head] = share @ values[head // group, mine]
    for held in (None, piece, piece):  # the second time what was repeated is there
        out, _ = _attention(
            query, VisibleKV(keys, values, bias, False, held), Scaling(0.3, None), False
        )
        torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-12)
    folded = _fold(n, group, True)
    assert group % folded == 0 and (folded == group or n >= FOLD)
    assert FOLD <= n < WIDE or folded == (group if n < FOLD else 1)
    assert set(piece.repeated) == ({folded} if folded > 1 else set())
