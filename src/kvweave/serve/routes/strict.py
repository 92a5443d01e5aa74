"""Routes that refuse what they do not know: a parameter that is ignored is a deletion one day."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Annotated, Any, get_origin

from fastapi import Query, Request, Response, params
from fastapi.dependencies.utils import get_flat_params
from fastapi.routing import APIRoute
from pydantic import BaseModel, StrictBool

from kvweave.errors import InvalidArgument, nearest
from kvweave.serve.guard.access import tenant_of
from kvweave.serve.guard.idempotent import HEADER
from kvweave.serve.guard.limits import parsed
from kvweave.serve.routes.base import STRICT

NOTHING = (b"", b"{}", b"null")  # bodies that say nothing
Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class _Read(Request):
    """A request whose JSON was read on its way here."""

    async def json(self) -> Any:
        found = parsed(self.scope)
        return await super().json() if found is None else found.value


class StrictRoute(APIRoute):
    """A route that takes the query parameters and the body it declares, and no others.

    A request with an ``Idempotency-Key`` is done once (`guard/idempotent.py`).

    Raises InvalidArgument (400) for another parameter, one that is given twice, and a body where
    none is wanted.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        options["generate_unique_id_function"] = _operation
        super().__init__(path, endpoint, **options)

    def get_route_handler(self) -> Handler:
        """Return what answers a request."""
        handle = super().get_route_handler()
        known = _declared(self)
        takes_body = self.body_field is not None

        async def strict(request: Request) -> Response:
            request = _Read(request.scope, request.receive)
            _check_query(request, known)
            if not takes_body and (await request.body()).strip() not in NOTHING:
                raise InvalidArgument("body", "this takes no body", "leave it out")
            if request.method != "GET" and HEADER in request.headers:
                idempotent = request.app.state.kvweave.idempotent
                response: Response = await idempotent.answer(tenant_of(request), request, handle)
                return response
            return await handle(request)

        return strict


class SavingRoute(StrictRoute):
    """A route of what is kept in a file: it answers once what it changed is there."""

    def get_route_handler(self) -> Handler:
        """Return what answers a request."""
        handle = super().get_route_handler()

        async def saving(request: Request) -> Response:
            response = await handle(request)
            if request.method != "GET":
                await request.app.state.kvweave.responses.settled()
            return response

        return saving


class DryRun(BaseModel):
    """Whether only to say what would happen."""

    model_config = STRICT

    dry_run: StrictBool = False


DryQuery = Annotated[bool, Query(alias="dry_run", description="as in the body")]


def is_dry(query: bool, body: DryRun | None) -> bool:
    """Tell whether nothing may be changed: said in the query, in the body, or in both."""
    return query or (body is not None and body.dry_run)


def _operation(route: APIRoute) -> str:
    group = str(route.tags[0]) if route.tags else "page"
    return f"{group}_{route.name}"


def _declared(route: APIRoute) -> dict[str, bool]:
    """Return the query parameters of a route, and whether each may be repeated."""
    elsewhere = (params.Path, params.Header, params.Cookie)
    return {
        field.alias: get_origin(field.field_info.annotation) is list
        for field in get_flat_params(route.dependant)
        if not isinstance(field.field_info, elsewhere)
    }


def _check_query(request: Request, known: dict[str, bool]) -> None:
    seen = set()
    for name, _ in request.query_params.multi_items():
        if name not in known:
            near = nearest(name, known)
            hint = f"did you mean {near[0]}?" if near else ", ".join(known) or "it takes none"
            raise InvalidArgument(name[:64], "there is no such parameter", hint)
        if name in seen and not known[name]:
            raise InvalidArgument(name, "it is given twice", "give it once")
        seen.add(name)
