from __future__ import annotations

import json

import pytest

from kvweave.chunk.files import Entry, Files, Usage
from kvweave.chunk.names import matching
from kvweave.chunk.table import Table
from kvweave.errors import (
    ChunkInUse,
    ChunkNotFound,
    ChunkPinned,
    InvalidArgument,
    InvalidName,
    NameTaken,
)

NAMES = ["a", "docs/api/get", "docs/api/put", "docs/faq", "docs/top", "chat/42/u-001",
         "chat/42/u-002", "chat/42/u-004", "chat/43/u-001"]  # fmt: skip


@pytest.fixture
def files(tmp_path):
    with Table(tmp_path / "index.sqlite") as table:
        for i, name in enumerate(NAMES, 1):
            kind = "user" if name.startswith("chat") else "document"
            id, _ = table.add(
                [i] * i, digest=bytes([i]) * 16, kind=kind, n_bytes=10 * i, tier="ram"
            )
            table.bind(name, id)
        yield Files(table)
        table.check_integrity()


def names(entries: list[Entry]) -> list[str]:
    return [entry.name for entry in entries]


def state(files: Files) -> list[tuple[str, int, bool]]:
    return [(entry.name, entry.id, entry.pinned) for entry in files.ls()]


@pytest.mark.parametrize(
    ("pattern", "wanted"),
    [
        ("", NAMES),
        ("**", NAMES),
        ("*", ["a"]),
        ("docs/*", ["docs/faq", "docs/top"]),
        ("docs/**", ["docs/api/get", "docs/api/put", "docs/faq", "docs/top"]),
        ("docs/", ["docs/api/get", "docs/api/put", "docs/faq", "docs/top"]),
        ("d*/", ["docs/api/get", "docs/api/put", "docs/faq", "docs/top"]),
        ("d**t", ["docs/api/get", "docs/api/put"]),
        ("**/u-001", ["chat/42/u-001", "chat/43/u-001"]),
        ("**/a", ["a"]),
        ("chat/**/u-001", ["chat/42/u-001", "chat/43/u-001"]),
        ("chat/42/*-00[1-3]", ["chat/42/u-001", "chat/42/u-002"]),
        ("chat/42/*-00[!1-3]", ["chat/42/u-004"]),
        ("docs/{faq,api/*}", ["docs/api/get", "docs/api/put", "docs/faq"]),
        ("{a,d*/{f,t}*}", ["a", "docs/faq", "docs/top"]),
        ("docs/???", ["docs/faq", "docs/top"]),
        ("docs?faq", []),
        ("docs[!x]faq", []),
        ("no*", []),
        ("DOCS/*", []),
    ],
)
def test_patterns(pattern, wanted):
    assert matching(NAMES, pattern) == wanted


@pytest.mark.parametrize("pattern", ["a[b", "a{b", "a}b", "a]b", "[z-a]"])
def test_malformed_patterns(files, pattern):
    with pytest.raises(InvalidArgument, match="pattern"):
        files.ls(pattern)


def test_ls(files):
    assert names(files.ls()) == sorted(NAMES)
    assert names(files.ls("docs/", sort="n_tokens", reverse=True, limit=2)) == [
        "docs/top",
        "docs/faq",
    ]
    assert names(files.ls(sort="id", limit=2)) == ["a", "docs/api/get"]
    assert names(files.ls("#4")) == ["docs/faq"] == names(files.ls("docs/faq"))
    assert files.ls("nothing*") == []
    assert files.ls(namespace="other") == []
    with pytest.raises(InvalidArgument, match="sort"):
        files.ls(sort="colour")
    with pytest.raises(InvalidArgument, match="limit"):
        files.ls(limit=-1)


def test_a_plain_pattern_that_matches_nothing_raises(files):
    for pattern, meant in [("docs/fax", "docs/faq"), ("docs/api", "docs/top"), ("doc/", None)]:
        with pytest.raises(ChunkNotFound) as caught:
            files.ls(pattern)
        assert caught.value.name == pattern
        assert meant is None or meant in caught.value.did_you_mean
    with pytest.raises(ChunkNotFound):
        files.ls("#99")
    with pytest.raises(InvalidName):
        files.ls("#x")


def test_stat(files):
    files.table.touch([4], now=5.0)
    files.table.hold(4, "chat")
    files.cp("docs/faq", "faq")
    entry = files.stat("#4")
    created = files.table.get(4).created
    assert entry == Entry("docs/faq", 4, 4, 40, "document", "ram", False, 3, created, 5.0, 1)
    assert files.stat("faq").name == "faq"
    assert json.loads(json.dumps(entry.to_dict()))["id"] == 4
    nameless, _ = files.table.add([9], digest=b"n" * 16, base=4)
    assert files.stat(f"#{nameless}").name == "#10"
    assert files.stat("faq").refs == 4


def test_cp(files):
    before = state(files)
    assert names(files.cp("docs/faq", "help/faq", dry_run=True)) == ["help/faq"]
    assert state(files) == before
    entry = files.cp("docs/faq", "help/faq")[0]
    assert (entry.id, entry.refs, len(files.table)) == (4, 2, len(NAMES))
    assert names(files.cp("docs/", "copy/")) == [
        "copy/api/get", "copy/api/put", "copy/faq", "copy/top",
    ]  # fmt: skip
    assert names(files.cp("#1", "b")) == ["b"]
    with pytest.raises(NameTaken):
        files.cp("a", "docs/faq")
    files.cp("a", "docs/top", replace=True)
    assert files.stat("docs/top").id == 1
    assert files.stat("copy/top").id == 5


def test_mv(files):
    assert names(files.mv("docs/", "manuals/")) == [
        "manuals/api/get", "manuals/api/put", "manuals/faq", "manuals/top",
    ]  # fmt: skip
    assert files.ls("docs/*") == []
    assert files.stat("manuals/api/get").id == 2
    assert names(files.mv("chat/42/u-00[12]", "old/")) == ["old/u-001", "old/u-002"]
    assert names(files.mv("a", "x/")) == ["x/a"]
    assert names(files.mv("#1", "y")) == ["y"]
    assert names(files.mv("manuals/", "manuals/api/")) == [
        "manuals/api/api/get", "manuals/api/api/put", "manuals/api/faq", "manuals/api/top",
    ]  # fmt: skip
    assert len(files.table) == len(files.ls()) == len(NAMES)


def test_mv_onto_a_name_that_moves_away_too(files):
    files.mv("docs/faq", "docs/docs/top")
    moved = files.mv("docs/", "docs/docs/")
    assert [(entry.name, entry.id) for entry in moved] == [
        ("docs/docs/api/get", 2),
        ("docs/docs/api/put", 3),
        ("docs/docs/docs/top", 4),
        ("docs/docs/top", 5),
    ]
    assert len(files.ls()) == len(NAMES)


@pytest.mark.parametrize(
    ("src", "dst", "error"),
    [
        ("docs/faq", "a", NameTaken),
        ("**/u-001", "old/", NameTaken),  # two of them would be old/u-001
        ("docs/", "manuals", InvalidArgument),
        ("docs/*", "manuals", InvalidArgument),
        ("docs/faq", "b//c", InvalidName),
        ("docs/faq", "../b", InvalidName),
        ("nothing", "b", ChunkNotFound),
        ("docs/", "x" * 199 + "/", InvalidName),
    ],
)
def test_mv_refuses_and_changes_nothing(files, src, dst, error):
    before = state(files)
    for dry_run in (True, False):
        with pytest.raises(error):
            files.mv(src, dst, dry_run=dry_run)
        assert state(files) == before


def test_mv_of_an_id(files):
    files.cp("a", "b")
    with pytest.raises(InvalidArgument, match="a, b"):
        files.mv("#1", "c")
    nameless, _ = files.table.add([9], digest=b"n" * 16)
    assert names(files.mv(f"#{nameless}", "c")) == ["c"]
    assert files.stat("c").id == nameless


def test_rm(files):
    freed = []
    files.table.on_free = freed.append
    files.cp("docs/faq", "faq")
    assert names(files.rm("docs/**", dry_run=True)) == [
        "docs/api/get", "docs/api/put", "docs/faq", "docs/top",
    ]  # fmt: skip
    assert freed == [] and len(files.ls("docs/")) == 4
    files.rm("docs/**")
    assert (sorted(freed), files.stat("faq").id) == ([2, 3, 5], 4)
    files.cp("faq", "faq2")
    assert names(files.rm("#4")) == ["faq", "faq2"]
    assert freed[3:] == [4]
    assert files.rm("docs/**") == []
    with pytest.raises(ChunkNotFound):
        files.rm("docs/faq")
    with pytest.raises(InvalidArgument, match="it is empty"):
        files.rm("")


def test_rm_refuses_before_anything_is_removed(files):
    files.pin("docs/top")
    files.cp("docs/faq", "other")
    files.table.hold(4, "chat")
    files.table.hold(1, "chat")
    before = state(files)
    for pattern in ("docs/**", "**", "docs/top", "#5"):
        with pytest.raises(ChunkPinned) as caught:
            files.rm(pattern, force=True)
        assert (caught.value.name, caught.value.id) == ("docs/top", 5)
        assert state(files) == before
    for pattern in ("a", "#1", "{docs/faq,other}"):
        with pytest.raises(ChunkInUse) as in_use:
            files.rm(pattern)
        assert in_use.value.contexts == ("chat",)
        with pytest.raises(ChunkInUse):
            files.rm(pattern, dry_run=True)
        assert state(files) == before
    files.rm("docs/faq")  # not its last name
    files.rm("other", force=True)
    assert files.table.get(4).names == ()
    files.table.release(4, "chat")
    assert files.table.lookup("#4") is None


def test_rm_of_a_nameless_chunk(files):
    base, _ = files.table.add([9], digest=b"n" * 16)
    top, _ = files.table.add([9], digest=b"m" * 16, base=base)
    with pytest.raises(ChunkInUse) as caught:
        files.rm(f"#{base}")
    assert caught.value.contexts == (f"#{top}",)
    assert names(files.rm(f"#{top}")) == [f"#{top}"]
    assert len(files.table) == len(NAMES)  # the base went with it


def test_replacing_the_last_name_of_a_pinned_chunk_is_refused(files):
    files.pin("docs/top")
    before = state(files)
    for verb in (files.cp, files.mv):
        with pytest.raises(ChunkPinned):
            verb("a", "docs/top", replace=True)
        assert state(files) == before
    files.cp("docs/top", "top")
    files.mv("a", "docs/top", replace=True)
    assert (files.stat("docs/top").id, files.stat("top").id) == (1, 5)


def test_pin(files):
    assert [entry.pinned for entry in files.pin("docs/*", dry_run=True)] == [False, False]
    assert [(e.name, e.pinned) for e in files.pin("docs/*")] == [
        ("docs/faq", True),
        ("docs/top", True),
    ]
    assert names(files.find(pinned=True)) == ["docs/faq", "docs/top"]
    files.unpin("docs/top")
    assert names(files.find(pinned=True)) == ["docs/faq"]


def test_du(files):
    files.table.update(4, tier="disk")
    files.cp("docs/faq", "faq")
    files.table.add([7], digest=b"n" * 16, n_bytes=1000, tier="gpu")
    assert files.du() == [
        Usage("gpu", 1, 1, 1000), Usage("ram", 8, 41, 410), Usage("disk", 1, 4, 40),
    ]  # fmt: skip
    assert files.du("docs/", "tier") == [Usage("ram", 3, 10, 100), Usage("disk", 1, 4, 40)]
    assert files.du(by="kind") == [Usage("document", 6, 16, 1150), Usage("user", 4, 30, 300)]
    assert files.du(by="dir") == [
        Usage("#", 1, 1, 1000), Usage("chat/", 4, 30, 300), Usage("docs/", 4, 14, 140),
        Usage(".", 1, 1, 10),
    ]  # fmt: skip
    assert files.du("docs/", "dir") == [Usage("docs/", 2, 9, 90), Usage("docs/api/", 2, 5, 50)]
    files.table.add([8], digest=b"o" * 16, namespace="b", n_bytes=3)
    assert files.du(by="namespace") == [Usage("", 11 - 1, 46, 1450)]
    assert files.du(by="namespace", all_namespaces=True)[1:] == [Usage("b", 1, 1, 3)]
    with pytest.raises(InvalidArgument):
        files.du(by="colour")


def test_find(files):
    files.table.touch([2, 3], now=4e9)
    assert names(files.find(kind="user")) == sorted(NAMES[5:])
    assert names(files.find("docs/", min_tokens=4)) == ["docs/faq", "docs/top"]
    assert names(files.find("docs/**", unused_since=3e9)) == ["docs/faq", "docs/top"]
    assert names(files.find(tier="disk")) == []
    with pytest.raises(InvalidArgument):
        files.find(kind="poem")


def test_place(files):
    moved = []

    def mover(record, tier):
        if record.id == 5:
            raise OSError("the disk is gone")
        moved.append((record.id, record.tier, tier))
        return record.n_bytes // 2

    assert names(files.place("docs/api/*", "disk", mover, dry_run=True)) == NAMES[1:3]
    assert moved == []
    entries = files.place("docs/api/*", "disk", mover)
    assert [(e.name, e.tier, e.n_bytes) for e in entries] == [
        ("docs/api/get", "disk", 10), ("docs/api/put", "disk", 15),
    ]  # fmt: skip
    with pytest.raises(OSError):
        files.place("docs/", "disk", mover)
    assert moved == [(2, "ram", "disk"), (3, "ram", "disk"), (4, "ram", "disk")]
    assert [files.stat(f"#{i}").tier for i in (2, 3, 4, 5)] == ["disk", "disk", "disk", "ram"]
    files.pin("a")
    with pytest.raises(ChunkPinned):
        files.place("**", "none", mover)
    with pytest.raises(InvalidArgument):
        files.place("a", "tape", mover)
    assert len(moved) == 3


def test_another_namespace_sees_nothing(files):
    other = Files(files.table, "b")
    assert (other.ls(), other.du(), other.find()) == ([], [], [])
    for verb in (other.stat, other.rm, other.pin, other.ls):
        for ref in ("a", "#1"):
            with pytest.raises(ChunkNotFound):
                verb(ref)
    with pytest.raises(ChunkNotFound):
        other.cp("#1", "mine")


def test_unicode_names_are_found_in_either_form(files):
    files.cp("a", "cafe\u0301/x")
    assert names(files.ls("caf\u00e9/")) == ["caf\u00e9/x"] == names(files.ls("cafe\u0301/*"))
    assert files.stat("cafe\u0301/x").name == "caf\u00e9/x"
