"""bench/policies.py runs on generated traces."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from benches import on_path


@pytest.mark.slow
def test_quick(tmp_path: Path) -> None:
    with on_path():
        import policies

        policies.main(["--quick", "--json", "--jobs", "1", "--out", str(tmp_path / "p.json")])
    found = json.loads((tmp_path / "p.json").read_text())
    assert list(found["generated"]) == ["1%", "3%", "10%"]
    at = found["generated"]["10%"]
    assert at["lru"]["tokens_closed"] == [0, 0, 0] and at["belady"]["tokens_closed"] == [1, 1, 1]
    assert (
        at["undeclared"]["tokens"][0] < at["declared"]["tokens"][0] < at["queue of 16"]["tokens"][0]
    )
    repaired = [
        by["ttft_s"][0] for name, by in found["tiered"]["repair"].items() if "chunks" in name
    ]
    assert repaired == sorted(repaired) and repaired[0] < repaired[-1]
    assert set(found["planned"]["routers"]) >= {"rendezvous", "chunk_sets"}
    assert found["calibration"]["answers"] == 8
    assert "policies" in sys.modules
