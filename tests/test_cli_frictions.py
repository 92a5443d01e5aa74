"""What got in the way of people at the shell, one test each."""

from __future__ import annotations

import json
import os
import re
import socket
import sqlite3
import time
from pathlib import Path

import pytest
from loaded import short_runner
from served import served
from test_cli_url import KEYS, A, sh

from kvweave import Engine
from kvweave.cli import home, parser
from kvweave.cli.serve import keys_of
from kvweave.run import find
from kvweave.run.model import Runner
from kvweave.store.tier.base import Outcome
from kvweave.store.tier.disk import Disk

__all__ = ["sh"]  # a fixture


@pytest.fixture
def runner():
    return short_runner()


@pytest.fixture
def server(runner):
    with Engine(runner) as engine, served(engine, model_name="theirs") as server:
        yield server


@pytest.fixture
def stocked(sh):
    sh("put", "docs/", "a.md", "b.md", "-q")
    return sh


def help_of(sh, name):
    with pytest.raises(SystemExit):
        parser.parse([name, "--help"])
    return " ".join(sh.capsys.readouterr().out.split())


def test_the_text_of_a_chunk_can_be_read_back(stocked):
    assert stocked("cat", "docs/a").strip() == A.strip()


def test_can_describes_the_model_of_the_server(sh, server):
    sh.monkeypatch.setenv("KVWEAVE_URL", server.url)
    sh.monkeypatch.setattr(Runner, "load", lambda *a, **k: pytest.fail("a local model is loaded"))
    about = sh.json("can")
    assert about["model"] == "theirs" and about["move"]["ok"] and about["url"] == server.url
    assert re.search(r"^move +yes: ", sh("can"), re.M) and re.search(
        r"^model +theirs$", sh.out, re.M
    )


def test_a_note_is_printed_once(sh, monkeypatch):
    assert sh("run", "so well", "--max-tokens", "1") and sh.err.count("note: ") == 1
    sh("put", "docs/a", "a.md")
    assert sh.err.count("note: ") == 1
    monkeypatch.setattr("kvweave.serve.server.Server.run", lambda self, sockets: None)
    sh("serve", "--port", "0", "--home", "other")
    assert sh.err.count("note: ") == 1


def test_the_help_of_put_says_what_its_words_do(sh):
    text = help_of(sh, "put")
    for words in (
        "docs/ and its own name without the suffix",
        "several need a NAME that ends in /",
        "whole paragraphs, or of so many tokens",
        "which chunks leave memory first",
    ):
        assert words in text


def test_du_by_namespace_of_a_server_is_refused_in_words_of_the_shell(sh, server):
    sh("du", "--by", "namespace", "--url", server.url, status=2)
    assert "--by namespace" in sh.err and "all_namespaces" not in sh.err
    assert "--by tier, kind or dir" in sh.err


def test_an_address_that_is_taken_is_named(sh):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        sh("serve", "--port", port, status=1)
    assert f"cannot listen at 127.0.0.1:{port}: Address already in use" in sh.err
    assert "another --port" in sh.err
    sh("serve", "--host", "192.0.2.1", "--port", port, "--key", "key-of-anna", status=1)
    assert f"192.0.2.1:{port}" in sh.err


@pytest.mark.parametrize("model", ["modle", "owner/modle", "./modle"])
def test_a_mistyped_model_does_not_wait_for_the_hub(sh, monkeypatch, model):
    monkeypatch.undo()
    monkeypatch.setenv("KVWEAVE_HOME", "none")
    monkeypatch.delenv("KVWEAVE_URL", raising=False)
    monkeypatch.setattr(find, "ASK_SECONDS", 0.2)
    began = time.monotonic()
    sh("run", "so", "--model", model, status=1)
    assert time.monotonic() - began < 5
    assert f"cannot load a model from '{model}'" in sh.err and "no such directory" in sh.err


def test_the_status_of_ls_follows_one_rule(stocked):
    for words, status in (
        ([], 0), (["docs/*"], 0), (["no*"], 0), (["no/**"], 0),
        (["docs/a"], 0), (["no"], 1), (["no/"], 1), (["#99"], 1),
    ):  # fmt: skip
        stocked("ls", *words, status=status)
    assert "the status is 0" in help_of(stocked, "ls")


def test_a_file_of_keys_may_be_in_the_own_home(sh, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "x").write_text("key-of-anna:anna")
    args = parser.parse(["serve", "--keys", "~/x"])
    assert keys_of(args) == {"key-of-anna": "anna"}


def test_a_home_that_cannot_be_written_is_read(stocked, monkeypatch):
    where = os.environ["KVWEAVE_HOME"]
    real = os.access
    monkeypatch.setattr(
        home.os, "access", lambda path, mode: str(path) != where and real(path, mode)
    )
    before = {p: p.stat().st_mtime_ns for p in home.Path(where).iterdir()}
    assert stocked("ls") == "docs/a\ndocs/b\n" and stocked.json("stat", "docs/a")["n_tokens"] == 14
    assert stocked("cat", "docs/a").strip() == A.strip() and stocked.json("du")
    assert {p: p.stat().st_mtime_ns for p in home.Path(where).iterdir()} == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anything")
def test_a_home_without_the_right_to_write_is_read(stocked):
    where = home.Path(os.environ["KVWEAVE_HOME"])
    where.chmod(0o500)
    try:
        assert stocked("ls") == "docs/a\ndocs/b\n"
        stocked("rm", "docs/a", status=1)
    finally:
        where.chmod(0o700)


def test_an_address_without_http_is_taken(sh, server):
    sh("put", "docs/a", "a.md", "--url", server.url.removeprefix("http://"))
    assert sh("ls", "--url", server.url.removeprefix("http://")) == "docs/a\n"


def test_max_tokens_means_one_thing(sh):
    means = {}
    for name, command in parser.COMMANDS.items():
        action = parser.command_parser(command)._option_string_actions.get("--max-tokens")
        if action is not None:
            means.setdefault(action.help, []).append(name)
    assert len(means) == 1, means
    sh("put", "x", "a.md", "--max-tokens", "9", status=2)
    text = "\n\n".join(f"paragraph {i} of rain ." for i in range(5))
    assert len(sh.json("put", "m", "--cut", "tokens", "--piece-tokens", "9", stdin=text)) > 3


def test_a_first_run_is_short(sh):
    usage = sh.json("run", "Use this . Q: how do I reset?")["usage"]
    assert usage["completion_tokens"] <= 32
    assert sh.json("run", "so", "--max-tokens", "40")["usage"]["completion_tokens"] <= 40
    assert "32 with the bundled model" in help_of(sh, "run")


def test_a_key_need_not_show_in_the_list_of_processes(sh, runner):
    with Engine(runner) as engine, served(engine, keys=KEYS) as server:
        where = ["--url", server.url, "--key-file"]
        home.Path("key").write_text("key-of-anna\n")
        sh("put", "docs/a", "a.md", *where, "key")
        assert sh("ls", *where, "key") == "docs/a\n" == sh("--key-file", "key", "ls", *where[:2])
        sh("ls", *where, "key", "--key", "x", status=2)
        sh("ls", *where, "nofile", status=1)
        home.Path("key").write_text("two keys")
        sh("ls", *where, "key", status=2)
        assert "two keys" not in sh.err
    text = help_of(sh, "ls")
    assert "list of processes" in text and "KVWEAVE_KEY" in text and "--key-file" in text


@pytest.mark.parametrize(
    "words",
    [
        ("rm", "**", "--url", ""),
        ("ls", "--home", ""),
        ("rm", ""),
        ("place", "", "none"),
        ("mv", "", "x/"),
        ("unpin", ""),
        ("fsck", ""),
        ("sweep", "s3 url=memory://", "--index", ""),
    ],
)
def test_what_an_unset_variable_leaves_is_neither_another_home_nor_everything(sh, words):
    sh(*words, status=2)
    assert "it is empty: is a variable not set?" in sh.err


def test_a_home_that_is_none_is_not_called_an_empty_one(sh):
    sh("ls", "--home", "a.md", status=1)
    assert "a.md is a file" in sh.err
    os.mkdir("empty")
    for more in ((), ("--repair",)):
        sh("fsck", "empty", *more, status=1)
        assert "there is no home empty" in sh.err and not os.listdir("empty")


def test_an_index_that_is_gone_is_told_and_not_begun_anew_by_who_looks(stocked):
    index = Path("home/index.sqlite")
    index.rename("aside")
    for words in (("ls",), ("fsck",), ("rm", "docs/a")):
        stocked(*words, status=1)
        assert "index.sqlite is gone, and with it all names" in stocked.err and not index.exists()
    os.rename("aside", index)
    assert stocked("ls").split() == ["docs/a", "docs/b"]
    index.unlink()
    stocked("fsck", "--repair", "-q")
    assert index.exists()


def test_rm_says_first_where_kv_cannot_be_deleted_and_afterwards_where_some_stayed(stocked):
    config = Path("home/config.json")
    said = config.read_text()
    config.write_text("{")
    stocked("rm", "docs/a", status=1)
    assert "cannot read" in stocked.err and "docs/a" in stocked("ls")
    config.write_text(said)
    with stocked.monkeypatch.context() as patch:
        patch.setattr("kvweave.cli.home.os.access", lambda path, mode: path.name != "kv")
        stocked("rm", "docs/a", status=1)
    assert "cannot delete from" in stocked.err and "docs/a" in stocked("ls")
    failed = [Outcome("failed", "no")]
    stocked.monkeypatch.setattr(Disk, "discard", lambda self, keys, **_: failed * len(keys))
    stocked("rm", "docs/a", status=1)
    assert "KV is left in" in stocked.err and "docs/a" not in stocked("ls")


def test_a_disk_that_has_no_room_to_open_the_index_is_called_full(stocked):
    full = sqlite3.OperationalError("disk I/O error")
    full.sqlite_errorcode = sqlite3.SQLITE_IOERR_SHMSIZE

    def refused(self):
        raise full

    stocked.monkeypatch.setattr("kvweave.chunk.opened.OpenIndex._settings", refused)
    stocked("ls", status=1)
    assert "no space left" in stocked.err


def test_the_suite_is_not_of_another_model_where_a_server_is_meant(sh, server):
    sh.monkeypatch.setenv("KVWEAVE_URL", server.url)
    sh("check", "--suite", status=2)
    assert "the suite works on this machine only" in sh.err


def test_a_second_memory_of_a_context_does_not_ask_to_close_the_context(sh, server):
    sh.monkeypatch.setenv("KVWEAVE_URL", server.url)
    sh("context", "new", "chat/1", "--system", "keep the notes .")
    sh("memory", "open", "chat/1")
    sh("memory", "open", "chat/1", status=1)
    assert "a memory of 'chat/1' is open already" in sh.err


def test_a_home_of_an_older_version_is_not_called_one_of_another_model(stocked):
    file = Path("home/model.json")
    told = json.loads(file.read_text())
    del told["config"]  # as before 2026-11-25, when weights were hashed in another way
    file.write_text(json.dumps(told | {"weights": "f" * 32}))
    stocked("run", "{docs/a}", status=1)
    assert "an older kvweave made it" in stocked.err and "with --model" not in stocked.err
    assert stocked("cat", "docs/a").strip() == A.strip()
