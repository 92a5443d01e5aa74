"""Who may ask: an API key stands for a namespace. Everything but the page's files needs one."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from hmac import compare_digest
from typing import Annotated, Any
from urllib.parse import urlsplit

from fastapi import Depends, Request
from fastapi.security import HTTPBearer
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from kvweave.errors import InvalidArgument
from kvweave.serve.options import is_loopback
from kvweave.serve.problems import CLOSE, Problem, make

OPEN = ("/", "/health", "/openapi.json", "/favicon.ico")  # without a key
OPEN_BELOW = "/web/"
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


def parse_key(text: str) -> tuple[str, str]:
    """Return key and namespace of ``KEY`` or ``KEY:NAMESPACE``. Raises InvalidArgument."""
    key, _, namespace = text.strip().partition(":")
    if not key:
        raise InvalidArgument("key", "there is an empty one", "write KEY or KEY:NAMESPACE")
    return key, namespace


def parse_keys(text: str) -> dict[str, str]:
    """Return the keys of a text with one ``KEY[:NAMESPACE]`` a line or comma; # begins a comment.

    Raises InvalidArgument when a key stands for two namespaces.
    """
    keys: dict[str, str] = {}
    for line in text.replace(",", "\n").splitlines():
        words = line.split("#")[0].strip()
        if not words:
            continue
        key, namespace = parse_key(words)
        if keys.setdefault(key, namespace) != namespace:
            raise InvalidArgument("keys", "one key is given for two namespaces")
    return keys


class Access:
    """ASGI middleware: sets ``scope["state"]["tenant"]``, or answers 401 or 403.

    An open server can be reached by every web page its user visits, through his browser: so it
    refuses names of other hosts (DNS rebinding) and what a page of another origin sends.
    """

    def __init__(self, app: ASGIApp, keys: Mapping[str, str]) -> None:
        self.app, self.keys = app, Keys(keys)

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
        state["tenant"] = ""
        if not self.keys:
            return _from_elsewhere(scope["method"], headers)
        path = scope["path"]
        if path in OPEN or path.startswith(OPEN_BELOW):
            return None
        scheme, _, key = headers.get("authorization", "").partition(" ")
        namespace = self.keys.namespace(key.strip()) if scheme.lower() == "bearer" else None
        if namespace is None:
            return make(
                401,
                "this server needs an API key" if not key else "the API key is not known",
                code="invalid_api_key",
                hint="send it as `Authorization: Bearer KEY`",
                headers={"WWW-Authenticate": "Bearer"} | CLOSE,
            )
        state["tenant"] = namespace
        return None


def _from_elsewhere(method: str, headers: Headers) -> Problem | None:
    host, origin = headers.get("host", ""), headers.get("origin")
    try:
        name, theirs = urlsplit(f"//{host}").hostname or "", urlsplit(origin or "").netloc
    except ValueError:
        return make(403, "Host or Origin names no place", headers=CLOSE)
    if "." in name.rstrip(".") and not is_loopback(name):
        hint = "start it with --key to serve other names"
        return make(403, "this server answers under local names only", hint=hint, headers=CLOSE)
    if origin is None or method in SAFE_METHODS or theirs == host:
        return None
    return make(403, "a page of another origin may not change anything here", headers=CLOSE)


def tenant_of(request: Request) -> str:
    """Return the namespace of the request's key."""
    tenant: str = request.scope["state"]["tenant"]
    return tenant


def _tenant(request: Request, _: Annotated[Any, Depends(HTTPBearer(auto_error=False))]) -> str:
    return tenant_of(request)


Tenant = Annotated[str, Depends(_tenant)]
"""A route's parameter of this type is the namespace of the caller."""


def _digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogatepass")).digest()
