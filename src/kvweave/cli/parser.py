"""The words of the command line: every command and its help. No logic.

Options may stand anywhere, before the command or between its arguments. docs/cli.md is generated
from here.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import kvweave
from kvweave.cli import arguments
from kvweave.cli.simulate_arguments import simulate as simulate_arguments
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
    add: Callable[[Parser], None]
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
        metavar="DIR",
        help="where chunks are kept (default: $KVWEAVE_HOME, or ~/.kvweave)",
    )
    group.add_argument(
        "--model",
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
        metavar="URL",
        help="a server whose chunks to work on (default: $KVWEAVE_URL, or a home)",
    )
    group.add_argument("--key", metavar="KEY", help="its API key (default: $KVWEAVE_KEY)")


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
    name = words[at]
    if name not in COMMANDS:
        near = nearest(name, COMMANDS, 1)
        hint = f"did you mean {near[0]}?" if near else "`kvweave --help` lists the commands"
        raise UsageError(f"no command {name!r}", hint)
    if not COMMANDS[name].remote and any(word.split("=")[0] == "--url" for word in words):
        raise UsageError(f"{name} works on this machine only", "leave --url away")
    parser = command_parser(COMMANDS[name])
    args = parser.parse_intermixed_args([*words[:at], *words[at + 1 :]])
    args.command = name
    return args


def _command_at(words: Sequence[str]) -> int | None:
    """Return the index of the first word that is no common option."""
    at = 0
    while at < len(words):
        if words[at] in ("--home", "--model", "--url", "--key"):
            at += 1
        elif not words[at].startswith("-"):
            return at
        at += 1
    return None


FILES, TEXT, UPKEEP = "kvweave.cli.files", "kvweave.cli.text", "kvweave.cli.upkeep"
COMMANDS = {
    command.name: command
    for command in (
        Command(
            "put",
            "kvweave.cli.put:put",
            "Store text as a chunk with its KV.",
            arguments.put,
            "All files are stored or none. With --cut and --replace, old pieces past the new last\n"
            "one are removed.",
            (
                "kvweave put docs/faq faq.md",
                "kvweave put docs/ a.md b.md          # docs/a, docs/b",
                "kvweave put docs/manual manual.md --cut paragraph --max-tokens 400",
                "date | kvweave put memory/today --kind memory --replace",
            ),
        ),
        Command(
            "ls",
            f"{FILES}:ls",
            "List names.",
            arguments.ls,
            examples=("kvweave ls -l docs/", "kvweave ls --sort n_bytes --reverse --limit 10"),
        ),
        Command("stat", f"{FILES}:stat", "Tell all about one chunk.", arguments.stat),
        Command(
            "cat",
            f"{FILES}:cat",
            "Print what a chunk says.",
            arguments.stat,
            examples=("kvweave cat docs/faq", "kvweave cat docs/faq --json"),
        ),
        Command(
            "rm",
            f"{FILES}:rm",
            "Remove names; a chunk without names is freed.",
            arguments.rm,
            examples=("kvweave rm 'chat/42/*-00[1-3]' --dry-run",),
        ),
        Command(
            "mv",
            f"{FILES}:mv",
            "Rename; the KV stays where it is.",
            arguments.rename,
            examples=("kvweave mv docs/ archive/",),
        ),
        Command(
            "cp", f"{FILES}:cp", "Give chunks another name; no KV is copied.", arguments.rename
        ),
        Command(
            "pin",
            f"{FILES}:pin",
            "Keep chunks from being removed or evicted.",
            arguments.one_pattern,
        ),
        Command(
            "unpin",
            f"{FILES}:unpin",
            "Take back pin; nothing is freed by it.",
            arguments.one_pattern,
        ),
        Command(
            "place",
            f"{TEXT}:place",
            "Move KV to a tier.",
            arguments.place,
            "none keeps only the tokens: the KV is computed again when it is needed. ram lasts as\n"
            "long as the process, so from a shell it ends on disk.",
            ("kvweave place 'docs/**' none",),
        ),
        Command("du", f"{FILES}:du", "Add up tokens and bytes.", arguments.du),
        Command(
            "find",
            f"{FILES}:find",
            "List names by what stands behind them.",
            arguments.find,
            examples=("kvweave find 'chat/**' --unused-for 7d --min-tokens 500",),
        ),
        Command(
            "run",
            f"{TEXT}:run",
            "Weave a context from text and chunks, and continue it.",
            arguments.run,
            "The continuation goes to stdout as it comes; everything else to stderr.",
            (
                "kvweave run 'Use {docs/faq}. Q: how do I reset?'",
                "kvweave run 'Read {docs}. {ask}' --docs docs=wiki/oslo,wiki/b* --set ask=Why?",
                "kvweave run --explain --repair none 'Use {docs/faq}. Q: how do I reset?'",
            ),
        ),
        Command(
            "chat",
            "kvweave.cli.chat:chat",
            "Talk to the model; old turns can be dropped one by one.",
            arguments.chat,
            "Lines from stdin are messages; /help lists the commands. --json prints one object a\n"
            "line and answer.",
            ("kvweave chat --system 'You are brief.' --limit 2000",),
        ),
        Command(
            "check",
            f"{TEXT}:check",
            "Weave a context and compare it with a full prefill.",
            arguments.check,
            "With --suite, ask seeded questions over woven notes under several methods, and say how\n"
            "many replies are right and how far their predictions are from a full prefill's.\n"
            "--calibrate writes the bounds --max-drift needs, and tells what they are worth: fitted on\n"
            "every other protocol, tested on the rest, and the other way round.",
            (
                "kvweave check 'Use {docs/faq}. Q: how do I reset?' --share 0.2",
                "kvweave check --suite --protocols P1,P8 --strategies none,query,deviation:k@2",
                "kvweave check --suite --calibrate",
            ),
        ),
        Command(
            "can",
            f"{TEXT}:can",
            "Tell what the model can do, and why not.",
            arguments.nothing,
            remote=False,
        ),
        Command(
            "serve",
            "kvweave.cli.serve:serve",
            "Serve chunks, contexts and OpenAI's endpoints over HTTP.",
            arguments.serve,
            "One line on stdout says when and where. SIGINT or SIGTERM ends it when the running answers\n"
            "have ended. Without a key it answers this machine only. Takes what `pip install\n"
            "'kvweave[serve]'` brings.",
            (
                "kvweave serve",
                "kvweave serve path/to/model --port 0 --json",
                "kvweave serve path/to/model --host 0.0.0.0 --keys keys.txt --quota 1GiB",
            ),
            remote=False,
        ),
        Command(
            "fsck",
            f"{UPKEEP}:fsck",
            "Check a home: every row of its index, every byte of its KV.",
            arguments.fsck,
            "The status is 1 when something is wrong. --repair rebuilds a damaged index from the rows\n"
            "that verify (the old file is kept), and removes records that do not. Needs no model; no\n"
            "other process may have the home open.",
            ("kvweave fsck", "kvweave fsck --repair --json"),
            remote=False,
        ),
        Command(
            "sweep",
            f"{UPKEEP}:sweep",
            "Remove from a shared tier what no index names any more.",
            arguments.sweep,
            "Give every index that uses the tier: homes, or postgresql:// addresses. Those that are\n"
            "registered there and not given are told, and nothing is removed. Engines may go on meanwhile.",
            (
                "kvweave sweep 'redis url=redis://127.0.0.1:6379' --index ~/.kvweave --dry-run",
                "kvweave sweep 's3 url=s3://bucket' --index homes/a --index homes/b --grace 1d",
            ),
            remote=False,
        ),
        Command(
            "simulate",
            "kvweave.cli.simulate:simulate",
            "Replay a trace against tiers and policies, or serve it under a load.",
            simulate_arguments,
            "Needs no model. Without a load the requests are replayed one after the other and nobody waits:\n"
            "hits, bytes moved, and times that follow from costs. With --load they come to nodes with a queue,\n"
            "a device, decode slots and tiers of their own, and there are waits, percentiles, an SLO and a\n"
            "bill; with --slo alone, the largest load that keeps it. With --sizes, a star marks what nothing\n"
            "else beats in price, time and (without a load) requests a second together.",
            (
                "kvweave simulate trace.jsonl --policy lru,declared,belady --tiers ram:10%,disk:50%",
                "kvweave simulate generated --pauses lognormal --regret 0.1 --policy all",
                "kvweave simulate trace.jsonl --tiers ram:1%,disk:1% --sizes 1%,3%,10% --plot front.png",
                "kvweave simulate generated --load 2 --arrivals bursty --nodes 4 --router all --slo 2",
                "kvweave simulate generated --slo 2 --tiers ram:5%,disk:20%::0.1:3600 --json",
            ),
            remote=False,
        ),
        Command(
            "demo",
            f"{TEXT}:demo",
            "Hold a long conversation, pruned, and measure it.",
            arguments.demo,
            remote=False,
        ),
    )
}
