"""What is stored is its owner's alone: no file of a new home can be read by others."""

from __future__ import annotations

import os
import shutil
import stat
from functools import cache

import httpx
import pytest
from launching import launched

from kvweave import Engine
from kvweave.cli import app, home
from kvweave.run.model import Runner

A = "Nina's river is wide . so well then we saw it .\n"
MODEL = str(home.BUNDLED)

load_once = cache(Runner.load)


def open_to_others(directory):
    """Files and directories below that a group or others may do something with."""
    found = [directory, *directory.rglob("*")]
    assert len(found) > 3, found
    return {str(p.relative_to(directory)): oct(p.stat().st_mode) for p in found
            if stat.S_IMODE(p.stat().st_mode) & 0o077}  # fmt: skip


@pytest.fixture
def usual():
    """The umask most systems come with."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def umask():
    now = os.umask(0o022)
    os.umask(now)
    return now


@pytest.fixture
def sh(monkeypatch, tmp_path, usual):
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")
    monkeypatch.setattr(Runner, "load", load_once)
    file = tmp_path / "a.txt"
    file.write_text(A)

    def call(*words, status=0):
        assert app.main([*words, "--home", str(tmp_path / "home"), "-q"]) == status
        assert umask() == 0o022  # also of what the process does next
        return tmp_path / "home"

    call.file = str(file)
    return call


def test_a_home_that_put_made_is_private(sh):
    made = sh("put", "docs/a", sh.file)
    assert open_to_others(made) == {}
    assert {p.suffix for p in made.rglob("*")} >= {".kv", ".sqlite", ".json"}


def test_what_other_verbs_write_is_private_too(sh):
    made = sh("put", "docs/a", sh.file)
    for words in (
        ("mv", "docs/a", "docs/b"),
        ("put", "docs/c", sh.file, "--replace"),
        ("place", "docs/b", "disk"),
        ("run", "{docs/b} so", "--max-tokens", "2"),
        ("rm", "docs/b"),
        ("fsck", "--repair"),
    ):
        sh(*words)
        assert open_to_others(made) == {}, words


def test_a_salvaged_index_is_private(sh):
    made = sh("put", "docs/a", sh.file)
    index = made / "index.sqlite"
    index.write_bytes(index.read_bytes().replace(b"docs/a", b"docs/x"))
    before = set(made.iterdir())
    app.main(["fsck", str(made), "--repair", "-q"])
    assert set(made.iterdir()) > before  # the damaged one was kept aside
    assert open_to_others(made) == {}


def test_a_command_that_fails_leaves_the_umask_as_it_was(sh):
    sh("put", "docs/a", sh.file)
    sh("put", "docs/a", "no-such-file", status=1)
    sh("stat", "docs/none", status=1)


def test_an_engines_new_home_is_private_and_one_that_is_there_stays_as_it_is(usual, tmp_path):
    for path, mode in ((tmp_path / "new" / "home", 0o700), (tmp_path / "old", 0o750)):
        if mode == 0o750:
            path.mkdir(mode)
        with Engine(load_once(MODEL), home=path):
            pass
        assert stat.S_IMODE(path.stat().st_mode) == mode
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o755  # not ours


@pytest.mark.slow
def test_a_servers_home_is_private_and_an_open_server_says_so_once(usual, tmp_path):
    body = {"text": A}
    with launched(tmp_path, "--access-log") as server, server.client() as client:
        assert client.put("/v1/chunks/secret-name", json=body).status_code == 201
        assert client.get("/health", headers={"Host": "intranet"}).status_code == 403
    log = (tmp_path / "log").read_text()  # once it ended: a line may come after its answer
    assert log.count("no key is asked for") == 1 and "--keys" in log
    assert "PUT /v1/chunks/{name:path} status=201" in log and "secret-name" not in log
    assert "WARNING kvweave.access" in log and "peer=127.0.0.1" in log
    assert open_to_others(server.home) == {}
    shutil.rmtree(server.home)
    (tmp_path / "log").unlink()
    with launched(tmp_path, keys=["key-of-anna:anna"]) as server:
        with server.client("key-of-anna") as client:
            assert client.put("/v1/chunks/a", json=body).status_code == 201
        assert httpx.get(f"{server.url}/v1/chunks", timeout=60).status_code == 401
    log = (tmp_path / "log").read_text()
    assert "no key is asked for" not in log and "status=201" not in log
    assert "status=401" in log and "key-of" not in log
