"""Every program in examples/ runs with the bundled model and prints what it says it shows."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    def run(name):
        monkeypatch.setattr(sys, "argv", [name])
        monkeypatch.chdir(tmp_path)
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        assert not list(tmp_path.iterdir()), f"{name} left files behind"
        return capsys.readouterr().out

    return run


def test_long_chat_computes_only_the_new_turn(run):
    lines = re.findall(r"(\d+) tokens computed, context (\d+)", run("long_chat.py"))
    assert len(lines) == 12
    assert all(int(computed) < 30 and int(context) <= 150 for computed, context in lines)


def test_rag_reuses_the_documents(run):
    text = run("rag.py")
    assert text.count("vs full prefill of") == 2
    reused = [int(n) for n in re.findall(r"reused (\d+)", text)]
    prefilled = [int(n) for n in re.findall(r"prefilled (\d+)", text)]
    assert min(reused) > 200 and max(prefilled) < 50


def test_undo_leaves_the_rows_and_fork_shares_them(run):
    text = run("fork_undo.py")
    assert "after undo, prefilled: 0" in text
    for line in ("first: ", "second:"):
        exact = re.search(rf"{line} .*'exact': (\d+), 'reused': 0", text)
        assert exact and int(exact[1]) > 20


def test_together_is_as_alone(run):
    assert len(re.findall(r"^\w+ \w+: '.*', alone '.*'$", run("together.py"), re.M)) == 2


def test_every_example_is_tested():
    source = Path(__file__).read_text()
    missing = [path.name for path in EXAMPLES.glob("*.py") if f'"{path.name}"' not in source]
    assert not missing
