"""``kvweave serve``: the engine behind HTTP, until a signal ends it."""

from __future__ import annotations

import errno
import gc
import logging
import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING

from kvweave.cli.home import BUNDLED, home_of, model_of, open_engine
from kvweave.cli.show import Out
from kvweave.cli.start import uncollected
from kvweave.errors import InvalidArgument, ServerError, of_system

if TYPE_CHECKING:
    from kvweave.serve.options import Options

KEYS = "KVWEAVE_KEYS"  # the environment's keys, as in a file of --keys
METRICS_KEY = "KVWEAVE_METRICS_KEY"
OPEN = (
    "warning: no key is asked for: every user and program of this machine can read, change and "
    "remove what is stored; give --keys FILE or $KVWEAVE_KEYS to close it"
)
LIMITS = (
    "max_waiting", "max_active", "max_body", "max_prompt", "max_sessions", "min_match", "quota",
    "quota_chunks", "max_contexts", "max_parts", "retain", "reuse",
)  # fmt: skip
ENGINE = (
    "budget",
    "policy",
    "tiers",
    "index",
    "repair",
    "share",
    "max_drift",
    "keep",
    "bases",
    "refine",
    "audit",
)


@contextmanager
def needing_server() -> Iterator[None]:
    """Say which extra is missing, where what is imported inside lacks what a server needs."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("kvweave"):
            raise
        hint = "pip install 'kvweave[serve]'"
        raise ServerError(f"{error.name} is not installed", hint=hint) from error


def serve(args: Namespace) -> int:
    """Serve until SIGINT or SIGTERM; then 0."""
    with needing_server(), uncollected():
        from kvweave.serve.app import create_app
        from kvweave.serve.listening import url_of
        from kvweave.serve.server import Server
    out = Out.of(args)
    args.model = args.checkpoint or args.model
    options = options_of(args)
    access_log(shown=args.access_log)
    settings = {name: getattr(args, name) for name in ENGINE if getattr(args, name) is not None}
    with listening_at(options.host, options.port) as sock:
        url = url_of(sock)

        def ready() -> None:
            if not options.keys:
                print(OPEN, file=sys.stderr, flush=True)
            if out.as_json:
                told = {"url": url, "host": options.host, "port": sock.getsockname()[1]}
                out.data(told | {"model": options.model_name, "home": str(home_of(args))})
            else:
                print(f"kvweave serves {options.model_name} at {url}", flush=True)

        with open_engine(args, make=True, denoise="never", **settings) as engine:
            app = create_app(engine, options)
            gc.collect()
            gc.freeze()  # what a model is made of, too: a look at all objects stops every answer
            Server(app, ready, args.grace).run([sock])
    return 0


def listening_at(host: str, port: int) -> socket:
    """Return a socket that is bound there. Raises ServerError."""
    from kvweave.serve.listening import listen

    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        return listen(host, port)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        hint = "something listens there already: end it, or take another --port; 0 takes a free one"
        reason = error.strerror or str(error)
        raise ServerError(
            f"cannot listen at {where}: {reason}",
            hint=hint if taken else "give another --host or --port",
        ) from error


def access_log(*, shown: bool) -> None:
    """Show warnings on stderr, whatever KVWEAVE_LOG says of requests, and each request if asked to."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("kvweave.access").setLevel(logging.INFO if shown else logging.WARNING)


def options_of(args: Namespace) -> Options:
    """Return the server's options. Raises InvalidArgument, StoreError for an unreadable file."""
    from kvweave.serve.options import Options

    given = {name: getattr(args, name) for name in LIMITS if getattr(args, name) is not None}
    name = args.name or ("demo" if model_of(args) == str(BUNDLED) else Path(model_of(args)).name)
    given["metrics_key"] = (
        os.environ.get(METRICS_KEY) if args.metrics_key is None else args.metrics_key
    )
    given["allowed_hosts"], given["aliases"] = tuple(args.allowed_host), tuple(args.alias)
    given["cors_origins"] = tuple(args.cors_origin)
    given["any_model"], given["tool_parser"] = args.any_model, args.tool_parser
    given["keep_unstored"], given["learn_edits"] = args.keep_unstored, not args.no_learn_edits
    return Options(host=args.host, port=args.port, keys=keys_of(args), model_name=name, **given)


def keys_of(args: Namespace) -> dict[str, str]:
    """Return API keys and their namespaces, of --key, --keys and KVWEAVE_KEYS.

    Raises InvalidArgument when one of them is given and has no key, StoreError for an unreadable file.
    """
    from kvweave.serve.guard.keys import joined, parse_key, parse_keys

    found = [parse_key(text, "--key") for text in args.key]
    if args.keys is not None:
        found += parse_keys(_text_of(args.keys), "--keys").items()
    if KEYS in os.environ:
        found += parse_keys(os.environ[KEYS], KEYS).items()
    return joined(found)


def _text_of(file: str) -> str:
    if not file:
        raise InvalidArgument("--keys", "it names no file", "write --keys FILE, or leave it away")
    try:
        return Path(os.path.expanduser(file)).read_text("utf-8-sig")
    except OSError as error:
        raise of_system(error, "read", file) from error
    except UnicodeDecodeError as error:
        raise InvalidArgument(
            "--keys", f"{file} is no text", "write KEY:NAMESPACE lines"
        ) from error
