"""The shell: what each command prints, its exit status, its JSON, and what it says when it cannot.

Most tests call `main` in this process with one loaded model; the last three start real processes.
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest

import kvweave
from kvweave.chunk.table import Table
from kvweave.cli import app, chat, home, parser, show
from kvweave.errors import NoSpace
from kvweave.run.model import Runner
from kvweave.store.shelf import Shelf
from kvweave.store.tier.disk import Disk
from kvweave.weave.calibration import Calibration, Curve
from kvweave.weave.thinning import Thinning

MODEL = home.BUNDLED
A = "Nina's river is wide . so well then we saw it .\n"
B = "Yuki's metal is sharp . so well .\n"

load_once = cache(Runner.load)


class Terminal(io.TextIOWrapper):
    def isatty(self):
        return True


class Shell:
    """Runs commands in this process; the last one's output is kept."""

    stdin_type = io.TextIOWrapper

    def __init__(self, capsys, monkeypatch, directory):
        self.capsys, self.monkeypatch, self.directory = capsys, monkeypatch, directory
        self.home = directory / "home"
        self.status, self.out, self.err = 0, "", ""

    def __call__(self, *words, stdin="", status=0):
        data = stdin if isinstance(stdin, bytes) else stdin.encode()
        self.monkeypatch.setattr("sys.stdin", self.stdin_type(io.BytesIO(data), "utf-8"))
        self.capsys.readouterr()
        try:
            self.status = app.main(words)
        except SystemExit as end:  # argparse, after --help and --version
            self.status = end.code
        self.out, self.err = self.capsys.readouterr()
        assert self.status == status, f"{words}: {self.status}\n{self.out}\n{self.err}"
        return self.out

    def json(self, *words, **options):
        return json.loads(self(*words, "--json", **options))

    def file(self, name, text):
        (self.directory / name).write_text(text)
        return str(self.directory / name)


@pytest.fixture
def sh(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("KVWEAVE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # so that `main` leaves no trace
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")
    monkeypatch.setattr(Runner, "load", load_once)
    monkeypatch.chdir(tmp_path)
    return Shell(capsys, monkeypatch, tmp_path)


@pytest.fixture
def stocked(sh):
    sh("put", "docs/", sh.file("a.md", A), sh.file("b.md", B))
    return sh


def test_cat_gives_back_what_was_put(stocked):
    assert stocked("cat", "docs/a").strip() == A.strip()
    told = stocked.json("cat", "docs/b")
    assert (
        told["text"].strip() == B.strip()
        and len(told["tokens"]) == stocked.json("stat", "docs/b")["n_tokens"]
    )
    stocked("cat", "docs/aa", status=1)
    assert "did you mean 'docs/a' or" in stocked.err


# --- help and usage


def test_without_words_it_lists_the_commands(sh):
    for name in parser.COMMANDS:
        assert re.search(rf"^  {name} ", sh(), re.M), name


@pytest.mark.parametrize("name", parser.COMMANDS)
def test_each_command_has_help(sh, name):
    text = sh(*name.split(), "--help")
    assert text.startswith(f"usage: kvweave {name}")
    assert parser.COMMANDS[name].summary in text and "--home DIR" in text


def test_version(sh):
    assert sh("--version") == f"kvweave {kvweave.__version__}\n"


@pytest.mark.parametrize("name", parser.COMMANDS)
def test_examples_of_help_parse(name):
    for line in parser.COMMANDS[name].examples:
        words = show_words(line)
        assert parser.parse(words).command == name


def show_words(line):
    words = shlex.split(line.split("| ")[-1], comments=True)
    assert words[0] == "kvweave"
    return words[1:]


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (["lss"], "no command 'lss'", "did you mean ls?"),
        (["xyzzy"], "no command 'xyzzy'", "--help"),
        (["ls", "--lnog"], "unrecognized arguments: --lnog", "did you mean --long?"),
        (["stat"], "the following arguments are required: REF", "kvweave stat --help"),
        (["run", "hi", "--max-tokens", "0"], "'0' is not a whole number from 1 up", "run --help"),
        (["run", "hi", "--share", "2"], "'2' is not a number from 0 to 1", ""),
        (["run", "hi", "--docs", "x"], "--docs x: no '='", "--docs hole=..."),
        (["run", "{q}", "--set", "q=1", "--set", "q=2"], "q is filled twice", ""),
        (["run", "{name}", "--set", "name=1"], "a hole cannot be called 'name'", ""),
        (["run", " "], "the template is empty", ""),
        (["find", "--unused-for", "7"], "'7' is no age", ""),
        (["put", "x", "a", "b"], "2 files for one name", "write x/ to name each"),
        (["put", "x/"], "x/ needs files to take names from", ""),
        (["put", "x/", "a/n.md", "b/n.md"], "two files would be x/n", ""),
        (["put", "x", "--piece-tokens", "3"], "--piece-tokens without --cut", ""),
    ],
)
def test_wrong_usage_is_told_and_is_status_2(sh, words, message, hint):
    assert sh(*words, status=2) == ""
    assert sh.err.startswith("error: ") and message in sh.err and hint in sh.err
    sh(*words, "--json", status=2)
    assert message in json.loads(sh.err)["error"]["message"]
    assert not sh.home.exists()


def test_common_options_may_stand_before_the_command_and_between_arguments(sh):
    args = parser.parse(["--home", "h", "--json", "put", "docs/", "--kind", "memory", "a", "b"])
    assert (args.command, args.home, args.json, args.kind) == ("put", "h", True, "memory")
    assert (args.name, args.files) == ("docs/", ["a", "b"])


# --- put and the file verbs


def on_disk(home: Path) -> list[int]:
    """Return the sizes of the records that a home has on its disk."""
    disk = Disk(home / "kv")
    sizes = [n for _, n in disk.sizes()]
    disk.close()
    return sizes


def test_put_names_files_and_stores_kv_on_disk(stocked):
    lines = stocked.out.splitlines()
    assert lines[0].startswith("stored: docs/a  #1, 14 tokens, ")
    assert lines[1].startswith("stored: docs/b  #2, 10 tokens, ")
    assert "using the tiny bundled one" in stocked.err
    sizes = on_disk(stocked.home)
    assert json.loads((stocked.home / "config.json").read_text()) == {"model": str(MODEL)}
    [a, b] = stocked.json("ls", "docs/")
    assert (a["name"], a["tier"], a["kind"], a["n_tokens"]) == ("docs/a", "disk", "document", 14)
    assert sorted(sizes) == sorted([a["n_bytes"], b["n_bytes"]]) and b["id"] == 2


def test_put_reads_stdin(sh):
    [entry] = sh.json("put", "memory/x", "--kind", "memory", stdin=A)
    assert (entry["name"], entry["kind"]) == ("memory/x", "memory")
    sh("put", "memory/y", "-", stdin=B)
    assert sh("ls") == "memory/x\nmemory/y\n"


def test_put_refuses_a_taken_name_and_replaces_when_told(stocked):
    stocked("put", "docs/a", stdin="late rain .", status=1)
    assert stocked.err == (
        "error: 'docs/a' already names #1\n"
        "hint: remove it first, choose another name, or pass --replace\n"
    )
    assert stocked.json("stat", "docs/a")["id"] == 1
    stocked("put", "docs/a", "--replace", stdin="late rain .")
    assert stocked.json("stat", "docs/a")["id"] != 1
    assert len(on_disk(stocked.home)) == 2


@pytest.mark.parametrize(
    ("words", "stdin", "message"),
    [
        (["put", "x"], "", "'x' has no tokens"),
        (["put", "x"], b"\xff\xfe\x00", "-: it is not UTF-8 text"),
        (["put", "x", "nofile"], "", "cannot use nofile: No such file"),
        (["put", "a*"], "hi", "'a*' is not a chunk name"),
        (["put", "x"], "so " * 5000, "maximum context length is 4096 tokens"),
        (["put", "x", "--model", "./nomodel"], "hi", "cannot load a model from './nomodel'"),
    ],
)
def test_put_that_fails_binds_the_home_to_no_model(sh, words, stdin, message):
    sh(*words, stdin=stdin, status=1)
    assert message in sh.err and "Traceback" not in sh.err
    assert not (sh.home / "model.json").exists() and not (sh.home / "config.json").exists()


def test_put_cuts_and_replaces_all_pieces(sh):
    text = "\n\n".join(f"paragraph {i} of rain ." for i in range(5))
    names = [e["name"] for e in sh.json("put", "m", "--cut", "paragraph", stdin=text)]
    assert names == [f"m/{i:03d}" for i in range(5)]
    sh("put", "m/own", stdin="kept")
    entries = sh.json(
        "put", "m", "--cut", "tokens", "--piece-tokens", "40", "--replace", stdin=text
    )
    assert [e["name"] for e in entries] == ["m/000", "m/001"] and entries[0]["n_tokens"] == 40
    assert sh("ls", "m/") == "m/000\nm/001\nm/own\n"


def test_ls_long_and_sorted(stocked):
    assert stocked("ls") == "docs/a\ndocs/b\n"
    assert stocked("ls", "--sort", "n_tokens", "--limit", "1") == "docs/b\n"
    head, first, _ = stocked("ls", "-l", "-r").splitlines()
    assert head.split() == "name id kind tier pin tokens size refs uses".split()
    assert first.split()[:6] == ["docs/b", "#2", "document", "disk", "-", "10"]
    assert stocked("ls", "nothing*") == "" and stocked.json("ls", "nothing*") == []


def test_stat_tells_all(stocked):
    stocked("cp", "docs/a", "faq")
    about = stocked.json("stat", "#1")
    assert about["names"] == ["docs/a", "faq"] and about["refs"] == 2 and len(about["digest"]) == 32
    text = stocked("stat", "faq")
    assert re.search(r"^names +docs/a, faq$", text, re.M) and re.search(r"^id +#1$", text, re.M)


def test_rm_frees_kv_without_a_model(stocked):
    assert stocked("rm", "docs/a", "--dry-run").startswith("would be removed: docs/a  #1")
    assert len(on_disk(stocked.home)) == 2
    assert [e["name"] for e in stocked.json("rm", "docs/a")] == ["docs/a"]
    assert len(on_disk(stocked.home)) == 1 and stocked("ls") == "docs/b\n"


def test_mv_cp_pin_unpin(stocked):
    stocked("mv", "docs/", "archive/")
    assert stocked("ls") == "archive/a\narchive/b\n"
    stocked("cp", "archive/a", "archive/b", status=1)
    assert "already names #2" in stocked.err
    assert stocked("pin", "archive/a").startswith("pinned: archive/a  #1")
    stocked("rm", "**", status=1)
    assert stocked.err == "error: 'archive/a' (#1) is pinned\nhint: unpin it first\n"
    assert stocked("find", "--pinned") == "archive/a\n"
    assert stocked("find", "--no-pinned", "--min-tokens", "5") == "archive/b\n"
    assert stocked("unpin", "**", "-q") == ""
    stocked("rm", "**")
    assert stocked("ls") == ""


def test_find_by_age(stocked):
    assert stocked("find", "--unused-for", "1h") == ""
    assert stocked("find", "--unused-for", "0s", "--kind", "document") == "docs/a\ndocs/b\n"
    assert stocked("find", "--tier", "ram") == ""


def test_du_adds_up(stocked):
    head, disk, total = stocked("du").splitlines()
    assert head.split() == ["tier", "chunks", "tokens", "size"]
    assert disk.split()[:3] == ["disk", "2", "24"] and total.split()[:3] == ["total", "2", "24"]
    [usage] = stocked.json("du", "--by", "dir")
    assert usage["key"] == "docs/" and usage["n_chunks"] == 2
    assert stocked("du", "--by", "namespace").splitlines()[1].startswith("(default)")


@pytest.mark.parametrize("verb", [["stat"], ["rm"], ["pin"], ["ls"], ["mv", "--replace", "docs/c"]])
def test_unknown_names_get_a_suggestion(stocked, verb):
    words = [*verb[:1], "docs/aa", *verb[:0:-1]]
    stocked(*words, status=1)
    assert stocked.err.startswith("error: no chunk 'docs/aa'\nhint: did you mean 'docs/a'")
    stocked(*words, "--json", status=1)
    error = json.loads(stocked.err)["error"]
    assert error["code"] == "ChunkNotFound" and error["did_you_mean"][0] == "docs/a"
    assert stocked.out == ""


def test_a_directory_is_not_a_name(stocked):
    stocked("ls", "docs", status=1)
    assert stocked.err.endswith("hint: did you mean 'docs/', all below it?\n")


def test_reading_verbs_make_no_home(sh):
    assert sh("ls") == "" and "nothing is stored in" in sh.err
    assert sh.json("du") == []
    sh("stat", "x", status=1)
    sh("place", "x", "disk", status=1)
    assert not sh.home.exists()


def test_place(stocked):
    assert stocked("place", "docs/*", "none", "--dry-run").count("would be placed: ") == 2
    assert stocked.json("du")[0]["key"] == "disk"
    stocked("place", "docs/a", "none")
    assert stocked.json("stat", "docs/a")["tier"] == "none"
    assert len(on_disk(stocked.home)) == 1
    stocked("place", "docs/a", "disk")
    assert stocked.json("stat", "docs/a")["tier"] == "disk"


def test_compress(stocked):
    small = stocked.json("compress", "docs/a", "h2o:4", "--to", "docs/small")[0]
    assert small["n_tokens"] == stocked.json("stat", "docs/a")["n_tokens"]
    assert 0 < small["n_bytes"]
    assert stocked("compress", "docs/small", "full").startswith("compressed: docs/small  #")
    assert stocked.json("stat", "docs/small")["id"] == stocked.json("stat", "docs/a")["id"]
    stocked("compress", "docs/a", "some:0.3", status=1)
    assert "no token policy 'some'" in stocked.err


def test_what_was_compressed_is_read_by_the_next_command(stocked, monkeypatch):
    stocked("compress", "docs/a", "h2o:4", "--to", "docs/small")
    told = stocked.json("stat", "docs/small")
    assert told["tier"] == "disk" and told["n_tokens"] == stocked.json("stat", "docs/a")["n_tokens"]
    monkeypatch.setattr(Thinning, "steps", lambda *_: pytest.fail("it was computed again"))
    words = ["run", "keep the notes .{docs/small} what about Yuki's metal", "--max-tokens", "4"]
    spans = {span["part"]: span for span in stocked.json(*words)["plan"]["spans"]}
    assert spans["docs/small"]["tier"] == "disk" and spans["docs/small"]["n_prefilled"] == 0
    assert "thinned:h2o:4" in spans["docs/small"]["approximate"]


def test_run_keeps_some_rows(stocked):
    words = ["run", "keep the notes .{docs/a}{docs/b} what about Yuki's metal", "--max-tokens", "4"]
    stocked(*words, "--keep", "streaming:8,every=2", "--explain")
    assert "streaming:8,every=2 let go of" in stocked.err


# --- the verbs with a model


def test_run_streams_text_and_explains_on_stderr(stocked):
    words = ["run", "keep the notes .{docs/a}{docs/b} what about Yuki's metal", "--max-tokens", "4"]
    text = stocked(*words)
    assert text.endswith("\n") and stocked.err == ""
    assert stocked(*words, "--explain", "--check") == text
    assert re.search(r"^docs/a +14  re(use|pair) +disk", stocked.err, re.M)
    assert "vs full prefill of 32 tokens" in stocked.err
    found = stocked.json(*words, "--check")
    assert found["text"] + "\n" == text and found["finish"] in ("stop", "length")
    assert found["usage"]["prompt_tokens"] == 32 == found["plan"]["n_tokens"]
    assert [s["part"] for s in found["plan"]["spans"]][1:3] == ["docs/a", "docs/b"]
    assert found["plan"]["reused"] + found["plan"]["repaired"] == 24
    assert found["check"]["n_tokens"] == 32


def test_run_leaves_only_what_was_put(stocked):
    stocked("run", "so {docs/a} well", "--max-tokens", "2")
    assert stocked("ls") == "docs/a\ndocs/b\n" and stocked.json("du")[0]["n_chunks"] == 2


def test_run_needs_no_home_and_claims_none(sh):
    sh("run", "so well", "--max-tokens", "1")
    assert not sh.home.exists()


@pytest.mark.usefixtures("looks")
def test_run_fills_holes(stocked):
    words = ["run", "{docs} {q}", "--docs", "docs=docs/*,#1", "--set", "q=a=b", "--max-tokens", "1"]
    spans = stocked.json(*words)["plan"]["spans"]
    assert [s["part"] for s in spans][:3] == ["docs/a", "docs/b", "#1"]
    assert stocked.json("run", "-", "--max-tokens", "1", stdin="so {docs/b}")["plan"]["reused"]


def test_full_repair_equals_the_oracle(stocked):
    words = ["check", "so {docs/a}{docs/b} ask"]
    assert stocked.json(*words, "--repair", "full")["check"]["kl_max"] < 1e-6
    some = stocked.json(*words, "--repair", "none")["check"]
    assert max(some["k_error"]) > 1e-3, "nothing was approximate: the test shows nothing"
    assert "vs full prefill of" in stocked(*words, "--share", "0.5")


@pytest.mark.usefixtures("looks")
def test_a_bound_on_the_drift_is_handed_on_and_kept(stocked):
    shares = (0.05, 0.15)
    wide = ((-9.0,) * 5, (9.0,) * 5)
    curves = [
        Curve(s, w, (0.0,) * 6, (0.0,), (0.5,), *wide) for s in shares for w in shares if w >= s
    ]
    made = Calibration(load_once(str(MODEL)).fingerprint, 0.95, 100, tuple(curves))
    made.save(stocked.home / "calibration.json")
    words = ["keep the notes .{docs/a}{docs/b} what about Yuki's metal", "--max-drift"]
    plan = stocked.json("run", *words, "0.6", "--max-tokens", "1")["plan"]
    assert plan["drift"] == 0.5 and plan["reused"]
    plan = stocked.json("check", *words, "0.1")["plan"]
    assert plan["drift"] == 0 and plan["reused"] == 0
    lines = "/add docs/a\n/add docs/b\nwhat about Yuki's metal\n/plan\n"
    last = stocked("chat", "--max-drift", "0.6", "--max-tokens", "1", stdin=lines).splitlines()[-1]
    assert "drift at most 0.5" in last
    assert stocked("check", *words, "-1", status=2) == "" and "nats from 0 up" in stocked.err
    stocked("check", *words, "1", "--repair", "query", status=1)
    assert "'query' repairs a fixed share" in stocked.err


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (["so {docs/aa}"], "no chunk 'docs/aa'", "did you mean 'docs/a'"),
        (["so {q}"], "nothing fills the hole {q}", "pass --set q=TEXT or --docs q=NAME"),
        (["so {q"], "template: '{' is never closed", "write '{{'"),
        (["so {q}", "--docs", "q=x/*"], "no chunk 'x/*'", ""),
        (["so {q}", "--docs", "q=docs/aa"], "no chunk 'docs/aa'", "did you mean"),
        (["so", "--max-tokens", "5000"], "maximum context length is 4096 tokens", ""),
    ],
)
def test_run_says_what_is_wrong(stocked, words, message, hint):
    assert stocked("run", *words, status=1) == ""
    assert message in stocked.err and hint in stocked.err
    assert "Traceback" not in stocked.err


def test_a_number_that_no_option_takes_is_wrong_usage(sh):
    """Of every command: what is no number, or is out of bounds, is said before anything is opened."""
    seen, parsers = set(), [parser.command_parser(c) for c in parser.COMMANDS.values()]
    while parsers:
        for action in parsers.pop()._actions:
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
            elif action.dest != "at":  # a part may be counted from the end
                assert action.type not in (int, float), action
            if getattr(action.type, "__qualname__", "").startswith(("number.", "whole.")):
                seen.add(action.dest)
                for text in ("-1", "nan", "inf", "x", "", "1e400", "9" * 5000):
                    with pytest.raises(argparse.ArgumentTypeError):
                        action.type(text)
    assert {"temperature", "top_p", "top_k", "seed", "port", "bound", "latency", "limit"} <= seen
    for words in ("--temperature=-1", "--top-p=0", "--top-k=-1", "--seed=-1", "--share=2"):
        sh("run", "so", *words.split("="), status=2)
        assert "argument --" in sh.err


def test_can(sh):
    about = sh.json("can")
    assert about["run"]["ok"] is about["move"]["ok"] is True and about["max_positions"] == 4096
    assert about["bytes_per_token"] == 9216
    run, move, *_ = sh("can").splitlines()
    assert run.startswith("run              yes: ") and move.startswith("move             yes: ")
    assert not sh.home.exists()


def test_demo_is_given_its_options(sh, monkeypatch):
    called = []
    job = SimpleNamespace(run=lambda *args: called.append(args) or 3)
    monkeypatch.setitem(sys.modules, "kvweave.demo.job", job)
    sh("demo", "--turns", "7", "--out", "o", "--json", status=3)
    assert called == [(None, 7, True, Path("o"), False, None)]


# --- homes


def test_a_home_belongs_to_one_model(stocked, monkeypatch):
    file = stocked.home / "model.json"
    other = json.loads(file.read_text()) | {"weights": "0" * 32}
    file.write_text(json.dumps(other))
    stocked("run", "so {docs/a}", status=1)
    assert "KV of another model: weights is" in stocked.err
    assert f"hint: {stocked.home} was made with another model" in stocked.err
    assert stocked("ls") == "docs/a\ndocs/b\n"


def test_a_home_whose_closing_fails_is_the_models_of_what_was_put(sh, monkeypatch):
    def full(shelf, keys):
        raise NoSpace("cannot write #1 to disk", "disk")

    with monkeypatch.context() as broken:
        broken.setattr(Shelf, "sink", full)
        sh("put", "docs/a", stdin=A, status=1)
    assert "cannot write #1" in sh.err and sh("cat", "docs/a") == A
    assert sh("run", "{docs/a} so", "--max-tokens", "1")
    assert (sh.home / "model.json").exists() and (sh.home / "config.json").exists()


def test_a_home_is_the_models_of_what_a_namespace_put(sh):
    args = parser.parse(["serve", "--home", str(sh.home), "-q"])
    with home.open_engine(args, make=True) as engine:
        engine.put("docs/a", A, namespace="alice")
    assert (sh.home / "model.json").exists() and (sh.home / "config.json").exists()


def test_a_home_remembers_its_model(sh):
    model = sh.directory / "model"
    shutil.copytree(MODEL, model)
    sh("put", "docs/a", "--model", "model", stdin=A)
    assert json.loads((sh.home / "config.json").read_text()) == {"model": str(model)}
    sh("run", "so {docs/a}", "--max-tokens", "1")
    assert sh.err == ""
    shutil.rmtree(model)
    sh("run", "so {docs/a}", "--max-tokens", "1", status=1)
    assert f"cannot load a model from '{model}': there is no such directory" in sh.err
    assert sh("ls", "--home", str(sh.home)) == "docs/a\n"
    assert sh("ls", "--home", str(sh.directory / "other")) == ""


@pytest.mark.parametrize("name", ["model.json", "config.json"])
@pytest.mark.parametrize("text", ["{not json", "[1]", "\0"])
def test_an_unreadable_home_is_an_error_not_a_traceback(stocked, name, text):
    (stocked.home / name).write_text(text)
    stocked("run", "so {docs/a}", status=1)
    assert stocked.err.startswith(f"error: cannot read {stocked.home / name}: ")


def test_a_corrupt_index_and_corrupt_kv_are_told(stocked):
    for record in (stocked.home / "kv").glob("*.kv"):
        with record.open("r+b") as file:
            file.seek(4096)  # behind the head: the first layer
            file.write(b"\x5a" * 4096)
    [span] = [
        s for s in stocked.json("run", "so {docs/a}")["plan"]["spans"] if s["part"] == "docs/a"
    ]
    assert span["n_prefilled"] == 14, "what is wrong on the disk is computed again"
    (stocked.home / "index.sqlite").write_bytes(b"no database at all" * 99)
    stocked("ls", status=1)
    assert stocked.err.startswith("error: ") and "index.sqlite" in stocked.err


def test_one_process_at_a_time(stocked):
    with Table(stocked.home / "index.sqlite"):
        stocked("ls", status=1)
    assert "error: " in stocked.err and "Traceback" not in stocked.err
    stocked("ls")


# --- chat

TALK = "Nina's river is wide . what about Nina's river\n\nLena's river is wide .\n"


def test_chat_answers_line_by_line_and_keeps_nothing(stocked):
    stocked("chat", "--system", "keep the notes .", "--max-tokens", "3", stdin=TALK)
    assert len(stocked.out.splitlines()) == 2
    assert stocked("ls") == "docs/a\ndocs/b\n"
    stocked("chat", "--keep-turns", "--max-tokens", "3", stdin=TALK)
    assert stocked("ls", "chat/") == "chat/1/a-000\nchat/1/a-001\nchat/1/u-000\nchat/1/u-001\n"
    stocked("chat", "--keep-turns", "--max-tokens", "3", stdin="so\n")
    assert stocked("ls", "chat/2/u-*") == "chat/2/u-000\n"


def test_chat_drops_the_oldest_turns_over_the_limit(sh):
    words = ["chat", "--system", "keep the notes .", "--limit", "26", "--max-tokens", "2"]
    sh(*words, "--json", stdin=TALK + "so well\n/parts\n")
    *answers, parts = [json.loads(line) for line in sh.out.splitlines()]
    assert answers[0]["dropped"] == []
    assert answers[1]["dropped"] == ["chat/1/u-000", "chat/1/a-000"]
    assert parts[1]["name"].startswith("chat/1/u-"), "half a turn was dropped"
    assert parts[0]["name"] == "chat/1/s-000" and sum(p["n_tokens"] for p in parts) <= 26
    assert answers[2]["usage"]["kv"]["exact"] > 0
    sh(*words, "--quiet", stdin=TALK)
    assert sh.err == ""


def test_chat_commands(stocked):
    lines = [
        TALK,
        "/parts",
        "/drop 0",
        "/add docs/b",
        "/plan",
        "/check",
        "/help",
        "/quit",
        "unread",
    ]
    stocked("chat", "--max-tokens", "2", stdin="\n".join(lines))
    assert re.search(r"^0  chat/1/u-000 +#\d+ +\d+$", stocked.out, re.M)
    assert re.search(r"^ +total +\d+$", stocked.out, re.M)
    assert "chat/1/u-001" in stocked.out and "vs full prefill of" in stocked.out
    assert "dropped 0; " in stocked.err and "added docs/b, 10 tokens" in stocked.err
    assert "/drop NAME" in stocked.err and len(re.findall("prefilled", stocked.out)) == 2


def test_chat_goes_on_after_errors_and_says_so_at_the_end(sh):
    sh(
        "chat",
        "--max-tokens",
        "2",
        stdin="/drpo x\n/drop\n/drop x\nAnna's river is cold .\n" + "so " * 5000,
        status=1,
    )
    assert "hint: did you mean /drop?" in sh.err and "which part?" in sh.err
    assert "no part 'x'" in sh.err and "maximum context length is 4096 tokens" in sh.err
    assert len(sh.out.splitlines()) == 1


def test_chat_interrupted_answer_leaves_no_trace(sh, monkeypatch):
    real = chat.Chat._parts
    seen = []

    def stream(turn):
        yield "half"
        raise KeyboardInterrupt

    monkeypatch.setattr("kvweave.weave.turn.Turn.stream", stream)
    monkeypatch.setattr(
        chat.Chat, "_parts", lambda self, rest: seen.append(self) or real(self, rest)
    )
    sh("chat", "--system", "keep .", stdin="so\n/parts\n")
    assert "interrupted" in sh.err and sh.out.startswith("half")
    assert "u-000" not in sh.out and "s-000" in sh.out


def test_chat_at_a_terminal_prompts_until_ctrl_d(sh, monkeypatch):
    lines = iter(["so well", "/quti"])
    prompts = []

    def read(prompt):
        prompts.append(prompt)
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)
    sh.stdin_type = Terminal
    sh("chat", "--max-tokens", "1")  # status 0: who sits there has seen the error
    assert prompts == ["> "] * 3 and "did you mean /quit?" in sh.err


def test_chat_keep_makes_a_home(sh):
    sh("chat", "--keep-turns", "--max-tokens", "1", stdin="so\n")
    assert sh("ls") == "chat/1/a-000\nchat/1/u-000\n"


# --- what the terminal sees


def test_log_level_shows_where_errors_come_from(sh, monkeypatch, caplog):
    logger = logging.getLogger("kvweave")
    monkeypatch.setattr(logger, "level", logger.level)
    sh("stat", "x", status=1)
    assert caplog.text == ""
    monkeypatch.setenv("KVWEAVE_LOG", "debug")
    sh("stat", "x", status=1)
    logger.setLevel(logging.NOTSET)
    assert "where it came from" in caplog.text and "ChunkNotFound" in caplog.text


def test_interrupt_and_broken_pipe(sh, monkeypatch):
    def raises(error):
        def command(args):
            raise error

        return command

    monkeypatch.setattr("kvweave.cli.files.ls", raises(KeyboardInterrupt()))
    sh("ls", status=130)
    assert "Traceback" not in sh.err


def test_sizes():
    sizes = [0, 999, 1000, 4096, 36 * 1024, 10 * 1024**2, 3 * 1024**4]
    shown = ["0 B", "999 B", "1.0 KiB", "4.0 KiB", "36 KiB", "10 MiB", "3.0 TiB"]
    assert [show.size(n) for n in sizes] == shown


def test_progress_bar_only_when_it_takes_long(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    clock = iter([0.0, 0.5, 2.0])
    monkeypatch.setattr(show.time, "monotonic", lambda: next(clock))
    drawn = []

    class Bar:
        def __init__(self, what, total):
            drawn.append((what, total))

        def at(self, done):
            drawn.append(done)

        def close(self):
            drawn.append("closed")

    monkeypatch.setattr("kvweave.cli.pretty.Bar", Bar)
    with show.Out().progress("tokens", 100) as advance:
        advance(10)
        assert drawn == []
        advance(20)
    assert drawn == [("tokens", 100), 30, "closed"]


def test_kv_survives_from_process_to_process(stocked):
    written = on_disk(stocked.home)
    found = subprocess.run(
        [sys.executable, "-m", "kvweave.cli", "run", "so {docs/a} ask", "--json"],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=600,
    )
    assert found.returncode == 0 and found.stderr == "", found.stderr
    plan = json.loads(found.stdout)["plan"]
    [span] = [s for s in plan["spans"] if s["part"] == "docs/a"]
    assert span["n_prefilled"] == 0 and span["n_bytes"] > 0, "not taken from the disk"
    assert on_disk(stocked.home) == written


def test_file_verbs_load_neither_torch_nor_rich(tmp_path):
    code = (
        "import sys; from kvweave.cli import main; main(['ls', '-l']); main(['du']);"
        "main(['find']); main(['stat', 'x']);"
        "print([m for m in ('torch', 'transformers', 'rich') if m in sys.modules])"
    )
    env = {**os.environ, "KVWEAVE_HOME": str(tmp_path)}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert found.stdout.splitlines()[-1] == "[]", found.stdout


@pytest.mark.slow
def test_on_a_terminal_tables_are_drawn_and_a_closed_pipe_is_quiet(tmp_path):
    env = {**os.environ, "KVWEAVE_HOME": str(tmp_path / "home"), "COLUMNS": "80"}
    with Table(tmp_path / "home" / "index.sqlite") as table:
        for i in range(3000):
            id, _ = table.add([i], digest=i.to_bytes(16, "little"))
            table.bind(f"docs/{i}/{'x' * 40}", id)  # more than a pipe holds
    command = [sys.executable, "-m", "kvweave.cli"]
    ours, theirs = pty.openpty()
    subprocess.run([*command, "ls", "-l", "docs/1/"], stdout=theirs, env=env, check=True)
    os.close(theirs)
    assert "─" in os.read(ours, 65536).decode() and os.close(ours) is None
    with subprocess.Popen(
        [*command, "ls"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env
    ) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == app.BROKEN_PIPE


@pytest.mark.parametrize(
    ("n", "then"), [(1, "time.sleep(600)"), (2, "time.sleep(600)"), (1, "None")]
)
def test_an_interrupt_that_python_drops_is_one(n, then):
    """In a destructor what is raised is dropped; here the command goes on, or ends right then."""
    code = f"""
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from kvweave.cli import app, values
class Dropping:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(.01)
def run(args):
    for _ in range({n}):
        Dropping()
        time.sleep(.05 * ({n} - 1))  # the second is not the first's last word
    {then}
values.dropping = run
app.COMMANDS = {{"ls": type("C", (), {{"where": "kvweave.cli.values:dropping"}})}}
sys.exit(app.main(["ls"]))
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=100)
    assert (ended.returncode, ended.stderr.strip()) == (130, b"")


def test_an_end_does_not_wait_for_ever_for_what_cleans_up():
    """For a server that is silent, say; twice, as one block may stand in another."""
    code = """
import os, signal, sys, time
from kvweave.cli import app, signals, values
signals.GRACE, signals.NEXT = .4, .3
def run(args):
    try:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(20)
        finally:
            time.sleep(20)
            print("first")
    finally:
        time.sleep(20)
        print("second")
values.cleaning = run
app.COMMANDS = {"ls": type("C", (), {"where": "kvweave.cli.values:cleaning"})}
sys.exit(app.main(["ls"]))
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=30)
    assert (ended.returncode, ended.stdout, ended.stderr) == (143, b"", b"")


def test_every_group_of_commands_says_what_it_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert parser.GROUPS.keys() == {name.split()[0] for name in parser.COMMANDS if " " in name}
    for group, says in parser.GROUPS.items():
        with pytest.raises(SystemExit):
            app.main([group, "--help"])
        assert says in capsys.readouterr().out
