"""The arguments of every command: names, values and their help. No logic."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, BooleanOptionalAction

from kvweave.chunk.files import GROUPS, SORT_KEYS
from kvweave.chunk.identity import KINDS
from kvweave.config import n_bytes
from kvweave.errors import InvalidArgument
from kvweave.keep import POLICIES

PATTERN = "a name, '#17', a glob such as 'chat/*/u-00[1-3]' or '**', or 'docs/' for all below"
TEMPLATE = "text; {docs/faq} or {#17} is a stored chunk, {hole} is filled by --set or --docs; - reads stdin"
STRATEGIES = (
    "auto", "none", "first_k", "boundary", "deviation", "query", "rollout", "deps", "patch", "random", "full",
)  # fmt: skip
CHOICE = f"{', '.join(STRATEGIES)}; options behind it, as in deviation:k@2"
PLACES = ("ram", "disk", "remote", "none")
REUSE = ("all", "prefix", "off")
CUTS = ("none", "paragraph", "tokens")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is not a whole number from 1 up")
    return int(text)


def _share(text: str) -> float:
    try:
        if 0 <= float(text) <= 1:
            return float(text)
    except ValueError:
        pass
    raise ArgumentTypeError(f"{text!r} is not a number from 0 to 1")


def _nats(text: str) -> float:
    try:
        if 0 <= float(text) < float("inf"):
            return float(text)
    except ValueError:
        pass
    raise ArgumentTypeError(f"{text!r} is not a number of nats from 0 up")


def _strategy(text: str) -> str:
    if text.split(":")[0] not in STRATEGIES:
        raise ArgumentTypeError(f"no strategy {text!r}: one of {', '.join(STRATEGIES)}")
    return text


def _list(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _shares(text: str) -> list[float]:
    return [_share(word) for word in _list(text)]


def _age(text: str) -> float:
    """Return seconds of ``90s``, ``15m``, ``2h``, ``7d``."""
    seconds = {"s": 1, "m": 60, "h": 3600, "d": 86400}
    number, unit = text[:-1], text[-1:]
    if unit not in seconds or not number.isdecimal():
        raise ArgumentTypeError(f"{text!r} is no age: write 90s, 15m, 2h or 7d")
    return float(int(number) * seconds[unit])


def _size(text: str) -> int:
    try:
        return n_bytes(int(text) if text.isdecimal() else text)
    except InvalidArgument as error:
        raise ArgumentTypeError(f"{text!r} is no size: write 2GiB or 500MB") from error


def fsck(p: ArgumentParser) -> None:
    """Add what `kvweave fsck` takes."""
    p.add_argument("directory", metavar="HOME", nargs="?", help="the home; as --home")
    p.add_argument("--repair", action="store_true", help="keep what verifies, remove the rest")
    p.add_argument(
        "--tier",
        action="append",
        metavar="SPEC",
        help="a tier outside the home, as serve --tier takes it; once for each (default: as served)",
    )
    p.add_argument(
        "--discard-strays",
        action="store_true",
        help="with --repair: remove KV of chunks that the index does not know, or has lost",
    )


def sweep(p: ArgumentParser) -> None:
    """Add what `kvweave sweep` takes."""
    p.add_argument("tier", help="the tier, as serve --tier takes it")
    for name, metavar, help in (
        ("--index", "HOME", "a home, or a postgresql:// address; again for each"),
        ("--retire", "UUID", "an index that is no more: forget that it was registered"),
    ):
        p.add_argument(name, action="append", default=[], metavar=metavar, help=help)
    p.add_argument(
        "--grace",
        type=_age,
        default=0.0,
        metavar="AGE",
        help="remove only what an earlier sweep marked so long ago (90s, 15m, 2h, 7d)",
    )
    p.add_argument("--dry-run", action="store_true", help="say what would go")


def put(p: ArgumentParser) -> None:
    """Add what `kvweave put` takes."""
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


def ls(p: ArgumentParser) -> None:
    """Add what `kvweave ls` takes."""
    p.add_argument("pattern", metavar="PATTERN", nargs="?", default="", help=PATTERN)
    p.add_argument("-l", "--long", action="store_true", help="id, kind, tokens, bytes, tier, ...")
    p.add_argument("--sort", choices=SORT_KEYS, default="name", help="the field to sort by (name)")
    p.add_argument("-r", "--reverse", action="store_true", help="largest or latest first")
    p.add_argument("--limit", type=_positive, metavar="N", help="list only so many")


def stat(p: ArgumentParser) -> None:
    """Add what `kvweave stat` takes."""
    p.add_argument("ref", metavar="REF", help="a name or '#17'")


def rm(p: ArgumentParser) -> None:
    """Add what `kvweave rm` takes."""
    p.add_argument("pattern", metavar="PATTERN", help=PATTERN)
    p.add_argument("-n", "--dry-run", action="store_true", help="only say what would go")
    p.add_argument("--force", action="store_true", help="also what a context still uses")


def rename(p: ArgumentParser) -> None:
    """Add what `kvweave mv` and `cp` take."""
    p.add_argument("src", metavar="SRC", help=PATTERN)
    p.add_argument("dst", metavar="DST", help="the new name; docs/ to take several into docs/")
    p.add_argument("--replace", action="store_true", help="take names from what has them now")
    p.add_argument("-n", "--dry-run", action="store_true", help="only say what would happen")


def one_pattern(p: ArgumentParser) -> None:
    """Add what `kvweave pin` and `unpin` take."""
    p.add_argument("pattern", metavar="PATTERN", help=PATTERN)
    p.add_argument("-n", "--dry-run", action="store_true", help="only say which")


def place(p: ArgumentParser) -> None:
    """Add what `kvweave place` takes."""
    p.add_argument("pattern", metavar="PATTERN", help=PATTERN)
    p.add_argument("tier", metavar="TIER", choices=PLACES, help=f"one of {', '.join(PLACES)}")
    p.add_argument("--codec", metavar="CODEC", help="how to code it there: int8, int4+zstd, ...")
    p.add_argument("-n", "--dry-run", action="store_true", help="only say which")


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
    p.add_argument("--min-tokens", type=_positive, metavar="N", help="only from this length on")
    p.add_argument("--unused-for", type=_age, metavar="AGE", help="not used for 90s, 15m, 2h, 7d")


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
    add("--protocols", type=_list, metavar="P1,P2", help="P1 to P9 and prose (all)")
    add("--n", type=_positive, default=100, metavar="N", help="questions a protocol, about (100)")
    add(
        "--strategies",
        type=_list,
        metavar="NAME,NAME",
        default=["none", "random", "first_k", "query"],
        help="such as deviation:k@2 (none,random,first_k,query)",
    )
    add(
        "--shares",
        type=_shares,
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
    _repair(p)


def _repair(p: ArgumentParser) -> None:
    p.add_argument(
        "--repair",
        type=_strategy,
        metavar="STRATEGY",
        help=f"which reused rows to recompute (auto): {CHOICE}",
    )
    p.add_argument(
        "--share", type=_share, metavar="X", help="part of them to recompute, 0..1 (0.05)"
    )
    p.add_argument(
        "--max-drift",
        type=_nats,
        metavar="NATS",
        help="recompute more while the predicted bound of the KL to a full prefill is over this; "
        "takes auto and a calibrated model (no bound)",
    )


def _sampling(p: ArgumentParser) -> None:
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


def run(p: ArgumentParser) -> None:
    """Add what `kvweave run` takes."""
    weave(p)
    _sampling(p)
    p.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text"
    )
    p.add_argument("--explain", action="store_true", help="print the plan on stderr")
    p.add_argument("--check", action="store_true", help="compare with a full prefill, on stderr")


def chat(p: ArgumentParser) -> None:
    """Add what `kvweave chat` takes."""
    p.add_argument("--system", metavar="TEXT", help="the first message, never dropped")
    p.add_argument(
        "--limit", type=_positive, metavar="TOKENS", help="drop the oldest turns over this"
    )
    p.add_argument(
        "--keep", action="store_true", help="keep the turns' chunks in the home at the end"
    )
    _repair(p)
    _sampling(p)


def demo(p: ArgumentParser) -> None:
    """Add what `kvweave demo` takes."""
    p.add_argument("--turns", type=_positive, default=100, metavar="N", help="to measure (100)")
    p.add_argument("--out", default="demo-out", metavar="DIR", help="for results (demo-out)")
    p.add_argument("--quick", action="store_true", help="a few turns of a short conversation")
    p.add_argument(
        "--repair",
        type=_strategy,
        metavar="STRATEGY",
        help=f"which reused rows to recompute: {CHOICE}",
    )


def serve(p: ArgumentParser) -> None:
    """Add what `kvweave serve` takes."""
    add = p.add_argument
    add("checkpoint", metavar="MODEL", nargs="?", help="checkpoint directory or hub id; as --model")
    add("--host", default="127.0.0.1", help="the address to listen at (127.0.0.1)")
    add("--port", type=int, default=8700, metavar="N", help="0 takes a free one (8700)")
    add("--name", metavar="NAME", help="what /v1/models calls it (the end of MODEL)")
    add("--budget", type=_size, metavar="SIZE", help="memory for KV (2GiB)")
    add("--policy", choices=POLICIES, help="which chunk leaves memory first (declared)")
    add(
        "--tier",
        action="append",
        metavar="SPEC",
        dest="tiers",
        help="below memory, fastest first; may be given several times: 'disk size=50GiB codec=int8', "
        "'redis url=redis://127.0.0.1:6379' (a disk in the home)",
    )
    add(
        "--index",
        metavar="ADDRESS",
        help="postgresql://... of an index that several servers share, instead of the home's own",
    )
    _repair(p)
    _access(p)
    _limits(p)
    add(
        "--min-match",
        type=_positive,
        metavar="N",
        help="shortest run that is found again, tokens (32)",
    )
    add("--reuse", choices=REUSE, help="what the OpenAI endpoints reuse (all)")
    add(
        "--access-log",
        action="store_true",
        help="a line on stderr about each request, without names and text (only those answered 401 or 403)",
    )


def _access(p: ArgumentParser) -> None:
    add = p.add_argument_group("who may ask").add_argument
    add(
        "--key",
        action="append",
        default=[],
        metavar="KEY[:NAMESPACE]",
        help="ask for a key; each namespace sees its own chunks only. All users of this machine see "
        "it in the list of processes: --keys and $KVWEAVE_KEYS they do not",
    )
    add(
        "--keys",
        metavar="FILE",
        help="keys, KEY[:NAMESPACE], one a line or comma, '#' begins a comment; also those in "
        "$KVWEAVE_KEYS are taken",
    )
    add(
        "--metrics-key",
        metavar="KEY",
        help="what /metrics asks for where there are keys (default: $KVWEAVE_METRICS_KEY, or nobody "
        "sees them)",
    )
    add(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a name to answer under besides --host and local ones; may be given several times "
        "(with keys: any name)",
    )


def _limits(p: ArgumentParser) -> None:
    add = p.add_argument_group("limits").add_argument
    add("--max-waiting", type=_positive, metavar="N", help="answers that may wait, a key (64)")
    add("--max-active", type=_positive, metavar="N", help="answers that run together (16)")
    add("--max-body", type=_size, metavar="SIZE", help="of a request (8MiB)")
    add("--max-prompt", type=_positive, metavar="N", help="tokens (the model's limit)")
    add("--max-sessions", type=int, metavar="N", help="idle conversations kept (32)")
    add(
        "--quota", type=_size, metavar="SIZE", help="KV a namespace may store, and hold in contexts"
    )
    add("--quota-chunks", type=_positive, metavar="N", help="chunks a namespace may store")
    add("--max-contexts", type=_positive, metavar="N", help="open in a namespace (256)")
    add("--retain", type=_age, metavar="AGE", help="unused text of conversations (7d)")
    add("--grace", type=float, default=10.0, metavar="SECONDS", help="for answers at the end (10)")


def nothing(p: ArgumentParser) -> None:
    """Add nothing."""
