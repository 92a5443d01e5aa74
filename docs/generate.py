"""Writes docs/cli.md from the command line's own parsers; tests/test_docs.py checks it is current.

Not from argparse's help text, which differs from one Python version to the next.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path

from kvweave.cli.parser import COMMANDS, Command, add_common, add_remote, command_parser

FILE = Path(__file__).parent / "cli.md"

HEAD = """\
<!-- made by docs/generate.py: edit src/kvweave/cli/commands.py and run `make docs` -->
# The `kvweave` command

Chunks live in a home directory (`--home`, `$KVWEAVE_HOME`, or `~/.kvweave`), with their KV on disk,
so that the next process finds them. A home belongs to one model: the one of the first `put`.

Results go to stdout, notes and errors to stderr. With `--json`, stdout is JSON and nothing else, and
an error is an object `{"error": {"code", "message", "hint", ...}}` on stderr. Exit status: 0 done,
1 an error, 2 wrong usage, 130 Ctrl-C, 143 SIGTERM, 129 SIGHUP, 141 the reader of a pipe went away.
What such a signal ends closes the context it had opened in a server, and removes the names of its turns.
`KVWEAVE_LOG=debug` shows where an error came from. One process at a time may have a home open: the others talk to its server
(`kvweave serve`, then `--url` or `$KVWEAVE_URL`) with the same commands, which then need no model.

A `PATTERN` is a name, `#17`, a glob (`*` within a part, `**` across parts, `?`, `[a-z]`, `{a,b}`), or
`docs/` for everything below.
"""


def page() -> str:
    """Return the text of docs/cli.md."""
    rows = [
        f"| [`{c.name}`](#{c.name.replace(' ', '-')}) | {c.summary} |" for c in COMMANDS.values()
    ]
    here = ", ".join(f"`{c.name}`" for c in COMMANDS.values() if not c.remote)
    parts = [
        HEAD,
        "\n".join(["| command | |", "|---|---|", *rows]) + "\n",
        "## Common options\n\n" + _options(_parser(add_common)),
        f"## Options of a server\n\nOf all commands but {here}.\n\n"
        + _options(_parser(add_remote)),
        *(_section(command) for command in COMMANDS.values()),
    ]
    return "\n".join(parts)


def _parser(add: Callable[[argparse.ArgumentParser], None]) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(add_help=False)
    add(made)
    return made


def _section(command: Command) -> str:
    parser = command_parser(command)
    shared = set(_parser(add_common)._option_string_actions)
    if command.remote:
        shared |= set(_parser(add_remote)._option_string_actions)
    own = [a for a in parser._actions if not shared.intersection(a.option_strings)]
    words = ["kvweave", command.name, *(_word(a) for a in own if not a.option_strings), "[OPTIONS]"]
    text = f"## {command.name}\n\n{command.summary}"
    text += " " + command.more.replace("\n", " ") + "\n" if command.more else "\n"
    text += f"\n```text\n{' '.join(words)}\n```\n\n"
    rows = [_row(action) for action in own if action.dest != "help"]
    if rows:
        text += "\n".join(rows) + "\n"
    if command.examples:
        lines = "\n".join(f"$ {line}" for line in command.examples)
        text += f"\n```console\n{lines}\n```\n"
    return text


def _options(parser: argparse.ArgumentParser) -> str:
    return "\n".join(_row(action) for action in parser._actions) + "\n"


def _word(action: argparse.Action) -> str:
    name = str(action.metavar)
    return {"?": f"[{name}]", "*": f"[{name} ...]", "+": f"{name} ...", None: name}[action.nargs]  # type: ignore[index]


def _row(action: argparse.Action) -> str:
    if action.option_strings:
        value = "" if action.nargs == 0 else f" {action.metavar or _choices(action)}"
        value = f" [{value.strip()}]" if action.nargs == "?" else value
        name = ", ".join(f"`{option}{value}`" for option in action.option_strings)
    else:
        name = f"`{action.metavar}`"
    told = str(action.help).replace("%%", "%")  # as argparse prints it
    text = re.sub(r"'([^' ]+)'", r"`'\1'`", told)  # a glob's stars are no emphasis
    return f"- {name}: {text}"


def _choices(action: argparse.Action) -> str:
    return "|".join(str(choice) for choice in action.choices or ())


if __name__ == "__main__":
    FILE.write_text(page())
