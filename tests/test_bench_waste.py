"""`bench/waste.py`: what is allocated, against sums done by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from benches import BENCH, on_path
from forking import fork

SCRIPT = str(BENCH / "waste.py")
COMMAND = f"""
import runpy, sys
sys.path.insert(0, {str(BENCH)!r})
sys.argv[0] = {SCRIPT!r}
runpy.run_path({SCRIPT!r}, run_name="__main__")
"""


@pytest.fixture(scope="module")
def waste() -> Iterator[ModuleType]:
    with on_path():
        import waste

        yield waste


def test_one_context_by_hand(waste: ModuleType) -> None:
    gemma = waste.MIXES["Gemma 3 27B"]
    n = 3000
    assert gemma.seen(n) == 2 * 2 * (52 * 1023 + 10 * n)
    assert gemma.seen(500) == 2 * 2 * 62 * 500
    assert waste.Uniform(gemma).n_bytes([n]) == 2 * 2 * 62 * 3008
    for frees, pooled, rows in ((False, False, 62 * n), (True, False, 52 * 1023 + 10 * n)):
        woven = waste.Woven(gemma, frees, pooled)
        woven.grow(0, n, 0)
        assert 1 <= woven.n_bytes / (2 * 2 * rows) <= 1.04
    paged = waste.Paged(gemma)
    paged.grow(0, n)
    assert paged.slabs.n_bytes == 2 * 2 * 16 * (52 * (64 + 1) + 10 * 188)
    paged.end(0)
    assert paged.slabs.n_bytes == 0


def test_slabs_of_unequal_pages(waste: ModuleType) -> None:
    slabs = waste.Slabs([4, 6])
    assert slabs.slab == 12
    four, six = slabs.take(0, 4), slabs.take(1, 1)
    assert slabs.n_bytes == 3 * 12 and len({*four}) == 4
    slabs.give(0, four)
    assert slabs.n_bytes == 12
    assert slabs.take(1, 1)[0][0] == six[0][0], "the other page of the same slab"
    assert slabs.n_bytes == 12


@pytest.mark.slow
def test_a_little_of_it_runs(waste: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "waste.json"
    words = ["--n", "6", "--alive", "3", "--out", str(out), "--json"]
    process = fork(COMMAND, words, log=tmp_path / "errors")
    process.communicate(300)
    assert process.wait() == 0, (tmp_path / "errors").read_text()
    found = json.loads(out.read_text())["mixes"]
    gemma, vision = found["Gemma 3 27B"], found["Llama 3.2 11B Vision"]
    # 73.6 and 79.6 % in Jenga's paper, of its own traces
    assert gemma["uniform"]["waste"] > 0.5 and 0.75 < vision["uniform"]["waste"] < 0.83
    for mix in (gemma, vision):
        assert mix["full"]["waste"] < 0.1 and mix["slabs"]["waste"] < 0.1
        assert mix["edits"]["waste"] >= mix["full"]["waste"]
