"""``kvweave serve``: the engine behind HTTP, until a signal ends it."""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from kvweave.cli.home import BUNDLED, home_of, model_of, open_engine
from kvweave.cli.show import Out
from kvweave.errors import InvalidArgument, ServerError, of_system

if TYPE_CHECKING:
    from kvweave.serve.options import Options

KEYS = "KVWEAVE_KEYS"  # the environment's keys, as in a file of --keys
LIMITS = (
    "max_waiting", "max_active", "max_body", "max_prompt", "max_sessions", "min_match", "quota",
    "quota_chunks", "max_contexts", "reuse",
)  # fmt: skip
ENGINE = ("budget", "policy", "tiers", "index", "repair", "share", "max_drift")


def serve(args: Namespace) -> int:
    """Serve until SIGINT or SIGTERM; then 0."""
    try:
        from kvweave.serve.app import create_app
        from kvweave.serve.server import Server, listen, url_of
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("kvweave"):
            raise
        hint = "pip install 'kvweave[serve]'"
        raise ServerError(f"{error.name} is not installed", hint=hint) from error
    out = Out.of(args)
    args.model = args.checkpoint or args.model
    options = options_of(args)
    settings = {name: getattr(args, name) for name in ENGINE if getattr(args, name) is not None}
    with listen(options.host, options.port) as sock:
        url = url_of(sock)

        def ready() -> None:
            if out.as_json:
                told = {"url": url, "host": options.host, "port": sock.getsockname()[1]}
                out.data(told | {"model": options.model_name, "home": str(home_of(args))})
            else:
                print(f"kvweave serves {options.model_name} at {url}", flush=True)

        with open_engine(args, make=True, denoise="never", **settings) as engine:
            Server(create_app(engine, options), ready, args.grace).run([sock])
    return 0


def options_of(args: Namespace) -> Options:
    """Return the server's options. Raises InvalidArgument, StoreError for an unreadable file."""
    from kvweave.serve.options import Options

    given = {name: getattr(args, name) for name in LIMITS if getattr(args, name) is not None}
    name = args.name or ("demo" if model_of(args) == str(BUNDLED) else Path(model_of(args)).name)
    return Options(host=args.host, port=args.port, keys=keys_of(args), model_name=name, **given)


def keys_of(args: Namespace) -> dict[str, str]:
    """Return API keys and their namespaces, of --key, --keys and KVWEAVE_KEYS."""
    from kvweave.serve.access import parse_keys

    texts = [*args.key, os.environ.get(KEYS, "")]
    if args.keys is not None:
        try:
            texts.append(Path(args.keys).read_text())
        except OSError as error:
            raise of_system(error, "read", args.keys) from error
        except UnicodeDecodeError as error:
            raise InvalidArgument(
                "keys", f"{args.keys} is no text", "write KEY:NAMESPACE lines"
            ) from error
    keys: dict[str, str] = {}
    for text in texts:
        for key, namespace in parse_keys(text).items():
            if keys.setdefault(key, namespace) != namespace:
                raise InvalidArgument("keys", "one key is given for two namespaces")
    return keys
