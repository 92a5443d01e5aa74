"""``kvweave memory ...``: the shell on the memory of a server's context."""

from __future__ import annotations

import json
import re

import pytest
from served import served
from test_cli_url import sh

from kvweave import Engine
from kvweave.run.model import Runner

__all__ = ["sh"]  # a fixture


@pytest.fixture(scope="module")
def there(bundled):
    with Engine(Runner.load(str(bundled))) as engine, served(engine) as server:
        yield server
        engine.check_integrity()


def test_a_conversation_that_is_remembered(sh, there):
    sh.monkeypatch.setenv("KVWEAVE_URL", there.url)
    sh("context", "new", "chat/42", "--system", "keep the notes .")
    out = sh("memory", "open", "chat/42", "--window", "40", "--warm", "500", "--sentences", "3")
    assert re.fullmatch(r"opened: chat/42  0 items, \d+ tokens\n", out)
    for key, value in {"Anna": "cold", "Omar": "hot", "Mei": "loud"}.items():
        words = f"so well {key}'s river is {value} . then we saw it"
        assert sh("memory", "ask", "chat/42", words, "--max-tokens", "4").strip()
    sh("memory", "tell", "chat/42", stdin="late rain .")
    assert "memory/chat/42/u-000" in sh("memory", "items", "chat/42", "chat/**")
    assert "cold" in sh("memory", "ask", "chat/42", "what about Anna's river", "--max-tokens", "8")
    shown = sh("memory", "show", "chat/42")
    assert re.search(r"^recalled +memory/chat/42/u-000 ", shown, re.M)
    assert re.search(r"^anchor +chat/42/s-000 ", shown, re.M) and "steps can be undone" in sh.err
    assert "memory/chat/42/u-000" in sh("memory", "search", "chat/42", "what about Anna's river")
    assert sh("memory", "write", "chat/42", "notes/a", stdin="late day .").startswith(
        "wrote memory/"
    )
    sh("memory", "write", "chat/42", "notes/a", "x", "--new", status=1)
    assert sh("memory", "read", "chat/42", "notes/a") == "late day .\n"
    names = sh("memory", "recall", "chat/42", "notes/*", "--by", "name", "--limit", "2")
    assert names == "memory/notes/a\n" == sh("memory", "release", "chat/42", "notes/*")
    assert "anchored memory/anchors/me" in sh("memory", "anchor", "chat/42", "me", "so well .")
    assert re.search(r"^me +9 +5000$|^me ", sh("memory", "blocks", "chat/42"), re.M)
    sh("memory", "mv", "chat/42", "notes/", "old/")
    assert sh("memory", "rm", "chat/42", "old/*", "-n") == "memory/old/a\n"
    assert sh("memory", "rm", "chat/42", "old/*") == "memory/old/a\n"
    assert "undid delete" in sh("memory", "undo", "chat/42")
    assert sh.json("memory", "read", "chat/42", "old/a")["text"] == "late day ."
    call = {"command": "create", "path": "/memories/a", "file_text": "one"}
    assert "Created" in sh("memory", "tool", "chat/42", json.dumps(call))
    assert "there already" in sh("memory", "tool", "chat/42", stdin=json.dumps(call), status=1)
    sh("memory", "tool", "chat/42", "no json", status=2)
    assert sh("memory", "settle", "chat/42") or True
    assert sh("memory", "idle", "chat/42").strip()
    assert sh("memory", "ls") == "chat/42\n"
    assert sh("memory", "close", "chat/42") == "closed: chat/42\n"
    sh("memory", "show", "chat/42", status=1)
    assert "has no memory" in sh.err and "open one" in sh.err
