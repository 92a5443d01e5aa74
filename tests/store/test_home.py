"""A home belongs to one model: python -m pytest tests/store/test_home.py"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import tiny

from kvweave import Engine
from kvweave.errors import CorruptChunk, ModelMismatch, OverBudget
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


def test_what_the_dead_left_half_written_goes_when_a_home_is_opened(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    left, new = tmp_path / f"config.json.{dead.pid}.tmp", tmp_path / f"model.json.{dead.pid}.tmp"
    stay = [tmp_path / f"config.json.{os.getpid()}.tmp", tmp_path / "my.notes.tmp", new]
    for path in (left, *stay):
        path.write_text("{")
        os.utime(path, (0, time.time() - 3600 * (path != new)))
    Home(tmp_path, tiny().fingerprint)
    assert sorted(tmp_path.iterdir()) == sorted(stay)


@pytest.mark.parametrize("written", ["", "{", "[1]", "{}", '"text"'])
def test_a_file_that_is_no_fingerprint_is_told(tmp_path: Path, written: str) -> None:
    (tmp_path / "model.json").write_text(written)
    with pytest.raises(CorruptChunk, match="fingerprint"):
        Home(tmp_path, tiny().fingerprint)


def put_whole(engine: Engine) -> None:
    engine.put("docs/a", range(3, 15))


def put_thinned(engine: Engine) -> None:
    engine.put("docs/a", range(3, 15))
    engine.compress("docs/a", "knorm:0.5")


def put_rows(engine: Engine) -> None:
    kv = engine.runner.new_kv(2)
    for tensor in (*kv.k, *kv.v):
        tensor.zero_()
    engine.put_rows("rows", kv)
    engine.put("docs/a", range(3, 15))


@pytest.mark.parametrize("put", [put_whole, put_thinned, put_rows])
def test_an_index_tells_whose_it_is_where_the_file_is_gone(tmp_path: Path, put) -> None:
    mine, other = tiny(), tiny("qwen3")
    with Engine(mine, home=tmp_path) as engine:
        put(engine)
    (tmp_path / "model.json").unlink()
    with pytest.raises(ModelMismatch):  # its tokens are other texts there
        Engine(other, home=tmp_path)
    with Engine(mine, home=tmp_path) as engine:
        assert engine.files.stat("docs/a").n_tokens == 12
        engine.files.rm("**")
    assert not (tmp_path / "model.json").exists()
    Engine(other, home=tmp_path).close()


def test_closing_lays_down_all_that_there_is_room_for(tmp_path: Path) -> None:
    levels = "disk size=64KiB", f"files path={tmp_path / 'wide'}"
    for tiers, there in ((levels[:1], [0, 2]), (levels, [60, 2])):
        engine = Engine(tiny(), home=tmp_path / str(len(tiers)), tiers=tiers)
        engine.put("a/large", [5] * 60)
        engine.put("b/small", [5, 6])
        if there[0]:
            engine.close()
        else:
            with pytest.raises(OverBudget, match="size="):
                engine.close()
        with Engine(tiny(), home=tmp_path / str(len(tiers)), tiers=tiers) as engine:
            found = [(e.n_tokens, e.tier) for e in engine.files.ls("**")]
        assert [n if tier != "none" else 0 for n, tier in found] == there


@pytest.mark.parametrize("tiers", [None, ("disk path=values",)])
def test_who_goes_elsewhere_takes_a_relative_path_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiers: tuple[str, ...] | None
) -> None:
    """What is called so there is another one, or none."""
    there = tmp_path / "there"
    for at in (there, tmp_path):
        at.mkdir(exist_ok=True)
        monkeypatch.chdir(at)
        engine = Engine(tiny(), home="home" if tiers is None else at / "home", tiers=tiers)
        engine.put("docs/a", range(3, 15))
        engine.place("docs/a", "disk")
        if at == there:
            engine.close()
    monkeypatch.chdir(there)
    kept = sorted(path for path in there.rglob("*.raw*"))
    assert kept
    engine.put("docs/b", range(3, 18))
    engine.place("docs/b", "disk")
    assert engine.shelf.get(int(engine.files.stat("docs/a").id)) is not None
    engine.files.rm("docs/*")
    engine.check_integrity()
    engine.close()
    assert sorted(path for path in there.rglob("*.raw*")) == kept
