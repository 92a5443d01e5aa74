"""What the documents claim is run: Python blocks, command lines, links, and the generated page.

The ``python`` blocks of a file run in order in one namespace, in an empty directory, with the
bundled model for "path/or/hf-id" (and as ``MODEL``). A file's first block imports what it uses.
``console`` blocks show commands after ``$``: those of kvweave must parse, those of make must exist.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path

import pytest

from kvweave.cli import home
from kvweave.cli.parser import UsageError, parse

ROOT = Path(__file__).parents[1]
MODEL = str(home.BUNDLED)
PLACEHOLDER = '"path/or/hf-id"'
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md")]
}


def blocks(text, language):
    """Return (line number, code) of each fenced block in a language."""
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)
    return [(text.count("\n", 0, match.start(1)) + 1, match[1]) for match in found]


def commands(text):
    """Return the commands of console blocks, also those after a pipe or in one line with others."""
    lines = [line for _, block in blocks(text, "console") for line in block.splitlines()]
    for line in lines:
        for part in re.split(r"(?:^|\s)\$ ", line)[1:] if line.startswith("$") else []:
            words = shlex.shlex(part, posix=True, punctuation_chars="|;&<>")
            words.whitespace_split = True
            command = []
            for word in [*words, ";"]:
                if set(word) <= set("|;&<>"):
                    yield command
                    command = []
                else:
                    command.append(word)


WITH_PYTHON = [name for name, text in PAGES.items() if blocks(text, "python")]
WITH_CONSOLE = [name for name, text in PAGES.items() if blocks(text, "console")]


def execute(text, name, namespace):
    for line, code in blocks(text, "python"):
        source = "\n" * (line - 1) + code.replace(PLACEHOLDER, repr(MODEL))
        exec(compile(source, name, "exec"), namespace)


@pytest.mark.parametrize("name", WITH_PYTHON)
def test_python_blocks_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    execute(PAGES[name], str(ROOT / name), {"__name__": "docs", "MODEL": MODEL})


def check_command(words):
    """Raise UsageError or AssertionError for a command that does not exist."""
    if words[:1] == ["kvweave"] and not {"--help", "--version"} & set(words):
        parse(words[1:])
    if words[:1] == ["make"]:
        makefile = (ROOT / "Makefile").read_text()
        for target in [word for word in words[1:] if "=" not in word]:
            assert re.search(rf"^{re.escape(target)}:", makefile, re.M), f"no make {target}"


@pytest.mark.parametrize("name", WITH_CONSOLE)
def test_commands_exist(name):
    for words in commands(PAGES[name]):
        try:
            check_command(words)
        except UsageError as error:
            pytest.fail(f"{name}: {shlex.join(words)}: {error.message}")


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", PAGES[name]):
        if "://" not in target and not target.startswith("mailto:"):
            assert (ROOT / name).parent.joinpath(target).exists(), f"{name} links to {target}"


def test_files_the_map_names_exist():
    for path in re.findall(r"`((?:\w+/)+\w*(?:\.py)?|\w+\.py)`", PAGES["docs/map.md"]):
        assert any((base / path).exists() for base in (ROOT, ROOT / "src/kvweave")), path


def test_the_page_of_commands_is_current():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    assert PAGES["docs/cli.md"] == generate.page(), "run `make docs`"


def test_these_checks_can_fail():
    page = (
        "```python\nfrom kvweave import Engine\nx = 'path/or/hf-id'\n```\ntext\n"
        "```python\nassert x == MODEL, x\n```\n"
        "```console\n$ date | kvweave put x  # comment\n$ kvweave ls   $ kvweave lss '#1'\n```\n"
    )
    with pytest.raises(AssertionError, match="path/or/hf-id"):
        execute(page, "page.md", {"MODEL": MODEL})
    execute(page.replace("'path/or/hf-id'", PLACEHOLDER), "page.md", {"MODEL": MODEL})
    found = list(commands(page))
    assert found == [["date"], ["kvweave", "put", "x"], ["kvweave", "ls"], ["kvweave", "lss", "#1"]]
    with pytest.raises(UsageError, match="no command 'lss'"):
        check_command(found[-1])
    with pytest.raises(AssertionError, match="no make nothing"):
        check_command(["make", "nothing"])
