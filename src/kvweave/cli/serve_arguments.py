"""The arguments of the commands that run or look after a server and homes. No logic."""

from __future__ import annotations

from argparse import ArgumentParser

from kvweave.cli.arguments import repair
from kvweave.cli.values import age, from_0, given, positive, seconds, share, size, whole
from kvweave.keep import POLICIES

AUDIT = 0.01
REUSE = ("all", "prefix", "off")


def fsck(p: ArgumentParser) -> None:
    """Add what `kvweave fsck` takes."""
    add = p.add_argument
    add("directory", type=given, metavar="HOME", nargs="?", help="the home; as --home")
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
    p.add_argument(
        "--take-over",
        action="store_true",
        help="with --repair: make this home's what --tier has of the home that it is a copy of",
    )


def sweep(p: ArgumentParser) -> None:
    """Add what `kvweave sweep` takes."""
    add = p.add_argument
    add("tier", metavar="TIER", help="the tier, as serve --tier takes it")
    for name, metavar, help in (
        ("--index", "HOME", "a home, or a postgresql:// address; again for each"),
        ("--retire", "UUID", "an index that is no more, or how its uuid begins: forget it"),
    ):
        add(name, type=given, action="append", default=[], metavar=metavar, help=help)
    p.add_argument(
        "--grace",
        type=age,
        default=0.0,
        metavar="AGE",
        help="remove only what an earlier sweep marked so long ago (90s, 15m, 2h, 7d)",
    )
    p.add_argument("--dry-run", action="store_true", help="say what would go")


def serve(p: ArgumentParser) -> None:
    """Add what `kvweave serve` takes."""
    add = p.add_argument
    where = "checkpoint directory or hub id; as --model"
    add("checkpoint", type=given, metavar="MODEL", nargs="?", help=where)
    add(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="the address to listen at (127.0.0.1)",
    )
    add("--port", type=whole(0, 65535), default=8700, metavar="N", help="0 takes a free one (8700)")
    add("--name", metavar="NAME", help="what /v1/models calls it (the end of MODEL)")
    add("--budget", type=size, metavar="SIZE", help="memory for KV (2GiB)")
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
        type=given,
        metavar="ADDRESS",
        help="postgresql://... of an index that several servers share, instead of the home's own",
    )
    repair(p)
    add(
        "--audit",
        type=share,
        default=AUDIT,
        metavar="X",
        help="part of the time, 0..1, in which answers are held against a full prefill while nothing "
        f"else is there to do; a few of what is new are beside it; 0 is never ({AUDIT})",
    )
    add(
        "--refine",
        choices=("all", "chats", "never"),
        default="chats",
        help="contexts whose approximate rows are made exact while nothing else is there to do: those of "
        "chats, so that a chat's next request repairs less; all, also those that clients open by name (chats)",
    )
    _access(p)
    _agents(p)
    _limits(p)
    add(
        "--min-match",
        type=positive,
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
    add(
        "--cors-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="pages of this origin (https://app.example) may read and change what they reach here; "
        "may be given several times (none)",
    )


def _agents(p: ArgumentParser) -> None:
    add = p.add_argument_group("what programs expect").add_argument
    add(
        "--alias", action="append", default=[], metavar="NAME",
        help="another name of the model; may be given several times",
    )  # fmt: skip
    add("--any-model", action="store_true", help="answer whatever model a request names")
    add(
        "--keep-unstored", action="store_true",
        help='keep the KV of requests with "store": false, for agents that always say so; by '
        "default nothing of them is left",
    )  # fmt: skip
    add(
        "--no-learn-edits", action="store_true",
        help="do not make edits ahead that a client makes to its history again and again",
    )  # fmt: skip
    add(
        "--tool-parser", metavar="FAMILY",
        help="how the model writes calls of tools, as docs/http.md lists them (by its chat "
        "template); none reads none",
    )  # fmt: skip


def _limits(p: ArgumentParser) -> None:
    add = p.add_argument_group("limits").add_argument
    add("--max-waiting", type=positive, metavar="N", help="answers that may wait, a key (1024)")
    add("--max-active", type=positive, metavar="N", help="answers that run together (16)")
    add("--max-body", type=size, metavar="SIZE", help="of a request (8MiB)")
    add("--max-prompt", type=positive, metavar="N", help="tokens (the model's limit)")
    add("--max-sessions", type=from_0, metavar="N", help="idle conversations kept (32)")
    add("--quota", type=size, metavar="SIZE", help="KV a namespace may store, and hold in contexts")
    add("--quota-chunks", type=positive, metavar="N", help="chunks a namespace may store")
    add("--max-contexts", type=positive, metavar="N", help="open in a namespace (256)")
    add("--max-parts", type=positive, metavar="N", help="of one context or prompt (2048)")
    add("--retain", type=age, metavar="AGE", help="unused text of conversations (7d)")
    add(
        "--grace", type=seconds, default=10.0, metavar="SECONDS", help="for answers at the end (10)"
    )
