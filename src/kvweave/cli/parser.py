"""The words of the command line: every command, its arguments and its help. No logic.

Options may stand anywhere, before the command or between its arguments. docs/cli.md is generated
from here.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import kvweave
from kvweave.chunk.files import GROUPS, SORT_KEYS
from kvweave.chunk.identity import KINDS
from kvweave.errors import nearest

PATTERN = "a name, '#17', a glob such as 'chat/*/u-00[1-3]' or '**', or 'docs/' for all below"
TEMPLATE = "text; {docs/faq} or {#17} is a stored chunk, {hole} is filled by --set or --docs; - reads stdin"
STRATEGIES = ("none", "first_k", "deviation", "query", "random", "full")
PLACES = ("ram", "disk", "none")
CUTS = ("none", "paragraph", "tokens")


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
    parser = command_parser(COMMANDS[name])
    args = parser.parse_intermixed_args([*words[:at], *words[at + 1 :]])
    args.command = name
    return args


def _command_at(words: Sequence[str]) -> int | None:
    """Return the index of the first word that is no common option."""
    at = 0
    while at < len(words):
        if words[at] in ("--home", "--model"):
            at += 1
        elif not words[at].startswith("-"):
            return at
        at += 1
    return None


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 up")
    return int(text)


def _share(text: str) -> float:
    try:
        if 0 <= float(text) <= 1:
            return float(text)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 1")


def _age(text: str) -> float:
    """Return seconds of ``90s``, ``15m``, ``2h``, ``7d``."""
    seconds = {"s": 1, "m": 60, "h": 3600, "d": 86400}
    number, unit = text[:-1], text[-1:]
    if unit not in seconds or not number.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no age: write 90s, 15m, 2h or 7d")
    return float(int(number) * seconds[unit])


def _put(p: Parser) -> None:
    p.add_argument(
        "name", metavar="NAME", help="such as docs/faq; docs/ takes each file's own name"
    )
    p.add_argument("files", metavar="FILE", nargs="*", help="UTF-8 text; - or none reads stdin")
    p.add_argument("--kind", choices=KINDS, default="document", help="what it is (document)")
    p.add_argument("--replace", action="store_true", help="take the name from what has it now")
    p.add_argument(
        "--cut", choices=CUTS, default="none", help="store pieces NAME/000, NAME/001, ..."
    )
    p.add_argument("--max-tokens", type=_positive, metavar="N", help="longest piece (256)")


def _ls(p: Parser) -> None:
    p.add_argument("pattern", metavar="PATTERN", nargs="?", default="", help=PATTERN)
    p.add_argument("-l", "--long", action="store_true", help="id, kind, tokens, bytes, tier, ...")
    p.add_argument("--sort", choices=SORT_KEYS, default="name", help="the field to sort by (name)")
    p.add_argument("-r", "--reverse", action="store_true", help="largest or latest first")
    p.add_argument("--limit", type=_positive, metavar="N", help="list only so many")


def _stat(p: Parser) -> None:
    p.add_argument("ref", metavar="REF", help="a name or '#17'")


def _rm(p: Parser) -> None:
    p.add_argument("pattern", metavar="PATTERN", help=PATTERN)
    p.add_argument("-n", "--dry-run", action="store_true", help="only say what would go")
    p.add_argument("--force", action="store_true", help="also what a context still uses")


def _rename(p: Parser) -> None:
    p.add_argument("src", metavar="SRC", help=PATTERN)
    p.add_argument("dst", metavar="DST", help="the new name; docs/ to take several into docs/")
    p.add_argument("--replace", action="store_true", help="take names from what has them now")
    p.add_argument("-n", "--dry-run", action="store_true", help="only say what would happen")


def _one_pattern(p: Parser) -> None:
    p.add_argument("pattern", metavar="PATTERN", help=PATTERN)
    p.add_argument("-n", "--dry-run", action="store_true", help="only say which")


def _place(p: Parser) -> None:
    p.add_argument("pattern", metavar="PATTERN", help=PATTERN)
    p.add_argument("tier", metavar="TIER", choices=PLACES, help=f"one of {', '.join(PLACES)}")
    p.add_argument("-n", "--dry-run", action="store_true", help="only say which")


def _du(p: Parser) -> None:
    p.add_argument("pattern", metavar="PATTERN", nargs="?", default="", help=PATTERN)
    p.add_argument("--by", choices=GROUPS, default="tier", help="what to add up by (tier)")


def _find(p: Parser) -> None:
    p.add_argument("pattern", metavar="PATTERN", nargs="?", default="**", help=PATTERN)
    p.add_argument("-l", "--long", action="store_true", help="id, kind, tokens, bytes, tier, ...")
    p.add_argument("--kind", choices=KINDS, help="only of this kind")
    p.add_argument("--tier", choices=PLACES, help="only what rests there")
    p.add_argument("--pinned", action=argparse.BooleanOptionalAction, help="only (un)pinned ones")
    p.add_argument("--min-tokens", type=_positive, metavar="N", help="only from this length on")
    p.add_argument("--unused-for", type=_age, metavar="AGE", help="not used for 90s, 15m, 2h, 7d")


def _weave(p: Parser) -> None:
    p.add_argument("template", metavar="TEMPLATE", help=TEMPLATE)
    p.add_argument(
        "--set", action="append", default=[], metavar="HOLE=TEXT", help="fill a hole with text"
    )
    p.add_argument(
        "--docs",
        action="append",
        default=[],
        metavar="HOLE=NAME,NAME",
        help="fill a hole with stored chunks; globs are welcome",
    )
    p.add_argument("--repair", choices=STRATEGIES, help="which reused rows to recompute (query)")
    p.add_argument(
        "--share", type=_share, metavar="X", help="part of them to recompute, 0..1 (0.05)"
    )


def _sampling(p: Parser) -> None:
    p.add_argument(
        "--max-tokens", type=_positive, default=256, metavar="N", help="of an answer (256)"
    )
    p.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="0 takes the likeliest token (0)",
    )
    p.add_argument("--top-p", type=float, default=1.0, metavar="P", help="draw from this mass (1)")
    p.add_argument("--top-k", type=int, default=0, metavar="K", help="draw from the K likeliest")
    p.add_argument("--seed", type=int, metavar="N", help="of the draws")


def _run(p: Parser) -> None:
    _weave(p)
    _sampling(p)
    p.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text"
    )
    p.add_argument("--explain", action="store_true", help="print the plan on stderr")
    p.add_argument("--check", action="store_true", help="compare with a full prefill, on stderr")


def _chat(p: Parser) -> None:
    p.add_argument("--system", metavar="TEXT", help="the first message, never dropped")
    p.add_argument(
        "--limit", type=_positive, metavar="TOKENS", help="drop the oldest turns over this"
    )
    p.add_argument(
        "--keep", action="store_true", help="keep the turns' chunks in the home at the end"
    )
    p.add_argument("--repair", choices=STRATEGIES, help="which reused rows to recompute (query)")
    p.add_argument(
        "--share", type=_share, metavar="X", help="part of them to recompute, 0..1 (0.05)"
    )
    _sampling(p)


def _demo(p: Parser) -> None:
    p.add_argument("--turns", type=_positive, default=100, metavar="N", help="to measure (100)")
    p.add_argument("--out", default="demo-out", metavar="DIR", help="for results (demo-out)")
    p.add_argument("--quick", action="store_true", help="a few turns of a short conversation")
    p.add_argument("--repair", choices=STRATEGIES, help="which reused rows to recompute")


def _nothing(p: Parser) -> None:
    pass


FILES, TEXT = "kvweave.cli.files", "kvweave.cli.text"
COMMANDS = {
    command.name: command
    for command in (
        Command(
            "put",
            "kvweave.cli.put:put",
            "Store text as a chunk with its KV.",
            _put,
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
            _ls,
            examples=("kvweave ls -l docs/", "kvweave ls --sort n_bytes --reverse --limit 10"),
        ),
        Command("stat", f"{FILES}:stat", "Tell all about one chunk.", _stat),
        Command(
            "rm",
            f"{FILES}:rm",
            "Remove names; a chunk without names is freed.",
            _rm,
            examples=("kvweave rm 'chat/42/*-00[1-3]' --dry-run",),
        ),
        Command(
            "mv",
            f"{FILES}:mv",
            "Rename; the KV stays where it is.",
            _rename,
            examples=("kvweave mv docs/ archive/",),
        ),
        Command("cp", f"{FILES}:cp", "Give chunks another name; no KV is copied.", _rename),
        Command("pin", f"{FILES}:pin", "Keep chunks from being removed or evicted.", _one_pattern),
        Command("unpin", f"{FILES}:unpin", "Take back pin; nothing is freed by it.", _one_pattern),
        Command(
            "place",
            f"{TEXT}:place",
            "Move KV to a tier.",
            _place,
            "none keeps only the tokens: the KV is computed again when it is needed. ram lasts as\n"
            "long as the process, so from a shell it ends on disk.",
            ("kvweave place 'docs/**' none",),
        ),
        Command("du", f"{FILES}:du", "Add up tokens and bytes.", _du),
        Command(
            "find",
            f"{FILES}:find",
            "List names by what stands behind them.",
            _find,
            examples=("kvweave find 'chat/**' --unused-for 7d --min-tokens 500",),
        ),
        Command(
            "run",
            f"{TEXT}:run",
            "Weave a context from text and chunks, and continue it.",
            _run,
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
            _chat,
            "Lines from stdin are messages; /help lists the commands. --json prints one object a\n"
            "line and answer.",
            ("kvweave chat --system 'You are brief.' --limit 2000",),
        ),
        Command(
            "check",
            f"{TEXT}:check",
            "Weave a context and compare it with a full prefill.",
            _weave,
            examples=("kvweave check 'Use {docs/faq}. Q: how do I reset?' --share 0.2",),
        ),
        Command("can", f"{TEXT}:can", "Tell what the model can do, and why not.", _nothing),
        Command("demo", f"{TEXT}:demo", "Hold a long conversation, pruned, and measure it.", _demo),
    )
}
