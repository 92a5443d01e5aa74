"""``kvweave route``: several servers behind one endpoint, until a signal ends it."""

from __future__ import annotations

import sys
from argparse import Namespace
from dataclasses import replace
from typing import TYPE_CHECKING

from kvweave.cli.serve import access_log, listening_at, needing_server
from kvweave.cli.show import Out
from kvweave.cli.target import key_of

if TYPE_CHECKING:
    from kvweave.route.options import RouteOptions
    from kvweave.simulate.cost import Cost

SETTINGS = ("bound", "slots", "probe", "failures", "timeout", "max_body")
OPEN = (
    "note: without --key-file every user of this machine can see and drain the workers; their own keys "
    "are asked for as ever"
)


def route(args: Namespace) -> int:
    """Route until SIGINT or SIGTERM; then 0."""
    with needing_server():
        from kvweave.route.app import create_router
        from kvweave.serve.listening import Listener, url_of
    out = Out.of(args)
    options = options_of(args)
    access_log(shown=args.access_log)
    with listening_at(options.host, options.port) as sock:
        url = url_of(sock)

        def ready() -> None:
            if options.key is None and not out.quiet:
                print(OPEN, file=sys.stderr, flush=True)
            if out.as_json:
                out.data(
                    {
                        "url": url, "host": options.host, "port": sock.getsockname()[1],
                        "policy": options.policy, "workers": list(options.workers),
                    }
                )  # fmt: skip
            else:
                n = len(options.workers)
                print(f"kvweave routes to {n} worker{'s' * (n != 1)} at {url}", flush=True)

        app = create_router(options)
        Listener(app, ready, args.grace, app.state.router.stop).run([sock])
    return 0


def options_of(args: Namespace) -> RouteOptions:
    """Return the router's options. Raises InvalidArgument, UsageError, StoreError."""
    from kvweave.route.options import RouteOptions

    given = {name: getattr(args, name) for name in SETTINGS if getattr(args, name) is not None}
    args.key = None
    return RouteOptions(
        tuple(args.worker), args.host, args.port, args.policy, key_of(args), tuple(args.allowed_host),
        cost=cost_of(args), **given,
    )  # fmt: skip


def cost_of(args: Namespace) -> Cost:
    """Return what computing costs on the workers: typical, then as fitted, then as said."""
    from kvweave.simulate.calibrate import fit, read_log
    from kvweave.simulate.cost import Cost

    cost = fit(read_log(args.calibrate)).cost() if args.calibrate else Cost()
    said = {
        "seconds": 1 / args.prefill_rate if args.prefill_rate else None,
        "doubles_at": args.doubles_at,
        "token_bytes": args.token_bytes,
        "repair": args.repair,
    }
    return replace(cost, **{name: value for name, value in said.items() if value is not None})
