"""bench/policies.py runs on generated traces."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


def test_quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    import policies

    policies.main(["--quick", "--json", "--out", str(tmp_path / "p.json")])
    found = json.loads((tmp_path / "p.json").read_text())["generated"]
    assert len(found) == 1 and list(found[0]) == ["1%", "3%", "10%", "30%"]
    closed = found[0]["10%"]["closed"]["tokens"]
    assert closed["lru"] == 0 and closed["belady"] == 1
    assert closed["undeclared"] < closed["declared"] < closed["queue of 16"]
    assert "policies" in sys.modules
