"""The arguments of ``kvweave simulate``. No logic; names are those of `kvweave.simulate`, which is not
imported for the help."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable

from kvweave.cli.values import from_0, positive, share, size, words
from kvweave.keep import POLICIES

ROUTERS = ("round_robin", "least_loaded", "rendezvous", "prefix", "chunk_sets")
COMING = ("trace", "poisson", "bursty", "closed")
PAUSES = ("exponential", "lognormal", "pareto")
GENERATED = "generated"


def _number(text: str) -> float:
    try:
        if 0 < float(text) < float("inf"):
            return float(text)
    except ValueError:
        pass
    raise ArgumentTypeError(f"{text!r} is not a number over 0")


def simulate(p: ArgumentParser) -> None:
    """Add what `kvweave simulate` takes."""
    p.add_argument(
        "trace",
        metavar="TRACE",
        help="JSONL file in Mooncake's or Bailian's format or ours; or the word generated",
    )
    p.add_argument(
        "--policy",
        type=words,
        default=["lru"],
        metavar="LIST",
        help=f"some of {', '.join(POLICIES)}, belady; or all (lru)",
    )
    p.add_argument(
        "--tiers",
        type=words,
        default=["ram:10%"],
        metavar="LIST",
        help="NAME:SIZE[:BANDWIDTH[:PRICE[:TTL[:EGRESS]]]] of a node, fastest first, NAME gpu, ram, disk or remote, "
        "SIZE as 2GiB or 10%% of all different blocks, BANDWIDTH in bytes a second, PRICE in $ per GB and month, "
        "TTL in seconds without a use, EGRESS in $ per GB read (ram:10%%)",
    )
    p.add_argument(
        "--hits",
        choices=("chunks", "prefix"),
        help="count any block that is held, or only those whose whole prefix is (chunks; prefix for a trace whose "
        "ids are chained by prefix, where nothing else can be counted)",
    )
    p.add_argument(
        "--sizes", type=words, metavar="LIST", help="try every tier at these sizes: 1%%,3%%,10%%"
    )
    p.add_argument("--plot", metavar="FILE", help="write a figure of what --sizes found")
    p.add_argument(
        "--look-ahead",
        type=positive,
        default=0,
        metavar="N",
        help="without a load: tell policies what the next N requests use, as from a queue (0)",
    )
    _load(p)
    _generated(p)
    _costs(p)


def _load(p: ArgumentParser) -> None:
    add = p.add_argument_group("load").add_argument
    add("--load", type=_number, metavar="N", help="requests a second, or users if closed")
    add(
        "--arrivals",
        choices=COMING,
        help="at the trace's times, sped up; sessions that begin as a Poisson process, or in bursts; or users who "
        "wait for answers (poisson)",
    )
    add(
        "--slo",
        type=_number,
        metavar="SECONDS",
        help="in which 99 %% of the requests are to have their first token",
    )
    add("--nodes", type=positive, default=1, metavar="N", help="each with tiers of its own (1)")
    add(
        "--router",
        type=words,
        default=["rendezvous"],
        metavar="LIST",
        help=f"some of {', '.join(ROUTERS)}; or all (rendezvous)",
    )
    add(
        "--slots",
        type=positive,
        default=64,
        metavar="N",
        help="requests that decode on a node (64)",
    )
    add("--node-price", type=_number, default=2.5, metavar="N", help="$ an hour (2.5)")


def _generated(p: ArgumentParser) -> None:
    add = p.add_argument_group("generated traces").add_argument
    add("--seed", type=from_0, default=0, metavar="N", help="of the trace and of arrivals (0)")
    add("--sessions", type=positive, default=400, metavar="N", help="conversations (400)")
    add("--pauses", choices=PAUSES, default="exponential", help="between turns (exponential)")
    add(
        "--regret",
        type=share,
        default=0.02,
        metavar="SHARE",
        help="of what is pruned before the last turn, asked for again (0.02)",
    )


def prefill_costs(add: Callable[..., object]) -> None:
    """Add what prefill and rows of a model take."""
    add("--prefill-rate", type=positive, metavar="N", help="tokens a second (8000)")
    add(
        "--doubles-at",
        type=positive,
        metavar="N",
        help="position where a token takes twice as long (32768)",
    )
    add("--token-bytes", type=size, metavar="SIZE", help="KV of a token (128KiB)")


def _costs(p: ArgumentParser) -> None:
    add = p.add_argument_group("costs").add_argument
    prefill_costs(add)
    add(
        "--repair",
        type=share,
        metavar="SHARE",
        help="of the prefill that placed chunks save, spent on repair (0.1)",
    )
    add(
        "--overlap",
        type=share,
        metavar="SHARE",
        help="of loads that computing hides, of what it could hide (0)",
    )
    add("--decode-rate", type=positive, metavar="N", help="tokens a second of an answer (50)")
    add(
        "--calibrate",
        metavar="FILE",
        help="fit prefill and bandwidths to an engine's log, a JSON object an answer",
    )
