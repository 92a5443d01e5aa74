"""Which command a line means. Options may stand anywhere, before the command or between its arguments."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import kvweave
from kvweave.cli.command import (
    Command,
    Parser,
    UsageError,
    add_common,
    add_remote,
    command_parser,
)
from kvweave.cli.commands import COMMANDS
from kvweave.errors import nearest

__all__ = [
    "COMMANDS",
    "Command",
    "UsageError",
    "add_common",
    "add_remote",
    "command_parser",
    "parse",
    "top_parser",
]


GROUPS = {
    "context": "The verbs on a server's contexts.",
    "memory": "The verbs on a server's memories.",
    "probe": "Record what decoding reads of its KV, and ask the traces.",
}
WITH_VALUE = ("--home", "--model", "--url", "--key", "--key-file")


def top_parser() -> Parser:
    """Return the parser of ``kvweave`` without a command; its help lists the commands."""
    width = max(map(len, COMMANDS))
    lines = [f"  {c.name.ljust(width)}  {c.summary}" for c in COMMANDS.values()]
    parser = Parser(
        prog="kvweave",
        usage="kvweave COMMAND [ARGUMENTS] [OPTIONS]",
        description="A language model's context as a list of named chunks whose KV cache is reused.\n\n"
        + "commands:\n"
        + "\n".join(lines),
        epilog="`kvweave COMMAND --help` tells more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"kvweave {kvweave.__version__}")
    add_common(parser)
    add_remote(parser)
    return parser


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Return the arguments with ``command`` in them. Raises UsageError; help exits."""
    at = _command_at(words)
    if at is None:
        top_parser().parse_args(list(words) or ["--help"])
        raise UsageError("no command", f"one of {', '.join(COMMANDS)}; `kvweave --help` tells more")
    name, rest = words[at], [*words[:at], *words[at + 1 :]]
    if name in GROUPS:
        name, rest = _verb_of(name, at, rest)
    if name not in COMMANDS:
        near = nearest(name, COMMANDS, 1)
        hint = f"did you mean {near[0]}?" if near else "`kvweave --help` lists the commands"
        raise UsageError(f"no command {name!r}", hint)
    if not COMMANDS[name].remote and any(word.split("=")[0] == "--url" for word in words):
        raise UsageError(f"{name} works on this machine only", "leave --url away")
    parser = command_parser(COMMANDS[name])
    # argparse forgets of intermixed arguments which were behind a "--"
    args = parser.parse_args(rest) if "--" in rest else parser.parse_intermixed_args(rest)
    args.command = name
    return args


def _verb_of(group: str, at: int, words: list[str]) -> tuple[str, list[str]]:
    """Return a command of two words, and the words without its second. Help exits."""
    verbs = [name.split()[1] for name in COMMANDS if name.startswith(f"{group} ")]
    second = _command_at(words, at)
    if second is None:
        lines = [f"  {COMMANDS[f'{group} {verb}'].summary}" for verb in verbs]
        lines = [
            f"  {verb.ljust(max(map(len, verbs)))}{line}"
            for verb, line in zip(verbs, lines, strict=True)
        ]
        Parser(
            prog=f"kvweave {group}",
            usage=f"kvweave {group} VERB [ARGUMENTS] [OPTIONS]",
            description=f"{GROUPS[group]}\n\n" + "\n".join(lines),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        ).parse_args(words[at:] or ["--help"])
        raise UsageError(f"{group}: no verb", f"one of {', '.join(verbs)}")
    verb = words[second]
    if verb not in verbs:
        near = nearest(verb, verbs, 1)
        hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(verbs)}"
        raise UsageError(f"no command '{group} {verb}'", hint)
    return f"{group} {verb}", [*words[:second], *words[second + 1 :]]


def _command_at(words: Sequence[str], at: int = 0) -> int | None:
    """Return the index of the first word that is no common option."""
    while at < len(words):
        if words[at] in WITH_VALUE:
            at += 1
        elif not words[at].startswith("-"):
            return at
        at += 1
    return None
