"""The shell with --url: the same words give the same output from a server as from a home."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from threading import Timer

import pytest
from loaded import short_runner
from served import served

from kvweave import Client, Engine
from kvweave.cli import app, chat, parser
from kvweave.cli.signals import Ended, taken
from kvweave.client.turn import RemoteTurn
from kvweave.client.wires import BlockingWire, Send
from kvweave.errors import Unreachable
from kvweave.run.model import Runner

A = "Nina's river is wide . so well then we saw it .\n"
B = "Yuki's metal is sharp . so well .\n"
KEYS = {"key-of-anna": "anna"}
TALK = "Nina's river is wide . what about Nina's river\n\nLena's river is wide .\n"


@pytest.fixture
def runner():
    return short_runner()


@pytest.fixture
def server(runner):
    with Engine(runner) as engine, served(engine) as server:
        yield server


class Shell:
    """Runs commands in this process; with ``url``, on a server."""

    def __init__(self, capsys, monkeypatch):
        self.capsys, self.monkeypatch = capsys, monkeypatch
        self.out = self.err = ""

    def __call__(self, *words, stdin="", status=0):
        data = io.TextIOWrapper(io.BytesIO(stdin.encode()), "utf-8")
        self.monkeypatch.setattr("sys.stdin", data)
        self.capsys.readouterr()
        found = app.main(words)
        self.out, self.err = self.capsys.readouterr()
        assert found == status, f"{words}: {found}\n{self.out}\n{self.err}"
        return self.out

    def json(self, *words, **options):
        return json.loads(self(*words, "--json", **options))


@pytest.fixture
def sh(capsys, monkeypatch, tmp_path, runner):
    for name in ("URL", "KEY"):
        monkeypatch.delenv(f"KVWEAVE_{name}", raising=False)
    monkeypatch.setenv("KVWEAVE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")
    monkeypatch.setattr(Runner, "load", lambda *args, **options: runner)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()  # what `Runner.load` gives is the bundled one, uncalibrated
    (tmp_path / "a.md").write_text(A)
    (tmp_path / "b.md").write_text(B)
    return Shell(capsys, monkeypatch)


PROMPT = "keep the notes .{docs/a}{docs/b} what about Yuki's metal"
SCRIPT = [
    (["put", "docs/", "a.md", "b.md", "-q"], 0),
    (["put", "docs/a", "b.md"], 1),
    (["put", "x", "nofile"], 1),
    (["ls"], 0),
    (["ls", "docs/", "--sort", "n_tokens", "-r", "--limit", "1"], 0),
    (["ls", "docs"], 1),
    (["stat", "docs/aa"], 1),
    (["stat", "#99"], 1),
    (["cp", "docs/a", "faq", "-q"], 0),
    (["mv", "faq", "other/faq", "-q"], 0),
    (["pin", "docs/*", "--dry-run", "-q"], 0),
    (["pin", "docs/a", "-q"], 0),
    (["rm", "docs/a", "other/faq"], 2),
    (["rm", "**"], 1),
    (["find", "--pinned"], 0),
    (["find", "--unused-for", "0s", "--kind", "document", "--min-tokens", "11"], 0),
    (["unpin", "**", "-q"], 0),
    (["rm", "other/", "-q"], 0),
    (["du", "--by", "nothing"], 2),
    (["run", PROMPT, "--max-tokens", "4"], 0),
    (["run", "{docs} {q}", "--docs", "docs=docs/*", "--set", "q=so", "--max-tokens", "2"], 0),
    (["run", PROMPT, "--max-tokens", "4", "--temperature", "0.8", "--seed", "5"], 0),
    (["run", "so {docs/aa}"], 1),
    (["run", "so {q}"], 1),
    (["run", "so {q}", "--docs", "q=x/*"], 1),
    (["run", "so", "--temperature", "-1"], 2),
    (["check", PROMPT, "--repair", "full"], 0),
    (["chat", "--system", "keep the notes .", "--max-tokens", "3"], 0),
    (["ls"], 0),
    (["rm", "docs/*", "-q"], 0),
    (["ls"], 0),
]


def seen(sh, words, status, *more):
    sh(*words, *more, stdin=TALK if words[0] == "chat" else "", status=status)
    err = "" if status == 0 else sh.err
    # a server has what it made in memory, each command of the shell finds it on disk
    where = re.sub(r" +(ram|disk) +", " TIER ", sh.out)
    return re.sub(r"\d\.\d+(e-\d+)?", "N", where), err


@pytest.mark.slow
def test_the_same_words_say_the_same(sh, server):
    here = [seen(sh, words, status, "--model", "model") for words, status in SCRIPT]
    there = [seen(sh, words, status, "--url", server.url) for words, status in SCRIPT]
    for (words, _), a, b in zip(SCRIPT, there, here, strict=True):
        assert a == b, words


def test_json_is_the_same_but_for_where_kv_rests(sh, server):
    def told(*where):
        sh.json("put", "docs/", "a.md", "b.md", *where)
        entries = sh.json("ls", *where)
        stat = sh.json("stat", "docs/b", *where)
        run = sh.json("run", PROMPT, "--max-tokens", "4", "--check", *where)
        return entries, stat, run

    entries, stat, run = told("--model", "model")
    entries_there, stat_there, run_there = told("--url", server.url)
    for a, b in zip([*entries_there, stat_there], [*entries, stat], strict=True):
        assert a.keys() == b.keys()
        for key in a.keys() - {"tier", "n_bytes", "created", "last_used", "digest"}:
            assert a[key] == b[key], key
    assert run_there.keys() == run.keys() and run_there["text"] == run["text"]
    assert run_there["usage"].keys() == run["usage"].keys()
    assert run_there["usage"]["kv"] == run["usage"]["kv"]
    assert run_there["check"]["n_tokens"] == run["check"]["n_tokens"]
    assert [s["part"] for s in run_there["plan"]["spans"]] == [
        s["part"] for s in run["plan"]["spans"]
    ]


def test_nothing_of_this_machine_is_touched(sh, server, tmp_path):
    sh.monkeypatch.setattr(Runner, "load", lambda *args, **options: pytest.fail("loaded"))
    url = ["--url", server.url]
    assert sh("put", "memory/x", *url, stdin=A).startswith("stored: memory/x  #1, 14 tokens, ")
    assert sh.err == ""
    assert sh("place", "memory/*", "none", *url).startswith("placed: memory/x  #1, 14 tokens, 0 B")
    assert sh.json("stat", "memory/x", *url)["tier"] == "none"
    assert re.search(r"^names +memory/x$", sh("stat", "#1", *url), re.M)
    assert sh.json("du", "--by", "dir", *url)[0]["key"] == "memory/"
    assert sh("cat", "memory/x", *url).strip() == A.strip()
    sh("run", "so {memory/x}", "--explain", "--max-tokens", "1", *url)
    assert re.search(r"^memory/x +14 ", sh.err, re.M)
    assert not (tmp_path / "home").exists()


def test_run_and_chat_leave_no_context_behind(sh, server):
    url = ["--url", server.url]
    sh("run", "so well", "--max-tokens", "1", *url)
    sh("chat", "--max-tokens", "2", *url, stdin="so\n/plan\n/check\n/drop 0\n/parts\n")
    assert "chat/1/a-000" in sh.out and "vs full prefill of" in sh.out
    with Client(server.url) as client:
        assert client.contexts == {} and client.files.ls() == []
    sh("chat", "--keep-turns", "--max-tokens", "2", *url, stdin="so\n")
    assert sh("ls", *url) == "chat/1/a-000\nchat/1/u-000\n"


def test_chat_takes_a_name_no_one_has(sh, server):
    with Client(server.url) as client:
        client.context("chat/1")
        lines = "so\n/parts\n"
        sh("chat", "--max-tokens", "1", "--url", server.url, stdin=lines)
        assert "chat/2/u-000" in sh.out and list(client.contexts) == ["chat/1"]


def test_chat_over_the_limit_drops_the_oldest(sh, server):
    words = ["chat", "--system", "keep the notes .", "--limit", "26", "--max-tokens", "2"]
    sh(*words, "--json", "--url", server.url, stdin=TALK)
    answers = [json.loads(line) for line in sh.out.splitlines()]
    assert answers[1]["dropped"] == ["chat/1/u-000", "chat/1/a-000"]


def test_an_interrupted_answer_leaves_no_trace(sh, server, monkeypatch):
    from kvweave.client import RemoteTurn

    real = RemoteTurn.stream

    def stream(turn):
        pieces = real(turn)
        yield next(pieces)
        raise KeyboardInterrupt

    monkeypatch.setattr(RemoteTurn, "stream", stream)
    words = ["chat", "--system", "keep .", "--max-tokens", "2000", "--url", server.url]
    sh(*words, stdin="so\n/parts\n")
    assert "interrupted" in sh.err and "u-000" not in sh.out and "s-000" in sh.out
    sh("chat", "--context", "c", "--max-tokens", "2000", "--url", server.url, stdin="so\n")
    sh("context", "ask", "c", "so", "--max-tokens", "2000", "--url", server.url, status=130)
    server.settle()
    assert sh("ls", "--url", server.url) == ""


@pytest.mark.parametrize("words", [["context", "ask", "team", "so"], ["chat", "--context", "team"]])
def test_who_is_interrupted_takes_nothing_of_others_back(sh, server, monkeypatch, words):
    from kvweave.client import RemoteTurn

    real, url = RemoteTurn.stream, ["--url", server.url]
    with Client(server.url) as other:
        team = other.context("team", system="keep .")

        def stream(turn):
            team.ask(A, max_tokens=2)  # acknowledged, before the message that is interrupted
            pieces = real(turn)
            yield next(pieces)
            raise KeyboardInterrupt

        monkeypatch.setattr(RemoteTurn, "stream", stream)
        asks = words[0] == "context"
        sh(*words, "--max-tokens", "2000", *url, stdin="so\n", status=130 if asks else 0)
        server.settle()
        names = ["team/s-000", "team/u-000", "team/a-000"]
        assert [part.name for part in team.parts] == names and other.files.ls() != []
        assert "river is wide" in other.files.text("team/u-000")["text"]
        assert {entry.name for entry in other.files.ls()} == set(names)


def test_a_message_whose_answer_fails_is_not_there_either(sh, server, monkeypatch):
    def broken(*args):
        raise RuntimeError("on the way")

    with Client(server.url) as client:
        context = client.context("c", system="keep .")
        with monkeypatch.context() as patch:
            patch.setattr(server.driver.engine.runner, "forward", broken)
            sh("context", "ask", "c", A, "--url", server.url, status=1)
        assert [part.name for part in context.parts] == ["c/s-000"]
        assert [entry.name for entry in client.files.ls()] == ["c/s-000"]


def test_chats_at_once_have_names_of_their_own(sh, server, monkeypatch):
    first, real, close = iter(["chat/1"]), chat._free_name, Client.close_context
    monkeypatch.setattr(chat, "_free_name", lambda weaver: next(first, None) or real(weaver))

    def closing(client, name):
        close(client, name)
        other.put(f"{name}/note", A)  # whoever has the name next

    with Client(server.url) as other:
        other.context("chat/1")
        monkeypatch.setattr(Client, "close_context", closing)
        sh("chat", "--max-tokens", "1", "--url", server.url, stdin="so\n/parts\n")
        assert "chat/2/u-000" in sh.out
        assert [entry.name for entry in other.files.ls()] == ["chat/2/note"]


@pytest.mark.parametrize(
    ("verb", "sig", "n", "heeded"),
    [
        ("run", "INT", 1, True),
        ("run", "INT", 2, True),
        ("run", "TERM", 2, False),
        ("chat", "INT", 2, True),
        ("chat", "TERM", 1, True),
        ("chat", "HUP", 1, True),
    ],
)
def test_an_ended_run_frees_its_context(server, verb, sig, n, heeded):
    """By Ctrl-C (at the shell's prompt), kill, or a terminal that is closed; ``heeded``: SIGINT is."""
    words = ["--max-tokens", "4000", "--temperature", "1", "--url", server.url]
    code = (  # what starts the tests may have it ignored
        f"import signal, sys; signal.signal(signal.SIGINT, signal.{'default_int_handler' if heeded else 'SIG_IGN'});"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL);"
        "from kvweave.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    with subprocess.Popen(
        [sys.executable, "-u", "-c", code, verb, *["so well then"] * (verb == "run"), *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        process.stdin.write(b"so well then\n")
        process.stdin.flush()
        assert process.stdout.read(1)  # it has begun
        number = getattr(signal, f"SIG{sig}")
        for _ in range(n):  # as `timeout` does: to the process, and to its group
            process.send_signal(number)
        _, err = process.communicate(b"/quit\n" if sig == "INT" else None, timeout=60)
    status = 0 if (verb, sig) == ("chat", "INT") else 128 + number
    assert process.returncode == status and b"Traceback" not in err, err
    with Client(server.url) as client:
        assert client.contexts == {}
        server.settle()
        assert client.files.ls() == []


def test_a_second_kill_while_the_first_is_taken(monkeypatch):
    """`timeout` sends two at once: the second may come where the first one starts what ends all at last."""
    with taken():
        end, start = signal.getsignal(signal.SIGTERM), Timer.start
        if end in (signal.SIG_DFL, signal.SIG_IGN):
            pytest.skip("somebody else takes the signals here")

        def starting(self):
            start(self)
            end(signal.SIGTERM, None)

        monkeypatch.setattr(Timer, "start", starting)
        with pytest.raises(Ended):
            end(signal.SIGTERM, None)


@pytest.mark.parametrize("words", [["run", "so well"], ["context", "ask", "c", "so"], ["chat"]])
def test_a_signal_wins_over_what_cleaning_up_fails_of(sh, server, words):
    """The server has gone, and so nothing can be taken back there."""

    do = BlockingWire._do

    def ended(turn):
        sh.monkeypatch.setattr(BlockingWire, "_do", gone)
        raise Ended(signal.SIGTERM)
        yield ""

    def gone(wire, order, running):
        if isinstance(order, Send):
            raise Unreachable(server.url, "it has gone")
        return do(wire, order, running)

    sh.monkeypatch.setattr(RemoteTurn, "stream", ended)
    with Client(server.url) as client:
        client.context("c")
    sh(*words, "--url", server.url, stdin="so well\n/parts\n", status=143)
    assert "no answer" in sh.err and "u-000" not in sh.out


# --- where to


def test_url_and_key_come_from_options_then_variables(sh, runner):
    with Engine(runner) as engine, served(engine, keys=KEYS) as server:
        url = ["--url", server.url]
        sh("ls", *url, status=1)
        assert "needs an API key" in sh.err and "KVWEAVE_KEY" in sh.err
        sh("ls", *url, "--key", "key-of-nobody", status=1)
        assert "is not known" in sh.err and "key-of-nobody" not in sh.err
        sh("put", "docs/a", "a.md", *url, "--key", "key-of-anna")
        sh.monkeypatch.setenv("KVWEAVE_URL", server.url)
        sh.monkeypatch.setenv("KVWEAVE_KEY", "key-of-anna")
        assert sh("ls") == "docs/a\n"
        sh("ls", "--url", "http://127.0.0.1:9", status=1)
        assert "no answer from http://127.0.0.1:9" in sh.err
        assert sh("ls", "--home", "elsewhere") == ""  # said here, so it counts more
        assert sh("--url", server.url, "ls") == "docs/a\n"


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (["ls", "--url", "ftp://h:1"], "url: 'ftp://h:1' is no http address", "such as http://"),
        (["ls", "--url", "http://127.0.0.1:9"], "no answer from", "kvweave serve"),
        (["ls", "--url", "http://127.0.0.1:9", "--key", "a\nb"], "key: it has characters", ""),
    ],
)
def test_a_wrong_server_is_told(sh, words, message, hint):
    sh(*words, status=1)
    assert message in sh.err and hint in sh.err and "Traceback" not in sh.err
    sh(*words, "--json", status=1)
    assert message.split(":")[0] in json.loads(sh.err)["error"]["message"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["demo"], "demo works on this machine only"),
        (["check", "--suite"], "the suite works on this machine only"),
        (["ls", "--home", "h"], "--url takes no --home"),
        (["run", "so", "--model", "m"], "--url takes no --model"),
        (["put", "x", "a.md", "--cut", "tokens"], "--cut needs the tokenizer"),
    ],
)
def test_what_works_only_here_says_so(sh, words, message):
    sh(*words, "--url", "http://127.0.0.1:9", status=2)
    assert message in sh.err and "hint: " in sh.err


def test_du_of_all_namespaces_is_not_for_clients(sh, server):
    sh("du", "--by", "namespace", "--url", server.url, status=2)
    assert "a server shows each key its own" in sh.err and "all_namespaces" not in sh.err


def test_every_command_is_for_servers_or_says_not():
    for name, command in parser.COMMANDS.items():
        options = parser.command_parser(command)._option_string_actions
        assert ("--url" in options) == command.remote, name


def test_commands_of_a_server_load_no_torch(server, tmp_path):
    code = (
        "import sys; from kvweave.cli import main; url = ['--url', sys.argv[1]];"
        "main(['ls', '-l', *url]); main(['run', 'so', '--max-tokens', '1', *url]);"
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    command = [sys.executable, "-c", code, server.url]
    env = {**os.environ, "KVWEAVE_HOME": str(tmp_path)}
    found = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60)
    assert found.stdout.splitlines()[-1] == "[]", found.stdout + found.stderr
