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
    found = json.loads((tmp_path / "p.json").read_text())["declared"]["seeds"]
    assert len(found) == 1 and found[0]["closed"]["tokens"]["lru"] == 0
    assert found[0]["closed"]["tokens"]["belady"] == 1
    assert "policies" in sys.modules
