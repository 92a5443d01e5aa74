"""The page at ``/``: the files of ``web/``, read once from the wheel and served as they are."""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from importlib.resources import files

from fastapi import APIRouter, Request, Response

TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
INDEX = "index.html"

# The page talks to its own server only, and no string ever becomes markup or code in it.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # ask each time: a new wheel's page must not mix with an old one
    "Vary": "Accept-Encoding",
}


@dataclass(frozen=True, slots=True)
class Asset:
    """One file of the page: its bytes, plain and packed, its media type, and its ETag."""

    body: bytes
    packed: bytes
    media_type: str
    etag: str

    @classmethod
    def of(cls, name: str, body: bytes) -> Asset:
        """Make the asset of a file. Raises KeyError for an ending that is not in TYPES."""
        etag = f'W/"{blake2b(body, digest_size=12).hexdigest()}"'
        return cls(body, gzip.compress(body, mtime=0), TYPES[name.rsplit(".", 1)[-1]], etag)

    def answer(self, request: Request) -> Response:
        """Return the file, or 304 when the client has it."""
        headers = {**HEADERS, "ETag": self.etag}
        known = request.headers.get("if-none-match", "")
        if self.etag in (tag.strip() for tag in known.split(",")):
            return Response(status_code=304, headers=headers)
        if "gzip" in request.headers.get("accept-encoding", ""):
            headers["Content-Encoding"] = "gzip"
            return Response(self.packed, headers=headers, media_type=self.media_type)
        return Response(self.body, headers=headers, media_type=self.media_type)


def read_assets() -> dict[str, Asset]:
    """Return the files of ``web/`` by name."""
    found = sorted(files("kvweave.serve").joinpath("web").iterdir(), key=lambda file: file.name)
    return {file.name: Asset.of(file.name, file.read_bytes()) for file in found}


@cache
def make_router() -> APIRouter:
    """Return the routes ``/`` and ``/web/...``: GET and HEAD, open to all; the data needs a key."""
    router = APIRouter(include_in_schema=False)

    def route(path: str, asset: Asset) -> None:
        def serve(request: Request) -> Response:
            return asset.answer(request)

        router.add_api_route(path, serve, methods=["GET", "HEAD"], response_class=Response)

    for name, asset in read_assets().items():
        route("/" if name == INDEX else f"/web/{name}", asset)
    return router
