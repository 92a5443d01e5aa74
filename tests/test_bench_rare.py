"""The bench of what is seldom asked: where references need the usual way, taking what is nearest loses them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from benches import on_path


@pytest.fixture(scope="module")
def rare() -> Iterator[ModuleType]:
    with on_path():
        import rare

        yield rare


def planted(rare: ModuleType, lost: float) -> dict[str, list[Any]]:
    """All ways are as near but one, which is nearer by .002 nats and, of references, ``lost`` nats off."""
    near = dict.fromkeys(rare.RECIPES, (0.01, 0.2)) | {"none": (1.0, 0.0), "2@0@1": (0.008, 0.2)}
    right = dict.fromkeys(rare.WAYS, 1.0)
    of_references = near | {"2@0@1": (0.008 + lost, 0.2)}
    wrong = right | {"2@0@1": float(lost == 0)}
    found = {name: [(near, right)] for name in rare.PLAIN}
    return found | {name: [(of_references, wrong)] for name in rare.REFERENCES}


@pytest.mark.parametrize("lost", [0.0, 2.0])
def test_what_is_planted_is_told(
    rare: ModuleType, lost: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rare, "measured", lambda n, share: planted(rare, lost))
    out = tmp_path / "rare.json"
    rare.main(["--streams", "3", "--out", str(out)])
    told = json.loads(out.read_text())
    rows = {(r["references"], r["earned"] is None): r for r in told["rows"]}
    assert len(rows) == 2 * len(rare.OFTEN) and told["right"]["P7"]["2@0@1"] == float(lost == 0)
    for nearest in (False, True):
        assert 0.008 < rows[0.0, nearest]["kl"] < rows[0.0, nearest]["usual_kl"] == 0.01
    assert rows[0.0, True]["kl"] < rows[0.0, False]["kl"], "what has to be earned comes later"
    earned, taken = rows[0.02, False], rows[0.02, True]
    if lost:
        assert taken["right"] < 0.95 < earned["right"] and taken["kl"] > 1.3 * earned["kl"]
    else:
        assert taken["right"] == earned["right"] == 1
