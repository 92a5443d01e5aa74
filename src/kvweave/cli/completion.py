"""``kvweave completion``: what a shell needs to complete commands, options and names."""

from __future__ import annotations

import argparse
from argparse import Namespace

import shtab

from kvweave.cli.command import Command, add_common, add_remote
from kvweave.cli.commands import COMMANDS
from kvweave.cli.parser import GROUPS

# a process of 0.3 s; more names than that help nobody
CHUNKS = shtab.cmd("kvweave ls -q --limit 500 2>/dev/null")
CONTEXTS = shtab.cmd("kvweave context ls -q 2>/dev/null")
NAMES = {"PATTERN": CHUNKS, "SRC": CHUNKS, "REF": CHUNKS}
PATHS = {
    "FILE": shtab.FILE,
    "DIR": shtab.DIRECTORY,
    "HOME": shtab.DIRECTORY,
    "MODEL": shtab.DIRECTORY,
}


def completion(args: Namespace) -> None:
    """Print a script for one shell."""
    print(shtab.complete(_whole(), shell=args.shell))


def _whole() -> argparse.ArgumentParser:
    """Return all commands as one parser, which is how shtab wants them."""
    top = argparse.ArgumentParser(prog="kvweave")
    groups = {"": top.add_subparsers()}
    for name, command in COMMANDS.items():
        group, _, verb = name.rpartition(" ")
        if group not in groups:
            groups[group] = groups[""].add_parser(group, help=GROUPS[group]).add_subparsers()
        parser = groups[group].add_parser(verb, help=command.summary)
        _fill(parser, command, in_context=bool(group))
    return top


def _fill(parser: argparse.ArgumentParser, command: Command, *, in_context: bool) -> None:
    command.add(parser)
    add_common(parser)
    if command.remote:
        add_remote(parser)
    for action in parser._actions:
        metavar = str(action.metavar)
        names = {"NAME": CONTEXTS, "PATTERN": CONTEXTS} if in_context else NAMES
        known = PATHS if action.option_strings else PATHS | names
        if metavar in known:
            action.complete = known[metavar]  # type: ignore[attr-defined]
