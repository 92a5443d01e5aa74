"""The arguments of ``kvweave route``. No logic."""

from __future__ import annotations

from argparse import ArgumentParser

from kvweave.cli.simulate_arguments import prefill_costs
from kvweave.cli.values import above_0, number, positive, seconds, share, size, whole

POLICIES = ("chunks", "prefix", "hash", "random")


def route(p: ArgumentParser) -> None:
    """Add what `kvweave route` takes."""
    add = p.add_argument
    add(
        "--worker",
        action="append",
        default=[],
        metavar="URL",
        help="a kvweave or vLLM server, http://HOST:PORT; once for each",
    )
    add("--host", default="127.0.0.1", metavar="ADDRESS", help="to listen at (127.0.0.1)")
    add("--port", type=whole(0, 65535), default=8800, metavar="N", help="0 takes a free one (8800)")
    add(
        "--policy",
        choices=POLICIES,
        default="chunks",
        help="who gets a request: least seconds to the first token, by all the text and chunks a worker has; "
        "longest prefix; rendezvous hashing with bounded loads; anybody (chunks)",
    )
    add(
        "--key-file",
        metavar="FILE",
        help="a file with the key of the router's own /metrics and /v1/workers; what workers ask for is "
        "theirs, and goes through as it is",
    )
    add(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a name to answer under besides --host and local ones; may be given several times",
    )
    add("--bound", type=number(1), metavar="X", help="times the mean load a worker may have (1.25)")
    add(
        "--slots",
        type=positive,
        metavar="N",
        help="requests a worker may have whatever the mean is, since it answers them together (8)",
    )
    add("--probe", type=above_0, metavar="SECONDS", help="between two looks at a worker (2)")
    add("--failures", type=positive, metavar="N", help="looks in a row until it is down (2)")
    add("--timeout", type=above_0, metavar="SECONDS", help="without a byte of an answer (600)")
    add("--max-body", type=size, metavar="SIZE", help="of a request (8MiB)")
    add(
        "--grace", type=seconds, default=10.0, metavar="SECONDS", help="for answers at the end (10)"
    )
    add("--access-log", action="store_true", help="a line on stderr about each request")
    costs = p.add_argument_group("costs of the workers, for the policy chunks").add_argument
    prefill_costs(costs)
    costs(
        "--repair", type=share, metavar="SHARE", help="of the prefill saved, spent on repair (0.1)"
    )
    costs("--calibrate", metavar="FILE", help="fit prefill to an engine's log, as `simulate` does")
