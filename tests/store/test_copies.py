"""Homes that were copied, moved, exchanged or put back: nothing of one is lost by what the other does.

Each test is a way in which two homes came to say that they are the same one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import tiny
from weaving import text

from kvweave import Engine
from kvweave.chunk import place
from kvweave.chunk.file import IndexFile
from kvweave.chunk.marks import marks, uuid_of
from kvweave.chunk.table import Table
from kvweave.cli.app import main
from kvweave.errors import InvalidArgument, KVWeaveError, ModelMismatch, StoreError
from kvweave.store.collect import REGISTERED, Swept, sweep
from kvweave.store.home import Home
from kvweave.store.spec import open_shared
from kvweave.store.tier import owner
from kvweave.store.tier.disk import Disk
from kvweave.store.tier.owner import claim, owner_of


def opened(home: Path, *tiers: str) -> Engine:
    return Engine(tiny(), home=home, tiers=tiers or None, repair="none")


def store(engine: Engine, name: str, seed: int) -> None:
    """Put durably, as `kvweave.serve.routes.chunks.store` does."""
    id = engine.put(name, text(20, seed)).id
    engine.shelf.save(id)
    engine.table.sync()
    engine.shelf.save(id)


def filled(home: Path, *tiers: str, **names: int) -> None:
    with opened(home, *tiers) as engine:
        for name, seed in names.items():
            store(engine, name, seed)


def held(home: Path, *tiers: str) -> dict[str, str]:
    """Where each name's KV is; of every engine's first look, so nothing is computed."""
    with opened(home, *tiers) as engine:
        return {r.names[0]: engine.shelf.tier(r.id) for r in engine.table if r.names}


def records(directory: Path) -> set[str]:
    return {path.name for path in directory.glob("*.kv")}


def swept(spec: str, *homes: Path) -> Swept:
    indexes, tier = [home / "index.sqlite" for home in homes], open_shared(spec)
    try:
        uuids = {uuid_of(index) for index in indexes}
        return sweep(tier, lambda: {d.hex() for i in indexes for d in marks(i)}, uuids)
    finally:
        tier.close()


def test_a_copy_is_a_home_of_its_own(tmp_path: Path) -> None:
    filled(tmp_path / "a", x=1)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    with (
        Table(tmp_path / "a" / "index.sqlite") as one,
        Table(tmp_path / "b" / "index.sqlite") as two,
    ):
        assert one.uuid != two.uuid and two.was == (one.uuid,) and one.was == ()
        made = two.uuid
    assert held(tmp_path / "b") == {"x": "disk"}, "what was copied with it is its own"
    with Table(tmp_path / "b" / "index.sqlite") as again:
        assert again.uuid == made and owner_of(tmp_path / "b" / "kv") == made
    (tmp_path / "b").rename(tmp_path / "c")
    (tmp_path / "link").symlink_to(tmp_path / "c")
    for path in ("c", "link"):  # renaming makes no other home of it
        with Table(tmp_path / path / "index.sqlite") as again:
            assert again.uuid == made
    shutil.copytree(tmp_path / "c", tmp_path / "d")
    assert held(tmp_path / "d") == {"x": "disk"} == held(tmp_path / "a")


def test_a_copy_of_a_copy_that_was_never_opened(tmp_path: Path) -> None:
    filled(tmp_path / "a", x=1)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    Table(tmp_path / "b" / "index.sqlite").close()  # its KV still says that it is the first one's
    shutil.copytree(tmp_path / "b", tmp_path / "c")
    assert held(tmp_path / "c") == {"x": "disk"}
    with Table(tmp_path / "c" / "index.sqlite") as table:
        assert len(table.was) == 2


def test_a_directory_outside_stays_the_original_s(tmp_path: Path) -> None:
    """An older copy would remove what it does not know, as left of a put that never ended."""
    spec = f"disk path={tmp_path / 'kv'}"
    filled(tmp_path / "a", spec, x=1)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    filled(tmp_path / "a", spec, y=2)
    before = records(tmp_path / "kv")
    with pytest.raises(InvalidArgument, match="a copy of") as caught:
        opened(tmp_path / "b", spec)
    assert "--take-over" in caught.value.hint
    assert records(tmp_path / "kv") == before
    assert held(tmp_path / "a", spec) == {"x": "disk", "y": "disk"}
    shutil.copytree(tmp_path / "kv", tmp_path / "kv-b")  # copied too, it is the copy's
    assert held(tmp_path / "b", f"disk path={tmp_path / 'kv-b'}") == {"x": "disk"}
    shutil.copytree(tmp_path / "kv", tmp_path / "kv-c")  # moved to another disk, it is still ours
    assert held(tmp_path / "a", f"disk path={tmp_path / 'kv-c'}") == {"x": "disk", "y": "disk"}


def test_a_backup_that_is_put_back_twice(tmp_path: Path) -> None:
    """In one directory it becomes the same home each time, whose tier it has claimed before."""
    filled(tmp_path / "a", f"disk path={tmp_path / 'kv'}", x=1)
    spec, home = f"disk path={tmp_path / 'kv-b'}", tmp_path / "b"
    shutil.copytree(tmp_path / "kv", tmp_path / "kv-b")
    for _ in range(3):
        shutil.copytree(tmp_path / "a", home, dirs_exist_ok=True)
        assert held(home, spec) == {"x": "disk"}


def test_a_link_out_of_a_copy(tmp_path: Path) -> None:
    """``cp -a`` copies a link; what it leads to is in no copy."""
    filled(tmp_path / "a", x=1)
    (tmp_path / "a" / "kv").rename(tmp_path / "far")
    (tmp_path / "a" / "kv").symlink_to(tmp_path / "far")
    shutil.copytree(tmp_path / "a", tmp_path / "b", symlinks=True)
    filled(tmp_path / "a", y=2)
    before = records(tmp_path / "far")
    with pytest.raises(InvalidArgument, match="a copy of"):
        opened(tmp_path / "b")
    assert main(["rm", "x", "--home", str(tmp_path / "b"), "--quiet"]) == 0
    main(["fsck", str(tmp_path / "b"), "--repair", "--discard-strays"])
    assert records(tmp_path / "far") == before
    assert held(tmp_path / "a") == {"x": "disk", "y": "disk"}


def test_what_the_original_had_is_taken_over_when_told_to(tmp_path: Path) -> None:
    spec = f"disk path={tmp_path / 'kv'}"
    filled(tmp_path / "a", spec, x=1)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    filled(tmp_path / "a", spec, y=2)
    words = ["fsck", str(tmp_path / "b"), "--tier", spec, "--repair"]
    assert main(words) == 1 and owner_of(tmp_path / "kv") == uuid_of(tmp_path / "a/index.sqlite")
    with opened(tmp_path / "a", spec) as engine:
        assert main([*words, "--take-over"]) != 0, "it is open"
        assert owner_of(tmp_path / "kv") == engine.table.uuid
    assert held(tmp_path / "a", spec) == {"x": "disk", "y": "disk"}
    assert main(["fsck", str(tmp_path / "b"), "--take-over"]) != 0, "it goes with --repair"
    assert main([*words, "--take-over"]) == 0
    assert held(tmp_path / "b", spec) == {"x": "disk"}
    assert len(records(tmp_path / "kv")) == 2, "the other one's stay until that is told too"
    with pytest.raises(InvalidArgument, match="another home"):
        opened(tmp_path / "a", spec)


def test_a_sweep_needs_the_copy_too(tmp_path: Path) -> None:
    spec = f"disk path={tmp_path / 'shared'} shared=yes"
    filled(tmp_path / "a", spec, x=1)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    filled(tmp_path / "a", spec, y=2)
    with pytest.raises(StoreError, match="never opened"):
        swept(spec, tmp_path / "b")  # it does not name what the original does
    opened(tmp_path / "b", spec).close()  # from here on it relies on what it has of the original
    with pytest.raises(InvalidArgument, match="others keep chunks"):
        swept(spec, tmp_path / "a")
    with opened(tmp_path / "a", spec) as engine:
        engine.files.rm("x")
    filled(tmp_path / "b", spec, z=3)
    assert swept(spec, tmp_path / "a", tmp_path / "b").removed == []
    assert held(tmp_path / "b", spec) == {"x": "disk", "z": "disk"}


def test_who_is_no_more_is_told_by_how_it_begins(tmp_path: Path) -> None:
    spec = f"disk path={tmp_path / 'shared'} shared=yes"
    filled(tmp_path / "a", spec, x=1)
    tier, uuid = open_shared(spec), uuid_of(tmp_path / "a/index.sqlite")
    for wrong in ("", "no"):
        with pytest.raises(InvalidArgument, match="no index"):
            sweep(tier, set, set(), retired=[wrong])
    sweep(tier, set, set(), retired=[uuid[:8]])
    assert not [key for key in tier.keys() if key.startswith(REGISTERED)]
    tier.close()


def test_a_server_that_forgot_who_relies_on_it_is_told_again(tmp_path: Path) -> None:
    """As one that evicts, or begins anew, does; else a sweep that was not given us removes what is ours."""
    spec = f"disk path={tmp_path / 'shared'} shared=yes"
    filled(tmp_path / "b", spec, z=3)
    with opened(tmp_path / "a", spec) as engine:
        store(engine, "x", 1)
        (tmp_path / "shared" / f"{REGISTERED}{engine.table.uuid}.kv").unlink()
        store(engine, "y", 2)
    with pytest.raises(InvalidArgument, match="others keep chunks"):
        swept(spec, tmp_path / "b")


def writes(home: Path, first: int, last: int, salt: int, end: str) -> None:
    """Have another process write chunks, and close, or die."""
    pid = os.fork()
    if pid == 0:
        table = Table(home / "index.sqlite")
        for i in range(first, last):
            id, _ = table.add([salt, 9, 9, i], digest=bytes([salt]) * 15 + bytes([i]))
            table.bind(f"n{i}", id)
        table.sync()
        if end == "closes":
            table.close()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0


def said(home: Path) -> dict[str, int]:
    with Table(home / "index.sqlite") as table:
        return {name: int(table.tokens(table.resolve(name).id)[0]) for name in table.names()}


@pytest.mark.parametrize("only", ["all", "index"])
def test_a_log_that_an_older_copy_left(tmp_path: Path, only: str) -> None:
    """A home is put back over one that died: SQLite would read both as one index."""
    home, other = tmp_path / "a", tmp_path / "b"
    home.mkdir()
    writes(home, 0, 2, 1, "closes")
    shutil.copytree(home, other)
    writes(home, 2, 4, 2, "closes")
    writes(other, 2, 7, 3, "dies")
    for file in home.iterdir() if only == "all" else [home / "index.sqlite"]:
        shutil.copy2(file, other / file.name)
    whole = {"n0": 1, "n1": 1, "n2": 2, "n3": 2}
    if only == "index":  # and who knows what the others of its files are
        with pytest.raises(KVWeaveError) as caught:
            said(other)
        assert "fsck" in caught.value.hint
        main(["fsck", str(other), "--repair"])
    assert said(other) == whole
    assert list(other.glob("*.damaged-1-wal")), "nothing is thrown away"
    writes(other, 4, 5, 4, "dies")
    assert said(other) == {**whole, "n4": 4}


def test_a_log_of_its_own_is_never_another_s(tmp_path: Path) -> None:
    home = tmp_path / "a"
    home.mkdir()
    for i in range(3):  # one after the other dies; the last one reads what all of them wrote
        writes(home, i, i + 1, i, "dies")
    shutil.copytree(home, tmp_path / "b")
    assert said(tmp_path / "b") == said(home) == {"n0": 0, "n1": 1, "n2": 2}
    with Table(home / "index.sqlite") as table:  # a log that cannot be put into the file
        again = table.add([1, 2, 3], digest=b"x" * 16)[0]
        table.bind("x", again)
        shutil.copytree(home, tmp_path / "c")
    assert len(said(tmp_path / "c")) == 4


def test_a_home_of_links(tmp_path: Path) -> None:
    """``cp -al``: the files are the same ones, until they are written."""
    filled(tmp_path / "a", x=1)
    shutil.copytree(tmp_path / "a", tmp_path / "b", copy_function=os.link)
    with opened(tmp_path / "a") as engine:
        engine.files.rm("x")
    filled(tmp_path / "a", y=2)
    assert held(tmp_path / "b") == {"x": "disk"} and held(tmp_path / "a") == {"y": "disk"}


def test_a_linked_log_is_not_another_s_either(tmp_path: Path) -> None:
    home = tmp_path / "a"
    home.mkdir()
    writes(home, 0, 2, 1, "dies")
    shutil.copytree(home, tmp_path / "b", copy_function=os.link)
    writes(tmp_path / "b", 2, 3, 2, "closes")
    assert said(home) == {"n0": 1, "n1": 1} and len(said(tmp_path / "b")) == 3


def test_a_linked_index_is_one_index(tmp_path: Path) -> None:
    filled(tmp_path / "a", x=1)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "index.sqlite").symlink_to(tmp_path / "a" / "index.sqlite")
    with Table(tmp_path / "a" / "index.sqlite"):
        with pytest.raises(InvalidArgument, match="is open in process"):
            Table(tmp_path / "b" / "index.sqlite")
    with Table(tmp_path / "b" / "index.sqlite") as table:
        assert uuid_of(tmp_path / "a" / "index.sqlite") == table.uuid and not table.was
        table.sync()
    assert not list((tmp_path / "b").glob("*-wal"))


def _gone(home: Path, aside: Path) -> None:
    shutil.rmtree(home)


def _moved(home: Path, aside: Path) -> None:
    home.rename(aside)


@pytest.mark.parametrize("how", [_gone, _moved])
def test_a_home_that_is_exchanged_while_it_is_open(
    tmp_path: Path, how: Callable[[Path, Path], None]
) -> None:
    """The engine that was there says so, and does nothing to the one that is there now."""
    home = tmp_path / "a"
    filled(home, x=1)
    shutil.copytree(home, tmp_path / "backup")
    old = opened(home)
    store(old, "u", 4)
    how(home, tmp_path / "aside")
    shutil.copytree(tmp_path / "backup", home)
    new = opened(home)
    store(new, "z", 3)
    for verb in (
        lambda: store(old, "y", 2), lambda: old.files.rm("x"), old.table.sync, old.close
    ):  # fmt: skip
        with pytest.raises(StoreError) as caught:
            verb()
        assert caught.value.hint
    assert (home / "index.sqlite-wal").exists(), "the log of the one that is open"
    store(new, "w", 5)
    new.close()
    assert held(home) == {"x": "disk", "z": "disk", "w": "disk"}
    if how is _moved:
        assert held(tmp_path / "aside") == {"x": "disk", "u": "disk"}


def test_a_directory_of_values_that_is_exchanged(tmp_path: Path) -> None:
    from kvweave.store.tier.base import Put

    tier, put = Disk(tmp_path / "kv"), Put("k", [memoryview(b"v")])
    (tmp_path / "kv").rename(tmp_path / "old")
    (tmp_path / "kv").mkdir()
    other = Disk(tmp_path / "kv")
    other.put([put])
    assert tier.put([put], durable=True)[0].state == "failed"
    assert tier.put([Put("new", put.data)])[0].state == "failed"
    assert tier.discard(["k"])[0].state == "failed"
    assert other.look(["k"]) == [1] and list(other.keys()) == ["k"]


def test_two_who_claim_a_directory_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One has read that it is nobody's, and is stopped; the other one takes it, uses it, and is gone."""
    lock = owner._locked

    def later(directory: Path) -> int:
        monkeypatch.setattr(owner, "_locked", lock)
        claim(directory, other, shared=shared, inside=False).close()
        (directory / "k.kv").write_text("v")
        return lock(directory)

    for i, (mine, other, shared) in enumerate([("1", "2", False), ("1", None, True)]):
        monkeypatch.setattr(owner, "_locked", later)
        directory = tmp_path / str(i)
        if shared:
            assert claim(directory, mine, shared=False, inside=False).relation == "shared"
        else:
            with pytest.raises(InvalidArgument, match="another home"):
                claim(directory, mine, shared=False, inside=False)
        assert owner_of(directory) == other


def test_a_model_that_came_between(tmp_path: Path) -> None:
    """Two engines find a home that is nobody's; one waits for the other's lock."""
    home = Home(tmp_path, tiny("qwen3").fingerprint)
    filled(tmp_path, x=1)
    with pytest.raises(ModelMismatch):
        home.claim()


def test_places(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    here = place.place_of(tmp_path / "a")
    (tmp_path / "a").chmod(0o700)
    (tmp_path / "a" / "new").write_text("")
    (tmp_path / "a").rename(tmp_path / "b")
    assert place.is_at(here, place.place_of(tmp_path / "b"))
    (tmp_path / "a").mkdir()
    assert not place.is_at(here, place.place_of(tmp_path / "a"))
    inode = here.split(":")[0]
    assert place.is_at(here, f"{inode}:0") and not place.is_at(here, f"{inode}:1")


def test_an_index_of_an_older_version_is_not_a_copy(tmp_path: Path) -> None:
    with Table(tmp_path / "index.sqlite") as table:
        uuid = table.uuid
        file = table._rows._file
        assert isinstance(file, IndexFile)
        file.do(lambda db: db.execute("DELETE FROM meta WHERE key IN ('place', 'was', 'life')"))
    with Table(tmp_path / "index.sqlite") as table:
        assert (table.uuid, table.was) == (uuid, ())
    shutil.copytree(tmp_path, tmp_path.with_name("copy"))
    with Table(tmp_path.with_name("copy") / "index.sqlite") as table:
        assert table.was == (uuid,)
