"""One command of the shell: its words, its help, its options."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from kvweave.cli.values import given
from kvweave.errors import nearest


class UsageError(Exception):
    """The command line makes no sense; ``hint`` says what would."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message, self.hint = message, hint


class Parser(argparse.ArgumentParser):
    """Raises UsageError, and suggests options that look like an unknown one."""

    def error(self, message: str) -> NoReturn:
        """Raise UsageError."""
        hint = f"`{self.prog} --help` tells more"
        if message.startswith("unrecognized arguments: "):
            word = message.split(": ", 1)[1].split()[0].split("=")[0]
            near = nearest(word, self._option_string_actions, 1)
            hint = f"did you mean {near[0]}?" if near else hint
        raise UsageError(message, hint)


@dataclass(frozen=True, slots=True)
class Command:
    """One verb: where its code is (``module:function``), what help says, which arguments it has."""

    name: str
    where: str
    summary: str
    add: Callable[[argparse.ArgumentParser], None]
    more: str = ""  # further help, after the summary
    examples: tuple[str, ...] = ()
    remote: bool = True  # can talk to a server, so it takes --url and --key


def command_parser(command: Command) -> Parser:
    """Return the parser of one command, common options included."""
    text = command.summary + (f"\n\n{command.more}" if command.more else "")
    lines = "\n".join(f"  {line}" for line in command.examples)
    parser = Parser(
        prog=f"kvweave {command.name}",
        description=text,
        epilog=f"examples:\n{lines}" if lines else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.add(parser)
    add_common(parser)
    if command.remote:
        add_remote(parser)
    return parser


def add_common(parser: argparse.ArgumentParser) -> None:
    """Add the options every command has."""
    group = parser.add_argument_group("common options")
    group.add_argument(
        "--home",
        type=given,
        metavar="DIR",
        help="where chunks are kept (default: $KVWEAVE_HOME, or ~/.kvweave)",
    )
    group.add_argument(
        "--model",
        type=given,
        metavar="PATH",
        help="checkpoint directory or hub id (default: the one the home was made with)",
    )
    group.add_argument("--json", action="store_true", help="print JSON on stdout, nothing else")
    group.add_argument("-q", "--quiet", action="store_true", help="no notes and no progress")


def add_remote(parser: argparse.ArgumentParser) -> None:
    """Add the options of commands that can talk to a server."""
    group = parser.add_argument_group("options of a server")
    group.add_argument(
        "--url",
        type=given,
        metavar="URL",
        help="a server whose chunks to work on (default: $KVWEAVE_URL, or a home)",
    )
    group.add_argument(
        "--key",
        type=given,
        metavar="KEY",
        help="its API key, which all users of this machine see in the list of processes "
        "(default: $KVWEAVE_KEY, which they do not)",
    )
    add = group.add_argument
    add("--key-file", type=given, metavar="FILE", help="a file with the key, and nothing else")
