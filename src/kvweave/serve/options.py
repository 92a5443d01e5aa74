"""What a server is told at its start, in one place."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Literal, get_args
from urllib.parse import urlsplit

from kvweave.chunk.identity import MAX_NAME, check_namespace
from kvweave.errors import InvalidArgument
from kvweave.serve.chat.families import FAMILIES
from kvweave.serve.guard.keys import check_key

ReuseMode = Literal["all", "prefix", "off"]
SECRET = ("keys", "metrics_key")
_HOST = re.compile(r"\w([\w.-]*\w)?\.?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Options:
    """Settings of one server; each field with its unit. Raises InvalidArgument."""

    host: str = "127.0.0.1"
    port: int = 8700  # 0 takes a free one
    keys: Mapping[str, str] = field(default_factory=dict, repr=False)  # API key -> namespace
    metrics_key: str | None = field(default=None, repr=False)  # of /metrics, where there are keys
    allowed_hosts: Sequence[str] = ()  # names it answers under besides its own; without ports
    cors_origins: Sequence[str] = ()  # of pages that may read and change what they can reach here
    max_waiting: int = 1024  # answers of one namespace, and as many other calls, that may wait
    max_active: int | None = None  # answers that run together; None: the engine's max_batch
    max_body: int = (
        8 * 2**20
    )  # bytes of a request; of those of a namespace under way 8 times as many
    max_prompt: int | None = None  # tokens; None: the model's limit
    max_name: int = MAX_NAME  # characters of a chunk's or context's name
    quota: int | None = None  # bytes of KV a namespace may store, and of rows in its contexts
    quota_chunks: int | None = None  # chunks a namespace may store
    max_contexts: int = 256  # that a namespace may have open
    max_parts: int = 2048  # of one context, and of one prompt
    body_timeout: float = 30.0  # seconds a client has to send its request
    min_match: int = 32  # tokens; a shorter run of known text is not looked for
    max_sessions: int = 32  # idle contexts kept for the next request of a conversation
    retain: float = 7 * 86400.0  # seconds that what a conversation said is kept after its last use
    reuse: ReuseMode = "all"  # what the OpenAI endpoints reuse; the others are for measuring
    model_name: str = "kvweave"  # what /v1/models calls it
    aliases: Sequence[str] = ()  # other names that it answers to
    any_model: bool = False  # it answers to every name
    keep_unstored: bool = False  # KV of requests that say `store: false` stays for later ones
    learn_edits: bool = True  # edits that clients make again and again are made before they come
    tool_parser: str | None = None  # the family of its answers; None: by its chat template

    def __post_init__(self) -> None:
        if self.reuse not in get_args(ReuseMode):
            raise InvalidArgument(
                "reuse", f"{self.reuse!r} is none of {', '.join(get_args(ReuseMode))}"
            )
        if self.tool_parser not in (None, "none", *FAMILIES):
            known = ", ".join(("none", *FAMILIES))
            raise InvalidArgument("tool_parser", f"{self.tool_parser!r} is none of {known}")
        if not 0 <= self.port <= 65535:
            raise InvalidArgument("port", f"{self.port} is not in 0..65535")
        positive = ("max_waiting", "max_active", "max_body", "max_prompt", "max_name", "min_match")
        for name in (
            *positive,
            "max_contexts",
            "max_parts",
            "retain",
            "quota",
            "quota_chunks",
            "body_timeout",
        ):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InvalidArgument(name, f"{value} is not above 0")
        if self.max_sessions < 0:
            raise InvalidArgument("max_sessions", f"{self.max_sessions} is below 0")
        for key, namespace in self.keys.items():
            check_namespace(namespace)
            check_key(key, "keys", f"a key of namespace {namespace!r}")
        if self.metrics_key is not None:
            self._check_metrics_key(self.metrics_key)
        for host in self.allowed_hosts:
            check_host(host)
        for origin in self.cors_origins:
            check_origin(origin)
        if not self.keys and not is_loopback(self.host):
            raise InvalidArgument(
                "host",
                f"{self.host} can be reached from elsewhere, and no key is asked for",
                "give --key KEY, --keys FILE or KVWEAVE_KEYS, or stay on 127.0.0.1",
            )

    def _check_metrics_key(self, key: str) -> None:
        check_key(key, "metrics_key", "it")
        if not self.keys:
            reason = "without other keys the server is open, /metrics too"
            raise InvalidArgument(
                "metrics_key", reason, "give --key KEY, --keys FILE or KVWEAVE_KEYS"
            )
        if key in self.keys:
            reason = "it is also the key of a namespace"
            raise InvalidArgument("metrics_key", reason, "take another one")

    def answers_to(self, name: str) -> bool:
        """Tell whether a request may call the model so."""
        return self.any_model or name in (self.model_name, *self.aliases)

    def to_dict(self) -> dict[str, object]:
        """Return the fields without the keys, JSON-ready."""
        told = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in SECRET}
        lists = ("allowed_hosts", "cors_origins", "aliases")
        return told | {name: list(getattr(self, name)) for name in lists}


def check_host(name: str) -> None:
    """Raise InvalidArgument unless ``name`` is the name or the address of a host, without a port."""
    try:
        ipaddress.ip_address(plain_host(name))
    except ValueError:
        if not _HOST.fullmatch(name):
            hint = "a name or an address, without http:// and without a port; no wildcards"
            raise InvalidArgument("allowed_hosts", f"{name!r} is no host", hint) from None


def check_origin(origin: str) -> None:
    """Raise InvalidArgument unless ``origin`` is one as browsers write it: no path, no wildcard."""
    scheme, _, host = origin.partition("://")
    try:
        found = urlsplit(origin)
        port = "" if found.port is None else f":{found.port}"
        name = found.hostname or ""
        check_host(name)
    except (ValueError, InvalidArgument):
        name = port = ""
    shown = f"[{name}]" if ":" in name else name
    if not name or scheme not in ("http", "https") or host != shown + port:
        hint = "as browsers send it: http:// or https://, a name in small letters, a port if there is one"
        raise InvalidArgument("cors_origins", f"{origin!r} is no origin", hint)


def plain_host(name: str) -> str:
    """Return a host's name as names are compared: small letters, no brackets, no last dot."""
    return name.lower().removeprefix("[").removesuffix("]").removesuffix(".")


def is_loopback(host: str) -> bool:
    """Tell whether only this machine can reach ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
