"""``kvweave context ...``, ``status``, ``completion``, and ``chat --context``: the shell on a server's
contexts."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
from loaded import short_runner
from served import served
from test_cli_url import KEYS, A, sh

from kvweave import Client, Engine
from kvweave.cli import parser

__all__ = ["sh"]  # a fixture


@pytest.fixture
def runner():
    return short_runner()


@pytest.fixture
def server(runner):
    with Engine(runner) as engine, served(engine) as server:
        yield server


@pytest.fixture
def there(sh, server):
    """The shell, on a server with a chunk docs/a and a context chat/42 of two parts."""
    sh.monkeypatch.setenv("KVWEAVE_URL", server.url)
    sh("put", "docs/a", stdin=A)
    sh("context", "new", "chat/42", "--system", "keep the notes .")
    sh("context", "append", "chat/42", "--chunk", "docs/a")
    return sh


def test_contexts_are_listed(there):
    there("context", "new", "other")
    assert there("context", "ls") == "chat/42\nother\n"
    assert there("context", "ls", "chat/") == "chat/42\n"
    assert there("context", "ls", "no*") == ""
    there("context", "ls", "chat/43", status=1)
    assert "no context 'chat/43'" in there.err and "did you mean 'chat/42'" in there.err
    assert re.search(r"^chat/42 +- +2 +\d+$", there("context", "ls", "-l"), re.M)
    assert [c["n_parts"] for c in there.json("context", "ls", "-l")] == [2, 0]


def test_a_context_is_shown_with_what_the_next_weave_would_do(there):
    shown = there("context", "show", "chat/42")
    assert re.search(r"^0  chat/42/s-000 +#\d+ +\w+ +\S+ +\d+$", shown, re.M)
    assert re.search(r"^1  docs/a +#\d+ +\w+ +ram +14$", shown, re.M)
    assert re.search(r"^ +total +\d+$", shown, re.M)
    assert [p["name"] for p in there.json("context", "show", "chat/42")["parts"]][1] == "docs/a"
    there("context", "show", "chat/4", status=1)
    assert "did you mean 'chat/42'" in there.err


def test_parts_are_added_and_dropped(there):
    assert there("context", "append", "chat/42", "late rain .").startswith("added: text-")
    there("context", "append", "chat/42", "--as", "docs/b", "--at", "1", stdin="so well .")
    assert there("context", "append", "chat/42", "-", "--role", "user", stdin="hi").startswith(
        "added: chat/42/u-000  #"
    )
    names = [p["name"] for p in there.json("context", "show", "chat/42")["parts"]]
    assert names[:3] == ["chat/42/s-000", "docs/b", "docs/a"] and len(names) == 5
    out = there("context", "drop", "chat/42", "docs/b", "-1")
    assert re.match(r"dropped docs/b, -1: chat/42  3 parts, \d+ tokens\n", out)
    there("context", "drop", "chat/42", "docs/a", "nothing", status=1)
    assert there.json("context", "show", "chat/42")["n_parts"] == 3, "all of them or none"
    version = str(there.json("context", "show", "chat/42")["version"])
    told = there.json("context", "drop", "chat/42", "1", "--if-version", version)
    assert told["n_parts"] == 2
    for words in (["--chunk", "docs/a", "text"], ["text", "--role", "user", "--at", "0"]):
        there("context", "append", "chat/42", *words, status=2)


def test_a_part_is_amended_and_its_errata_go_with_it(there):
    made = there("context", "amend", "chat/42", "docs/a", "late rain .")
    assert re.match(r"added: docs/a~1  #\d+, \d+ tokens\n", made)
    version = str(there.json("context", "show", "chat/42")["version"])
    words = ["-1", "-", "--role", "user", "--if-version"]
    assert there.json("context", "amend", "chat/42", *words, version, stdin="hi")["name"] == (
        "docs/a~1~1"
    )
    there("context", "amend", "chat/42", *words, version, stdin="hi", status=1)
    there("context", "amend", "chat/42", "1", "x", "--role", "user", "--kind", "tool", status=2)
    there("context", "amend", "chat/42", "nothing", "x", status=1)
    shown = there.json("context", "show", "chat/42")["parts"]
    assert [p["amends"] for p in shown] == [None, None, shown[1]["id"], shown[2]["id"]]
    assert there.json("context", "drop", "chat/42", "docs/a")["n_parts"] == 1
    assert "drop docs/a, docs/a~1, docs/a~1~1" in there("context", "log", "chat/42")


def test_a_question_and_its_answer_stay(there):
    text = there(
        "context", "ask", "chat/42", "what about Nina's river .", "--max-tokens", "3", "--explain"
    )
    assert text.endswith("\n") and "docs/a" in there.err
    told = there.json("context", "ask", "chat/42", "--max-tokens", "2", stdin="so ?")
    assert told["finish"] in ("stop", "length") and told["plan"]["n_tokens"]
    names = [p["name"] for p in there.json("context", "show", "chat/42")["parts"]]
    assert names[2:] == ["chat/42/u-000", "chat/42/a-000", "chat/42/u-001", "chat/42/a-001"]
    there("context", "ask", "chat/42", "so " * 5000, status=1)
    assert there.json("context", "show", "chat/42")["n_parts"] == 6, "it leaves no trace"


def test_contexts_are_copied_and_closed(there):
    assert there("context", "fork", "chat/42", "twin").startswith("forked: twin  2 parts, ")
    there("context", "rm", "twin", "nobody", status=1)
    assert there("context", "rm", "twin", "chat/42", "twin") == "closed: twin\nclosed: chat/42\n"
    assert there("context", "ls") == "" and there("ls", "docs/") == "docs/a\n"
    there("context", "rm", "twin", status=1)


def test_history_is_shown(there):
    there("context", "append", "chat/42", "late rain .", "--as", "docs/b")
    shown = there("context", "log", "chat/42", "--limit", "1")
    assert re.search(r"^\d+ +20\d\d-\S+ \S+ +append docs/b +\d+$", shown, re.M)
    versions = [edit["version"] for edit in there.json("context", "log", "chat/42")]
    now, before = map(str, versions[:2])
    diff = there("context", "diff", "chat/42", before)
    assert re.fullmatch(r"\+ docs/b  #\d+, \d+ tokens\n", diff)
    assert there("context", "diff", "chat/42", now) == "" and "the same parts" in there.err
    assert re.search(
        r"^docs/b +new +docs/b is new.* (\d+) +\1$", there("context", "why", "chat/42"), re.M
    )
    assert there.json("context", "why", "chat/42")["pending"] is True
    assert "reverted to version" in there("context", "revert", "chat/42", before)
    assert [p["name"] for p in there.json("context", "show", "chat/42")["parts"]][1:] == ["docs/a"]
    there("context", "revert", "chat/42", "99", status=1)
    there("context", "mv", "chat/42", "chat/43")
    assert there("context", "ls") == "chat/43\n"
    there("context", "drop", "chat/43", "docs/a", "--if-version", before, status=1)
    assert "is at version" in there.err


def test_what_answers_cost_is_told(there):
    assert "0 nats in 0 answers" in there("context", "ledger", "chat/42")
    there("context", "ask", "chat/42", "so well .", "--max-tokens", "1")
    told = there.json("context", "ledger", "chat/42")
    assert told["answers"] == 1 and told["data"][0]["n_tokens"] == 1
    assert re.search(r"^ *\d+ +1 +\S+ +- ", there("context", "ledger", "chat/42"), re.M)


def test_without_a_server_it_says_that_contexts_do_not_last(sh):
    for words in (["context", "ls"], ["context", "ask", "c", "so"], ["status"]):
        sh(*words, status=2)
        assert "ends with the command" in sh.err and "kvweave serve" in sh.err
    sh("chat", "--context", "c", status=2)
    assert "kvweave serve" in sh.err


def test_the_verbs_of_contexts_have_help(sh):
    with pytest.raises(SystemExit):
        parser.parse(["context", "--help"])
    shown = sh.capsys.readouterr().out
    verbs = [name.split()[1] for name in parser.COMMANDS if name.startswith("context ")]
    assert len(verbs) > 10 and all(re.search(rf"^  {verb} ", shown, re.M) for verb in verbs)
    sh("context", "lss", status=2)
    assert "no command 'context lss'" in sh.err and "did you mean ls?" in sh.err
    args = parser.parse(["--url", "u", "context", "--json", "show", "chat/42"])
    assert (args.command, args.name, args.json, args.url) == ("context show", "chat/42", True, "u")


# --- chat


def test_chat_goes_on_with_a_context_and_leaves_it(there, server):
    there("chat", "--context", "chat/42", "--max-tokens", "2", stdin="so\n/parts\n")
    assert "docs/a" in there.out and "chat/42: 2 parts" in there.err
    there("chat", "--context", "chat/42", "--max-tokens", "2", stdin="well\n")
    with Client(server.url) as client:
        names = [part.name for part in client.get_context("chat/42").parts]
    assert names[2:] == ["chat/42/u-000", "chat/42/a-000", "chat/42/u-001", "chat/42/a-001"]
    there("chat", "--context", "chat/42", "--system", "other", stdin="so\n", status=2)
    assert "--system comes too late" in there.err
    there("chat", "--context", "new", "--system", "keep .", "--max-tokens", "1", stdin="so\n")
    assert there("context", "ls") == "chat/42\nnew\n"


# --- status


def test_status_is_one_screen(there):
    there("context", "ask", "chat/42", "what about Nina's river .", "--max-tokens", "3")
    lines = there("status").splitlines()
    assert len(lines) < 15
    assert re.match(r"server +http://127\.0\.0\.1:\d+, ok, up \S+ s$", lines[0])
    assert re.search(r"^stored +\d+ chunks, 1 contexts open$", there.out, re.M)
    assert re.search(r"^ram +[\d.]+ \w+ of [\d.]+ \w+  \[[#.]{20}\] \d+%$", there.out, re.M)
    told = there.json("status")
    assert told["health"]["status"] == "ok" and told["status"]["contexts"] == 1


def test_status_of_a_namespace(sh, runner):
    with Engine(runner) as engine, served(engine, keys=KEYS) as server:
        sh("status", "--url", server.url, status=1)
        assert "needs an API key" in sh.err
        assert "namespace  anna" in sh("status", "--url", server.url, "--key", "key-of-anna")


# --- completion


def complete(script, *words):
    """Return what bash offers for the last word."""
    line = " ".join(f"'{word}'" for word in words)
    code = (
        f"source {script}; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1};"
        'shtab=$(complete -p kvweave | sed -E "s/.*-F (\\S+).*/\\1/"); $shtab;'
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    found = subprocess.run(["bash", "-c", code], capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stderr
    return found.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_completes(sh, tmp_path):
    script = tmp_path / "completion.bash"
    script.write_text(sh("completion", "bash"))
    assert {"context", "completion"} <= set(complete(script, "kvweave", "co"))
    assert complete(script, "kvweave", "context", "sh") == ["show"]
    assert complete(script, "kvweave", "ls", "--rev") == ["--reverse"]
    assert "n_tokens" in complete(script, "kvweave", "ls", "--sort", "n_")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_all_commands(sh, tmp_path, shell):
    script = sh("completion", shell)
    for name in parser.COMMANDS:
        assert name.split()[-1] in script, name
    if shutil.which(shell):
        (tmp_path / "script").write_text(script)
        subprocess.run([shell, "-n", str(tmp_path / "script")], check=True)


def test_completion_offers_names(sh):
    assert "kvweave ls -q --limit 500" in sh("completion", "bash")
    sh("completion", "tcsh", status=2)
    assert "tcsh" in sh.err


def test_a_context_is_made_exact(there):
    there("put", "docs/b", stdin="Omar's metal is Cobalt .")
    there("context", "append", "chat/42", "--chunk", "docs/b")
    assert there("context", "refine", "chat/42", "--rows", "1") == (
        "1 rows recomputed: not all of it is exact yet\n"
    )
    assert there("context", "refine", "chat/42").endswith("rows recomputed: all of it is exact\n")
    assert there.json("context", "refine", "chat/42") == {"refined": 0, "drift": 0}
    there("context", "refine", "chat/42", "--rows", "0", status=2)
