"""What is wrong with a stream, a path or a word: said in a line, whatever the command.

python -m pytest tests/test_cli_streams.py
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from argparse import ArgumentTypeError

import pytest
from forking import IMPORTABLE
from test_cli import sh

from kvweave import cli
from kvweave.cli import app, stdin, values

__all__ = ["sh"]  # a fixture
NOT_UTF8 = b"so well \xff\xfe\n"


def shell(line, home):
    """Run a line of sh in which $K is the command."""
    command = f"{sys.executable} -m kvweave.cli"
    env = {"K": command, "KVWEAVE_HOME": str(home), "HOME": str(home), "PYTHONUTF8": "1"}
    env |= {"PYTHONPATH": IMPORTABLE, "PATH": "/usr/bin:/bin"}
    return subprocess.run(["sh", "-c", line], env=env, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("words", [("run", "-"), ("check", "-"), ("put", "docs/a")])
def test_a_stdin_that_is_no_text_is_told_so(sh, words):
    sh(*words, stdin=NOT_UTF8, status=1)
    assert "is not UTF-8 text" in sh.err


@pytest.mark.parametrize(
    "words", [("run", "-"), ("put", "docs/a"), ("put", "docs/a", "/dev/zero"), ("chat",)]
)
def test_what_does_not_end_is_told_so(sh, monkeypatch, words):
    monkeypatch.setattr(stdin, "LONGEST", 1 << 10)
    sh(*words, stdin="so " * 500, status=1)
    assert "more than 256 MiB" in sh.err and "in parts" in sh.err
    assert sh("ls") == ""


def test_a_line_of_a_chat_that_is_no_text_fails_alone(sh):
    said = sh("chat", "--max-tokens", "2", stdin=b"so\n" + NOT_UTF8 + b"/parts\n", status=1)
    assert "is not UTF-8 text" in sh.err and "total" in said


def test_a_part_of_any_number_is_no_part(sh):
    sh("chat", stdin=f"/drop {'9' * 5000}\n/drop --1\n/drop 99\n/quit\n", status=1)
    assert sh.err.count("error: ") == 3
    assert values.part_of("-2") == -2 and values.part_of("--2") == "--2"
    assert values.part_of("docs/2") == "docs/2"


@pytest.mark.parametrize("streams", [">&-", "<&-", "<&- >&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_streams_may_be_closed(tmp_path, streams):
    assert shell(f"$K ls --json {streams}", tmp_path).returncode == 0
    found = shell(f"$K put docs/a {streams}", tmp_path)
    assert found.returncode == 1 and "Traceback" not in found.stderr
    assert ("docs/a" in found.stderr) == ("2>&-" not in streams)


@pytest.mark.parametrize("words", ["ls --json", "put --help", "--version", "completion bash"])
def test_a_stdout_that_takes_nothing_is_an_error(tmp_path, words):
    found = shell(f"$K {words} > /dev/full", tmp_path)
    assert found.returncode == 1 and "cannot write to stdout: No space left" in found.stderr
    assert "Exception" not in found.stderr
    if "--json" in words:
        assert json.loads(found.stderr)["error"]["hint"]


def test_a_user_that_there_is_not(sh):
    sh("ls", "--home", "~nobody-here/x", status=1)
    assert "there is no such user" in sh.err and "hint: " in sh.err
    sh("fsck", "~nobody-here/x", status=1)
    sh("run", "so", "--model", "~nobody-here/x", status=1)


def test_ages_and_names_of_any_kind(sh):
    with pytest.raises(ArgumentTypeError):
        values.age("9" * 400 + "d")
    sh("find", "--unused-for", "9" * 400 + "d", status=2)
    sh("put", "--kind", "memory", "--", "-x", sh.file("a.md", "so well ."))
    assert sh("cat", "--", "-x").strip() == "so well ." and sh("ls").strip() == "-x"
    sh("mv", "--", "-x", "docs/x")
    sh("rm", "docs/x", "--dry-run", "--quiet")
    assert sh("ls") == "docs/x\n"


@pytest.fixture
def heeded():
    """A SIGINT is heeded, also where a shell began the tests in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeded")
def test_a_command_that_has_ended_ends_quietly_at_a_ctrl_c(sh, monkeypatch):
    handlers = [signal.getsignal(signal.SIGINT)]
    with monkeypatch.context() as patch:
        patch.setattr(signal, "signal", lambda sig, handler: handlers.append(handler))
        sh("ls")
        assert handlers[-1] is signal.default_int_handler  # somebody called it, and goes on
        patch.setattr(sys, "argv", ["kvweave", "ls"])
        handlers.clear()
        assert cli.main() == 0 and handlers[0] is signal.SIG_DFL  # and so it is again


@pytest.mark.parametrize("where", ["errors.py", "format_usage", "flush"])
def test_a_ctrl_c_outside_of_the_verb_is_the_end_and_no_traceback(tmp_path, where):
    """While modules are imported, the words are read, or what was done is said."""
    code = f"""
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
def watch(frame, event, arg):
    code = frame.f_code
    if event == "call" and (code.co_name == {where!r} or code.co_filename.endswith("kvweave/{where}")):
        sys.setprofile(None)
        os.kill(os.getpid(), signal.SIGINT)
class Out:
    def __getattr__(self, name): return getattr(sys.__stdout__, name)
    def flush(self): sys.__stdout__.flush()
sys.stdout, sys.argv = Out(), ["kvweave", "ls", "--home", {str(tmp_path)!r}]
from kvweave import cli
sys.setprofile(watch)
sys.exit(cli.main())
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.returncode in (-signal.SIGINT, 130) and "Traceback" not in ended.stderr, ended


def test_what_loaders_warn_of_is_not_in_the_way_of_json(sh, monkeypatch):
    monkeypatch.delenv("TRANSFORMERS_VERBOSITY")
    for words, wanted in (((), None), (("--json",), "error"), (("-q",), "error")):
        os.environ.pop("TRANSFORMERS_VERBOSITY", None)
        sh("can", *words)
        assert os.environ.get("TRANSFORMERS_VERBOSITY") == wanted


@pytest.mark.parametrize("tiers", ["7", '"disk"', '{"disk": 1}', "true"])
def test_a_home_whose_tiers_are_no_list_is_told_so(sh, tiers):
    sh("put", "docs/a", stdin="so well .")
    (sh.home / "config.json").write_text(f'{{"tiers": {tiers}}}')
    sh("run", "so", status=1)
    assert "its tiers are no list" in sh.err and "hint: " in sh.err


def test_what_stdout_cannot_write_is_written_escaped(sh, monkeypatch):
    sh("put", "docs/a", stdin="na\xefve .")
    there = io.BytesIO()
    stdout = io.TextIOWrapper(there, "ascii")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stdout)
        assert app.main(["cat", "docs/a"]) == 0
    assert there.getvalue() == b"na\\xefve .\n"
