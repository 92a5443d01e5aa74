"""The arguments of every command: names, values and their help. No logic."""

from __future__ import annotations

from argparse import ArgumentParser, BooleanOptionalAction

from kvweave.chunk.files import GROUPS, SORT_KEYS
from kvweave.chunk.identity import KINDS
from kvweave.cli.values import (
    CHOICE,
    age,
    fields,
    from_0,
    given,
    nats,
    number,
    positive,
    recipe,
    share,
    shares,
    strategy,
    whole,
    words,
)

PATTERN = "a name, '#17', a glob such as 'chat/*/u-00[1-3]' or '**', or 'docs/' for all below"
TEMPLATE = "text; {docs/faq} or {#17} is a stored chunk, {hole} is filled by --set or --docs; - reads stdin"
PLACES = ("ram", "disk", "remote", "none")
SHELLS = ("bash", "zsh", "fish")
CUTS = ("none", "paragraph", "tokens")


def put(p: ArgumentParser) -> None:
    """Add what `kvweave put` takes."""
    p.add_argument(
        "name",
        metavar="NAME",
        help="such as docs/faq; with docs/ each file is stored as docs/ and its own name without "
        "the suffix",
    )
    p.add_argument(
        "files",
        metavar="FILE",
        nargs="*",
        help="UTF-8 text; several need a NAME that ends in /; - or none reads stdin",
    )
    p.add_argument(
        "--kind",
        choices=KINDS,
        default="document",
        help="what the text is: tells which chunks leave memory first, and is found by `find --kind` (document)",
    )
    p.add_argument("--replace", action="store_true", help="take the name from what has it now")
    p.add_argument(
        "--cut",
        choices=CUTS,
        default="none",
        help="store pieces NAME/000, NAME/001, ... of whole paragraphs, or of so many tokens (none)",
    )
    p.add_argument("--piece-tokens", type=positive, metavar="N", help="longest piece (256)")


def ls(p: ArgumentParser) -> None:
    """Add what `kvweave ls` takes."""
    p.add_argument("pattern", metavar="PATTERN", nargs="?", default="", help=PATTERN)
    p.add_argument("-l", "--long", action="store_true", help="id, kind, tokens, bytes, tier, ...")
    p.add_argument("--sort", choices=SORT_KEYS, default="name", help="the field to sort by (name)")
    p.add_argument("-r", "--reverse", action="store_true", help="largest or latest first")
    p.add_argument("--limit", type=positive, metavar="N", help="list only so many")


def stat(p: ArgumentParser) -> None:
    """Add what `kvweave stat` takes."""
    p.add_argument("ref", metavar="REF", help="a name or '#17'")


def rm(p: ArgumentParser) -> None:
    """Add what `kvweave rm` takes."""
    p.add_argument("pattern", type=given, metavar="PATTERN", help=PATTERN)
    p.add_argument("-n", "--dry-run", action="store_true", help="only say what would go")
    p.add_argument("--force", action="store_true", help="also what a context still uses")


def rename(p: ArgumentParser) -> None:
    """Add what `kvweave mv` and `cp` take."""
    p.add_argument("src", type=given, metavar="SRC", help=PATTERN)
    p.add_argument("dst", metavar="DST", help="the new name; docs/ to take several into docs/")
    p.add_argument("--replace", action="store_true", help="take names from what has them now")
    p.add_argument("-n", "--dry-run", action="store_true", help="only say what would happen")


def one_pattern(p: ArgumentParser) -> None:
    """Add what `kvweave pin` and `unpin` take."""
    p.add_argument("pattern", type=given, metavar="PATTERN", help=PATTERN)
    p.add_argument("-n", "--dry-run", action="store_true", help="only say which")


def place(p: ArgumentParser) -> None:
    """Add what `kvweave place` takes."""
    p.add_argument("pattern", type=given, metavar="PATTERN", help=PATTERN)
    p.add_argument("tier", metavar="TIER", choices=PLACES, help=f"one of {', '.join(PLACES)}")
    p.add_argument("--codec", metavar="CODEC", help="how to code it there: int8, int4+zstd, ...")
    p.add_argument("-n", "--dry-run", action="store_true", help="only say which")


def compress(p: ArgumentParser) -> None:
    """Add what `kvweave compress` takes."""
    p.add_argument("ref", metavar="NAME", help="a chunk by name or #id")
    p.add_argument(
        "keep", metavar="POLICY:BUDGET", help="what stays of it: kvzip:0.3, h2o:256; full: all"
    )
    p.add_argument("--to", metavar="NAME", help="name of what stays (its own)")
    p.add_argument("-n", "--dry-run", action="store_true", help="only say what would happen")


def du(p: ArgumentParser) -> None:
    """Add what `kvweave du` takes."""
    p.add_argument("pattern", metavar="PATTERN", nargs="?", default="", help=PATTERN)
    p.add_argument("--by", choices=GROUPS, default="tier", help="what to add up by (tier)")


def find(p: ArgumentParser) -> None:
    """Add what `kvweave find` takes."""
    p.add_argument("pattern", metavar="PATTERN", nargs="?", default="**", help=PATTERN)
    p.add_argument("-l", "--long", action="store_true", help="id, kind, tokens, bytes, tier, ...")
    p.add_argument("--kind", choices=KINDS, help="only of this kind")
    p.add_argument("--tier", choices=PLACES, help="only what rests there")
    p.add_argument("--pinned", action=BooleanOptionalAction, help="only (un)pinned ones")
    p.add_argument("--min-tokens", type=positive, metavar="N", help="only from this length on")
    p.add_argument("--unused-for", type=age, metavar="AGE", help="not used for 90s, 15m, 2h, 7d")


def weave(p: ArgumentParser) -> None:
    """Add what `kvweave weave` takes."""
    p.add_argument("template", metavar="TEMPLATE", help=TEMPLATE)
    _holes(p)


def check(p: ArgumentParser) -> None:
    """Add what `kvweave check` takes."""
    p.add_argument("template", metavar="TEMPLATE", nargs="?", help=TEMPLATE)
    _holes(p)
    for_suite = p.add_argument_group("the fidelity suite")
    add = for_suite.add_argument
    add("--suite", action="store_true", help="measure the model on the suite instead")
    add("--protocols", type=words, metavar="P1,P2", help="P1 to P9 and prose (all)")
    add("--n", type=positive, default=100, metavar="N", help="questions a protocol, about (100)")
    add(
        "--strategies",
        type=words,
        metavar="NAME,NAME",
        default=["none", "random", "first_k", "query"],
        help="such as deviation:k@2 (none,random,first_k,query)",
    )
    add(
        "--shares",
        type=shares,
        default=[0.05, 0.15],
        metavar="X,X",
        help="parts of the reused rows to repair, 0..1 (0.05,0.15)",
    )
    add(
        "--calibrate",
        nargs="?",
        const="",
        metavar="FILE",
        help="also run auto at 0.05, 0.15 and 0.3, and write what bounds of the drift it gives "
        "(calibration.json of the home, if one is given, else of the checkpoint)",
    )
    add(
        "--auto",
        type=recipe,
        metavar="2@0@2",
        help="how auto chooses rows, and is to with what --calibrate writes: tokens drafted, thirds of the "
        "budget for first rows, rounds (as the model's calibration has it, or 2@1@2)",
    )


def calibrate(p: ArgumentParser) -> None:
    """Add what `kvweave calibrate` takes."""
    add = p.add_argument
    add(
        "--text", nargs="+", default=[], metavar="FILE", help="documents like those that are reused"
    )
    add(
        "--prompts",
        metavar="FILE",
        help='logged conversations, a line each: {"messages": [{"role": ..., "content": ...}]}',
    )
    add("--n", type=positive, default=200, metavar="N", help="cases, about (200)")
    add(
        "--only",
        choices=("rows", "bounds"),
        help="rows: choose how auto chooses rows, and tell no bounds, which cost an answer time; "
        "bounds: of auto as it is (both)",
    )
    add(
        "--out",
        metavar="FILE",
        help="where to write it (calibration.json of the home, if one is given, else of the checkpoint)",
    )
    add(
        "--vllm",
        nargs="?",
        const={},
        type=fields,
        metavar="JSON",
        help="of the model inside vLLM, which has weights of its own; JSON: the server's arguments that "
        'make it another, as in {"dtype": "bfloat16"}',
    )


def _holes(p: ArgumentParser) -> None:
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
    repair(p)


def repair(p: ArgumentParser) -> None:
    """Add how reused rows are repaired."""
    p.add_argument(
        "--repair",
        type=strategy,
        metavar="STRATEGY",
        help=f"which reused rows to recompute (auto): {CHOICE}",
    )
    p.add_argument(
        "--share", type=share, metavar="X", help="part of them to recompute, 0..1 (0.05)"
    )
    p.add_argument(
        "--max-drift",
        type=nats,
        metavar="NATS",
        help="recompute more while the predicted bound of the KL to a full prefill is over this; "
        "takes auto and a calibrated model (no bound)",
    )
    p.add_argument(
        "--keep",
        metavar="POLICY:BUDGET",
        help="which rows of the context stay in memory: snapkv:0.3, streaming:1024, ... (all)",
    )
    p.add_argument(
        "--bases",
        choices=["any", "own"],
        help="place KV of chunks computed after another system message, approximately (any), or "
        "compute those anew",
    )


def sampling(p: ArgumentParser) -> None:
    """Add how an answer is drawn, and how long it may get."""
    p.add_argument(
        "--max-tokens",
        type=positive,
        metavar="N",
        help="longest answer (256; 32 with the bundled model, which knows few words)",
    )
    p.add_argument(
        "--temperature",
        type=number(0),
        default=0.0,
        metavar="T",
        help="0 takes the likeliest token (0)",
    )
    p.add_argument(
        "--top-p",
        type=number(0, 1, beyond=True),
        default=1.0,
        metavar="P",
        help="draw from this mass (1)",
    )
    p.add_argument("--top-k", type=from_0, default=0, metavar="K", help="draw from the K likeliest")
    p.add_argument("--seed", type=whole(0, 2**63 - 1), metavar="N", help="of the draws")


def run(p: ArgumentParser) -> None:
    """Add what `kvweave run` takes."""
    weave(p)
    sampling(p)
    p.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text"
    )
    p.add_argument("--explain", action="store_true", help="print the plan on stderr")
    p.add_argument("--check", action="store_true", help="compare with a full prefill, on stderr")


def chat(p: ArgumentParser) -> None:
    """Add what `kvweave chat` takes."""
    p.add_argument("--system", metavar="TEXT", help="the first message, never dropped")
    p.add_argument(
        "--context",
        metavar="NAME",
        help="go on with this context of the server, or open it, and leave it there",
    )
    p.add_argument(
        "--limit", type=positive, metavar="TOKENS", help="drop the oldest turns over this"
    )
    p.add_argument(
        "--keep-turns", action="store_true", help="keep the turns' chunks in the home at the end"
    )
    repair(p)
    sampling(p)


def demo(p: ArgumentParser) -> None:
    """Add what `kvweave demo` takes."""
    p.add_argument("--turns", type=positive, default=60, metavar="N", help="to measure (60)")
    p.add_argument("--out", default="demo-out", metavar="DIR", help="for results (demo-out)")
    p.add_argument("--quick", action="store_true", help="a few turns of a short conversation")
    p.add_argument(
        "--repair",
        type=strategy,
        metavar="STRATEGY",
        help=f"which reused rows to recompute: {CHOICE}",
    )


def completion(p: ArgumentParser) -> None:
    """Add what `kvweave completion` takes."""
    p.add_argument("shell", metavar="SHELL", choices=SHELLS, help=f"one of {', '.join(SHELLS)}")


def nothing(p: ArgumentParser) -> None:
    """Add nothing."""
