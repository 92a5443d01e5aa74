"""Who may ask: an API key stands for a namespace. Everything but the page's files needs one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import sha256
from hmac import compare_digest
from typing import Annotated, Any
from urllib.parse import urlsplit

from fastapi import Depends, Request
from fastapi.security import HTTPBearer
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from kvweave.serve.guard.keys import key_given
from kvweave.serve.guard.problems import CLOSE, Problem, make
from kvweave.serve.options import is_loopback, plain_host

OPEN = ("/", "/health", "/openapi.json", "/favicon.ico")  # without a key
OPEN_BELOW = "/web/"
METRICS = "/metrics"  # of all namespaces together, so it has a key of its own
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")


class Keys:
    """API keys and their namespaces; only digests are kept."""

    def __init__(self, keys: Mapping[str, str]) -> None:
        self._digests = [(_digest(key), namespace) for key, namespace in keys.items()]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def namespace(self, key: str) -> str | None:
        """Return the namespace of a key, None for a wrong one, in a time that does not tell."""
        given, found = _digest(key), None
        for digest, namespace in self._digests:
            if compare_digest(digest, given):
                found = namespace
        return found


class Access:
    """ASGI middleware: sets ``scope["state"]["tenant"]``, or answers 401 or 403.

    An open server can be reached by every web page its user visits, through his browser: so it
    refuses names of other hosts (DNS rebinding) and what a page of another origin sends. With keys
    only ``allowed_hosts``, if there are any, bind it to names.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Mapping[str, str],
        metrics_key: str | None = None,
        host: str = "",
        allowed_hosts: Iterable[str] = (),
        origins: Iterable[str] = (),
    ) -> None:
        self.app, self.keys = app, Keys(keys)
        self._of_metrics = Keys({} if metrics_key is None else {metrics_key: ""})
        allowed = {plain_host(name) for name in allowed_hosts}
        self._origins = frozenset(origins)  # pages that may do what their users may
        self._checks_host = bool(allowed) or not keys
        self._hosts = (allowed | {plain_host(host)}) - {""}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        problem = self._problem(scope)
        if problem is not None:
            await problem.response(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _problem(self, scope: Scope) -> Problem | None:
        headers, state = Headers(scope=scope), scope.setdefault("state", {})
        state["tenant"], state["sees_metrics"] = "", not self.keys
        if self._checks_host and (problem := self._other_host(headers)):
            return problem
        if not self.keys:
            known = headers.get("origin") in self._origins
            return None if known else _from_elsewhere(scope["method"], headers)
        path = scope["path"]
        if path in OPEN or path.startswith(OPEN_BELOW):
            return None
        key = key_given(headers.get("authorization", ""), headers.get("x-api-key", ""))
        if path == METRICS and self._of_metrics.namespace(key) is not None:
            state["sees_metrics"] = True
            return None
        namespace = self.keys.namespace(key)
        if namespace is None:
            return make(
                401,
                "this server needs an API key" if not key else "the API key is not known",
                code="invalid_api_key",
                hint="send it as `Authorization: Bearer KEY`, or as `x-api-key`",
                headers={"WWW-Authenticate": "Bearer"} | CLOSE,
            )
        state["tenant"] = namespace
        return None

    def _other_host(self, headers: Headers) -> Problem | None:
        try:
            name = plain_host(urlsplit(f"//{headers.get('host', '')}").hostname or "")
        except ValueError:
            return make(403, "Host names no place", headers=CLOSE)
        if name in self._hosts or is_loopback(name):
            return None
        hint = "start it with --allowed-host NAME for each name"
        hint += "" if self.keys else ", or with --key to ask for a key instead"
        return make(403, "this server does not answer under that name", hint=hint, headers=CLOSE)


def _from_elsewhere(method: str, headers: Headers) -> Problem | None:
    host, origin = headers.get("host", ""), headers.get("origin")
    try:
        theirs = urlsplit(origin or "").netloc
    except ValueError:
        return make(403, "Origin names no place", headers=CLOSE)
    if origin is None or method in SAFE_METHODS or theirs == host:
        return None
    return make(403, "a page of another origin may not change anything here", headers=CLOSE)


def tenant_of(request: Request) -> str:
    """Return the namespace of the request's key."""
    tenant: str = request.scope["state"]["tenant"]
    return tenant


def sees_metrics(request: Request) -> bool:
    """Tell whether the caller may see figures of all namespaces together."""
    sees: bool = request.scope["state"]["sees_metrics"]
    return sees


async def _tenant(
    request: Request, _: Annotated[Any, Depends(HTTPBearer(auto_error=False))]
) -> str:
    return tenant_of(request)


Tenant = Annotated[str, Depends(_tenant)]
"""A route's parameter of this type is the namespace of the caller."""


def _digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogatepass")).digest()
