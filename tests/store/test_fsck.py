"""`kvweave fsck`: what is wrong in a home is found, told, and mended without harming the rest."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import struct
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
import xxhash
from conftest import tiny
from weaving import text

from kvweave import Engine
from kvweave.chunk import rebuild
from kvweave.chunk.marks import marks
from kvweave.cli.app import main
from kvweave.errors import StoreError
from kvweave.store import fsck
from kvweave.store.codec import parse
from kvweave.store.level import Level
from kvweave.store.mover import Mover
from kvweave.store.record.encode import encode
from kvweave.store.record.layout import FIXED, FORMAT, MAGIC, START
from kvweave.store.tier.base import PAGE

NAMES = ("a", "b", "c", "d")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    with Engine(tiny(), home=tmp_path / "home", repair="none") as engine:
        for i, name in enumerate(NAMES):
            engine.put(name, text(20, i))
    return tmp_path / "home"


def check(home: Path, repair: bool = False) -> fsck.Found:
    with Engine(tiny(), home=home, tiers=()) as engine:
        chunks = {r.digest.hex(): (r.n_tokens, True) for r in engine.table}
        uuid = engine.table.uuid
    known = fsck.Known(home / "index.sqlite", uuid, chunks, fsck.model_of(home))
    return fsck.check(home / "kv", known, repair=repair)


def test_a_whole_home_has_nothing_wrong(home: Path) -> None:
    found = check(home)
    assert found.ok and found.n_records == 4 and not found.strays and not found.repaired


def test_each_kind_of_damage_is_told_and_mended_alone(home: Path) -> None:
    first, second, third, fourth = sorted((home / "kv").glob("*.kv"))
    data = bytearray(first.read_bytes())
    data[-PAGE] ^= 1
    first.write_bytes(data)
    second.write_bytes(third.read_bytes())
    (home / "kv" / "notes.kv").write_text("a user's own")
    half = home / "kv" / f"~{'a' * 32}"
    half.write_text("half")
    os.utime(half, (0, time.time() - 7200))
    (home / "kv" / "owner.json").write_text("{")
    found = check(home)
    assert not found.ok and set(found.spoilt) == {first.stem, second.stem}
    assert "checksum" in found.spoilt[first.stem] and "chunk" in found.spoilt[second.stem]
    assert len(found.missing) == 2 and found.unfinished == [half.name] and found.owner
    assert not found.repaired and first.exists()
    assert len(check(home, repair=True).repaired) == 4
    assert not first.exists() and not second.exists() and not half.exists()
    assert third.exists() and fourth.exists() and (home / "kv" / "notes.kv").exists()
    with Engine(tiny(), home=home, repair="none") as engine:
        assert sorted(e.tier for e in engine.files.ls()) == ["disk", "disk", "none", "none"]
        engine.denoise()
    assert check(home).ok


def test_a_thinned_chunks_record_is_looked_through_too(tmp_path: Path) -> None:
    home = tmp_path / "home"
    with Engine(tiny(), home=home, repair="none") as engine:
        engine.put("a", text(20, 0))
        entry = engine.compress("a", "h2o:9", to="small")
        small = engine.table.get(entry.id).digest.hex()
    found = check(home)
    assert found.ok and found.n_records == 2 and not found.strays
    (path,) = (home / "kv").glob(f"{small}.*")
    data = bytearray(path.read_bytes())
    data[PAGE] ^= 1  # which tokens the rows of the first head are
    path.write_bytes(data)
    assert list(check(home, repair=True).spoilt) == [path.stem] and not path.exists()
    with Engine(tiny(), home=home, repair="none") as engine:
        assert {e.name: e.tier for e in engine.files.ls()} == {"a": "disk", "small": "none"}
        assert engine.denoise() == 20
    assert check(home).ok


def old_slab(home: Path) -> None:
    """Turn a home's files into a slab, as kvweave kept them until 2026-11-22."""
    directory = home / "kv"
    page = 0
    with Engine(tiny(), home=home, tiers=("disk",)) as engine:
        model = engine.runner.fingerprint.digest().hex()
        found = [(r.digest.hex(), engine.shelf.get(int(r.id))) for r in engine.table]
    db = sqlite3.connect(directory / "slab.sqlite")
    db.execute("CREATE TABLE slots(key TEXT PRIMARY KEY, segment INT, page INT, n INT, seq INT)")
    with (directory / "seg-000001.slab").open("wb") as file:
        for seq, (key, kv) in enumerate(found):
            assert kv is not None
            data = bytearray(b"".join(encode(kv, parse("raw"), model, key)))
            struct.pack_into("<I", data, 8, 1)
            n_json = FIXED.unpack_from(data)[3]
            said = bytes(data[START : START + n_json]).replace(f'"chunk":"{key}",'.encode(), b"")
            data[START : START + n_json] = said.ljust(n_json)
            state = xxhash.xxh3_64(data[: FIXED.size])
            state.update(data[START:PAGE])
            struct.pack_into("<Q", data, FIXED.size, state.intdigest())
            head = struct.pack(
                "<8sIIQQQQ", b"kvwslab1", 1, len(key), xxhash.xxh3_64_intdigest(key.encode()),
                seq, len(data), xxhash.xxh3_64_intdigest(data),
            ) + key.encode()  # fmt: skip
            file.write(head.ljust(PAGE, b"\0") + data)
            db.execute("INSERT INTO slots VALUES(?,1,?,?,?)", (key, page, len(data), seq))
            page += 1 + len(data) // PAGE
    db.commit()
    db.close()
    for path in directory.glob("*.kv"):
        path.unlink()


def test_a_slab_of_an_older_version_becomes_files(home: Path, tmp_path: Path) -> None:
    wanted = {path.name: path.read_bytes() for path in (home / "kv").glob("*.kv")}
    old_slab(home)
    shutil.copytree(home, tmp_path / "spoilt")
    with Engine(tiny(), home=home, repair="none") as engine:
        assert [e.tier for e in engine.files.ls()] == ["disk"] * 4
    assert {path.name: path.read_bytes() for path in (home / "kv").glob("*.kv")} == wanted
    assert not list((home / "kv").glob("*slab*"))
    segment = tmp_path / "spoilt" / "kv" / "seg-000001.slab"
    data = bytearray(segment.read_bytes())
    data[2 * PAGE + 5] ^= 1  # in the first value
    segment.write_bytes(data)
    with Engine(tiny(), home=tmp_path / "spoilt", repair="none") as engine:
        assert sorted(e.tier for e in engine.files.ls()) == ["disk"] * 3 + ["none"]
    assert segment.exists(), "what does not verify stays where it is"


@pytest.mark.parametrize("said", ["{", "[]", '{"format": 7}', '{"format": 1, "owner": "1f"}'])
def test_an_owner_that_cannot_be_read_is_written_anew(
    home: Path, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the command as the hint gives it."""
    owner = home / "kv" / "owner.json"
    wanted = owner.read_text()
    for spoilt in (said, wanted.replace("1", "7", 1)):
        owner.write_text(spoilt)
        assert main(["fsck", str(home)]) == 1
        assert main(["fsck", str(home), "--repair"]) == 0
        assert owner.read_text() == wanted
    assert "Traceback" not in capsys.readouterr().err


def tiers(home: Path, *more: str) -> list[str]:
    with Engine(tiny(), home=home, repair="none", tiers=more or None) as engine:
        return [e.tier for e in engine.files.ls()]


def test_what_a_salvage_lost_keeps_its_kv_until_the_user_lets_it_go(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(home, tmp_path / "backup")
    index = home / "index.sqlite"
    index.write_bytes(index.read_bytes()[:10])
    assert main(["fsck", str(home), "--repair"]) == 0
    assert tiers(home) == []
    with pytest.raises(StoreError, match="salvaged") as caught:
        list(marks(index))
    assert "--discard-strays" in caught.value.hint
    with Engine(tiny(), home=home, repair="none") as engine:
        engine.put("a", text(20, 0))  # computed or not, one record
        engine.put("e", text(20, 9))
    assert len(list((home / "kv").glob("*.kv"))) == 5
    again = tmp_path / "again"
    shutil.copytree(home, again)
    for path in home.glob("index.sqlite*"):
        path.unlink()
    for path in (tmp_path / "backup").glob("index.sqlite*"):
        shutil.copy2(path, home)
    assert tiers(home) == ["disk"] * 4
    assert main(["fsck", str(again), "--discard-strays"]) == 1
    assert main(["fsck", str(again), "--repair", "--discard-strays"]) == 0
    assert len(list((again / "kv").glob("*.kv"))) == 2 and tiers(again) == ["disk"] * 2
    assert len(list(marks(again / "index.sqlite"))) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_a_tier_outside_the_home_is_looked_through_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there, spec = tmp_path / "there", f"disk path={tmp_path / 'there'}"
    with Engine(tiny(), home=tmp_path / "home", repair="none", tiers=(spec,)) as engine:
        for i, name in enumerate(NAMES):
            engine.put(name, text(20, i))
    with Engine(tiny(), home=tmp_path / "other", repair="none"):
        pass
    command = ["fsck", str(tmp_path / "home"), "--tier", spec, "--repair", "--json"]
    owner = there / "owner.json"
    said = owner.read_text()
    owner.write_text("{")
    first = min(there.glob("*.kv"))
    first.write_bytes(first.read_bytes()[:-1])
    assert main(command[:-2]) == 1 and owner.read_text() == "{" and first.exists()
    assert main(command) == 0
    assert owner.read_text() == said and not first.exists()
    assert sorted(tiers(tmp_path / "home", spec)) == ["disk"] * 3 + ["none"]
    other = ["fsck", str(tmp_path / "other"), "--tier", spec, "--repair", "--discard-strays"]
    before = sorted(there.iterdir())
    assert main(other) == 1, "it belongs to another home"
    assert owner.read_text() == said and sorted(there.iterdir()) == before
    assert "another" in capsys.readouterr().out


def test_a_directory_that_engines_share_is_looked_through_and_keeps_its_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there, spec = tmp_path / "there", f"disk path={tmp_path / 'there'} shared=yes"
    with Engine(tiny(), home=tmp_path / "home", repair="none", tiers=(spec,)) as engine:
        for i, name in enumerate(NAMES):
            engine.put(name, text(20, i))
    command = ["fsck", str(tmp_path / "home"), "--tier", spec, "--repair"]
    assert main(command[:-1]) == 0
    owner, first = there / "owner.json", min(there.glob("[0-9a-f]*.kv"))
    said = owner.read_text()
    owner.write_text("{")
    first.write_bytes(first.read_bytes()[:-1])
    with pytest.raises(StoreError) as caught:
        tiers(tmp_path / "home", spec)
    assert "fsck --repair" in caught.value.hint
    assert main(command[:-1]) == 1 and owner.read_text() == "{"
    assert main(command) == 0
    assert owner.read_text() == said and first.exists(), "others may use it"
    assert "1 spoilt" in capsys.readouterr().out
    assert len(tiers(tmp_path / "home", spec)) == 4


def test_a_record_of_a_later_version_is_left_alone(home: Path) -> None:
    record = min((home / "kv").glob("*.kv"))
    head = bytearray(record.read_bytes())
    FIXED.pack_into(head, 0, *(MAGIC, FORMAT + 1), *FIXED.unpack_from(head)[2:])
    record.write_bytes(head)
    assert check(home, repair=True).repaired == [] and record.read_bytes() == head


@pytest.mark.parametrize("tier", ["none", "ram"])
def test_who_dies_while_kv_is_let_go_of_has_no_chunk_that_is_missing(
    home: Path, monkeypatch: pytest.MonkeyPatch, tier: str
) -> None:
    """What is on disk as the files go is what is there after a kill -9."""
    died = home.with_name("died")
    real = Mover.drop

    def drop(mover: Mover, id: int) -> None:
        real(mover, id)
        shutil.copytree(home, died, dirs_exist_ok=True)
        shutil.rmtree(died / "kv")  # no file of it stays, were it in another directory
        shutil.copytree(home / "kv", died / "kv")

    with Engine(tiny(), home=home, repair="none") as engine:
        monkeypatch.setattr(Mover, "drop", drop)
        engine.place("b", tier)
        monkeypatch.undo()
    assert main(["fsck", str(died), "--json"]) == 0


@pytest.mark.parametrize("verb", ["place", "put_many"])
def test_who_dies_while_a_full_level_lets_go_has_no_chunk_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    home, died, real = tmp_path / "home", tmp_path / "died", Level.drop
    gone = list[int]()

    def drop(level: Level, ids: Iterable[int], deadline: float | None = None) -> None:
        gone.extend(ids)
        real(level, gone, deadline)
        shutil.copytree(home, died, dirs_exist_ok=True)
        shutil.rmtree(died / "kv")
        shutil.copytree(home / "kv", died / "kv")

    options = {"budget": "200KiB", "tiers": ("disk size=117KiB",), "repair": "none"}
    with Engine(tiny(), home=home, **options) as engine:
        for i, name in enumerate(NAMES):
            engine.put(name, text(20, i))
        engine.place("{a,b}", "disk")
        engine.table.flush()
        monkeypatch.setattr(Level, "drop", drop)
        if verb == "place":
            engine.place("{c,d}", "disk")
        else:
            engine.put_many([(f"e/{i}", text(20, 10 + i)) for i in range(4)])
        monkeypatch.undo()
        assert gone and [e.tier for e in engine.files.ls()].count("none") == len(gone)
    assert main(["fsck", str(died), "--json"]) == 0


@pytest.mark.parametrize("more", ["files", "disk path={}/shared shared=yes"])
def test_what_is_on_another_level_is_not_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: str
) -> None:
    home, levels = tmp_path / "home", ("disk size=117KiB", more.format(tmp_path))
    with Engine(tiny(), home=home, tiers=levels, repair="none") as engine:
        for i, name in enumerate(NAMES):
            engine.put(name, text(20, i))
            engine.place(name, "disk")
        assert [entry.tier for entry in engine.files.ls()] == ["disk"] * 4
    assert len(list((home / "kv").glob("*.kv"))) < 4
    command = ["fsck", str(home), "--tier", levels[1], "--json"]
    assert main(command) == 0
    for path in [*home.rglob("*.kv"), *tmp_path.glob("shared/*.kv")]:
        path.unlink()
    capsys.readouterr()
    assert main(command) == 1
    found = json.loads(capsys.readouterr().out)["directories"]
    assert sum(len(each["missing"]) for each in found) == 4, "each is told once"


def test_who_dies_before_all_is_freed_frees_it_when_the_home_is_opened(home: Path) -> None:
    died = home.with_name("died")
    with Engine(tiny(), home=home, repair="none") as engine:
        engine.table.free_slowly(1)
        engine.files.rm("**")
        shutil.copytree(home, died)
        assert engine.table.n_behind == 3 and engine.files.ls() == []
    assert main(["fsck", str(died), "--json"]) == 0
    for each in (died, home):
        with Engine(tiny(), home=each, repair="none") as engine:
            assert not [r for r in engine.table if r.n_tokens == 20]
        assert not list((each / "kv").glob("*.kv"))


def test_a_ctrl_c_while_a_file_is_written_leaves_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(path: Path) -> None:
        raise KeyboardInterrupt

    rebuild.write_json(tmp_path / "config.json", {"old": 1})
    monkeypatch.setattr(rebuild, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rebuild.write_json(tmp_path / "config.json", {"new": 2})
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]
    assert (tmp_path / "config.json").read_text() == '{"old": 1}'
