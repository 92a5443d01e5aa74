"""A row of which a token policy has freed all that it could see reads nothing."""

from __future__ import annotations

import pytest
import torch

from kvweave.run.attention import Scaling, VisibleKV, _attention


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("sinks", [False, True])
def test_attention_over_no_rows_is_zero(
    dtype: torch.dtype, watched: bool, n: int, sinks: bool
) -> None:
    keys, values = torch.empty(2, 0, 8, dtype=dtype), torch.empty(2, 0, 6, dtype=dtype)
    how = Scaling(0.5, None, torch.ones(4, dtype=dtype) if sinks else None)
    query = torch.randn(n, 4, 8, dtype=torch.float32).to(dtype)
    out, weights = _attention(query, VisibleKV(keys, values, None), how, watched)
    assert out.shape == (n, 4, 6) and out.dtype == dtype and not out.any()
    assert (weights is None) != watched and (weights is None or weights.shape == (4, n, 0))
