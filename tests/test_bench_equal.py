"""The bench of equal quality: the share that comes as near is read off what was measured, and all cases are timed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from benches import on_path


@pytest.fixture(scope="module")
def equal() -> Iterator[ModuleType]:
    with on_path():
        import equal

        yield equal


def row(model: str, strategy: str, share: float, kl: float) -> dict[str, object]:
    return {"model": model, "strategy": strategy, "share": share, "kl": [kl], "none_kl": 1.0}


def test_the_share_that_is_as_near_is_between_two_that_were_measured(equal: ModuleType) -> None:
    rows = [
        row("a", "query", 0.1, 0.1),
        row("a", "query", 0.3, 0.001),
        row("a", "auto", 0.05, 0.01),
    ]
    rows += [row("b", "query", 0.1, 0.9), row("b", "auto", 0.05, 0.01)]
    rows += [row("c", "query", 0.1, 0.01), row("c", "auto", 0.05, 0.1)]
    assert equal.equal_shares(rows) == {"a": 0.2, "b": None, "c": 0.05}


@pytest.mark.slow
def test_all_cases_are_timed(equal: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "equal.json"
    small = (
        "--layers 2 --hidden 64 --heads 2 --kv-heads 2 --head-dim 32 --ffn 64 --vocab 97 --rounds 1"
    )
    equal.main([*small.split(), "--sizes", "512", "--json", "--out", str(out)])
    [found] = json.loads(out.read_text())["sizes"]
    cases = {f"{name} {share:.0%}" for name, share in equal.CASES} | {"full prefill"}
    assert set(found["seconds"]) == set(found["cpu"]) == set(found["over_auto"]) == cases
    assert (
        all(x > 0 for x in found["cpu"].values()) and found["over_auto"]["auto 5%"]["median"] == 1
    )
