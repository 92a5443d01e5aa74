"""A home belongs to one model: python -m pytest tests/store/test_home.py"""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import tiny

from kvweave.errors import CorruptChunk, ModelMismatch
from kvweave.store.home import Home


def test_a_home_is_anyones_until_it_is_claimed(tmp_path: Path) -> None:
    mine, other = tiny().fingerprint, tiny("qwen3").fingerprint
    path = tmp_path / "deep" / "home"
    home = Home(path, mine)
    assert path.is_dir() and home.index == path / "index.sqlite"
    Home(path, other)
    home.claim()
    home.claim()
    Home(path, mine)
    with pytest.raises(ModelMismatch):
        Home(path, other)


@pytest.mark.parametrize("written", ["", "{", "[1]", "{}", '"text"'])
def test_a_file_that_is_no_fingerprint_is_told(tmp_path: Path, written: str) -> None:
    (tmp_path / "model.json").write_text(written)
    with pytest.raises(CorruptChunk, match="fingerprint"):
        Home(tmp_path, tiny().fingerprint)
