"""What a router is told at its start, in one place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args
from urllib.parse import urlsplit

from kvweave.errors import InvalidArgument
from kvweave.serve.guard.keys import check_key
from kvweave.serve.options import check_host, is_loopback
from kvweave.simulate.cost import Cost

PolicyName = Literal["chunks", "prefix", "hash", "random"]


@dataclass(frozen=True, slots=True)
class RouteOptions:
    """Settings of one router; each field with its unit. Raises InvalidArgument."""

    workers: Sequence[str]  # http://HOST:PORT of each
    host: str = "127.0.0.1"
    port: int = 8800  # 0 takes a free one
    policy: PolicyName = "chunks"
    key: str | None = field(default=None, repr=False)  # of /metrics and /v1/workers
    allowed_hosts: Sequence[str] = ()  # names it answers under besides its own
    bound: float = 1.25  # times the mean load that a worker may have (policies chunks and hash)
    slots: int = 8  # requests that a worker may have whatever the mean is: it answers them together
    cost: Cost = field(default_factory=Cost)  # of the workers
    max_body: int = 8 * 2**20  # bytes of a request
    body_timeout: float = 30.0  # seconds a client has to send its request
    connect_timeout: float = 5.0  # seconds to reach a worker
    timeout: float = 600.0  # seconds without a byte from a worker that answers
    probe: float = 2.0  # seconds between two looks at a worker's health, and at its placements
    failures: int = 2  # probes in a row that fail until a worker counts as down
    remembered: int = 2_000_000  # prints of text, all workers and tenants together

    def __post_init__(self) -> None:
        if not self.workers:
            raise InvalidArgument("workers", "there is none", "give --worker URL for each")
        urls = [worker_url(url) for url in self.workers]
        if len(set(urls)) < len(urls):
            raise InvalidArgument("workers", "one is given twice", "give each once")
        if self.policy not in get_args(PolicyName):
            names = ", ".join(get_args(PolicyName))
            raise InvalidArgument("policy", f"{self.policy!r} is none of {names}")
        if not 0 <= self.port <= 65535:
            raise InvalidArgument("port", f"{self.port} is not in 0..65535")
        if not self.bound >= 1:
            raise InvalidArgument("bound", f"{self.bound} is below 1, the mean")
        positive = ("max_body", "body_timeout", "connect_timeout", "timeout", "probe", "failures")
        for name in (*positive, "remembered", "slots"):
            if not getattr(self, name) > 0:
                raise InvalidArgument(name, f"{getattr(self, name)} is not above 0")
        for host in self.allowed_hosts:
            check_host(host)
        if self.key is not None:
            check_key(self.key, "key", "the router's own key")
        elif not is_loopback(self.host):
            reason = f"{self.host} can be reached from elsewhere, and anybody could drain a worker"
            raise InvalidArgument("host", reason, "give --key-file FILE, or stay on 127.0.0.1")


def worker_url(text: str) -> str:
    """Return a worker's address as ``http://host:port``. Raises InvalidArgument for anything more."""
    hint = "write http://HOST:PORT"
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        port = parts.port
    except ValueError as error:
        raise InvalidArgument("workers", f"{text!r} is no address", hint) from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidArgument("workers", f"{text!r} is no address", hint)
    if parts.path not in ("", "/") or parts.query or parts.fragment or parts.username:
        raise InvalidArgument("workers", f"{text!r} has more than a host and a port", hint)
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    port = (443 if parts.scheme == "https" else 80) if port is None else port
    return f"{parts.scheme}://{host}:{port}"
