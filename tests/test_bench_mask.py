"""The bench of the wrong mask: python -m pytest -m slow tests/test_bench_mask.py"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[1] / "bench"


@pytest.mark.slow
def test_only_scattered_rows_see_their_own_future(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    import mask

    monkeypatch.setattr(mask, "PROTOCOLS", ("P4",))
    monkeypatch.setattr(mask, "STRATEGIES", ("query",))
    kl: dict[tuple[str, str], Any] = {
        (row["mask"], row["method"]): row["kl"] for row in mask.rows_of(str(mask.MODEL), 2)
    }
    for method in ("full prefill", "none 0%"):
        assert kl["exact", method] == kl["bottom-right", method]
    assert kl["exact", "query 15%"] != kl["bottom-right", "query 15%"]
