"""A parameter nobody knows is refused, wherever it stands: nothing is done as if it were not there."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Annotated, Any, get_args

import pytest
from fastapi.routing import APIRoute
from pydantic import BaseModel, TypeAdapter, ValidationError

A = "The museum opens at nine."
DRY = ("dryrun", "dry-run", "Dry_Run", "dry_run ", "dry")
CHANGES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("DELETE", "/v1/chunks/a/**", {}),
    ("POST", "/v1/chunks/a/x:mv", {"to": "b"}),
    ("POST", "/v1/chunks/a/x:cp", {"to": "b"}),
    ("POST", "/v1/chunks/a/x:pin", {}),
    ("POST", "/v1/chunks/a/x:place", {"tier": "none"}),
)  # each on its own would change what is there


def test_every_route_is_strict(serve: Any) -> None:
    served = serve()
    routes = [(p, m) for p, ways in served.app.openapi()["paths"].items() for m in ways]
    assert len(routes) > 30
    for path, method in routes:
        where = re.sub(r"{\w+(:path)?}", "x", path)
        body = None if method in ("get", "delete") else {}
        told = served.anna.error(method, where, body, 400, params={"no_such": "1"})
        assert told["param"] == "no_such", (method, path)


def models_of(kind: Any) -> Iterator[type[BaseModel]]:
    """Yield the models that a type is made of, those of their fields too."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield kind
        for field in kind.model_fields.values():
            yield from models_of(field.annotation)
    for part in get_args(kind):
        yield from models_of(part)


def types_of(schema: dict[str, Any]) -> set[str]:
    """Return the JSON types that a field's schema says it takes."""
    named = {schema["type"]} if "type" in schema else set()
    return named.union(*map(types_of, schema.get("anyOf", []) + schema.get("oneOf", [])))


def test_a_body_takes_the_types_that_its_schema_names(serve: Any) -> None:
    bodies = [r.body_field for r in serve().app.routes if isinstance(r, APIRoute) and r.body_field]
    models = {m for body in bodies for m in models_of(body.field_info.annotation)}
    taken, asked = [], 0
    for model in models:
        for name, field in model.model_fields.items():
            own = TypeAdapter(Annotated[(field.annotation, "field", *field.metadata)])
            types = types_of(own.json_schema())
            wrong = {"string": ('"1"', '"true"'), "boolean": ("true",)}
            for text in (t for kind in wrong if kind not in types for t in wrong[kind]):
                if types & {"integer", "number", "boolean"}:
                    asked += 1
                    with contextlib.suppress(ValidationError):
                        own.validate_json(text)
                        taken.append((model.__name__, name, text))
    assert asked > 200 and taken == []


@pytest.mark.parametrize("name", DRY)
def test_a_dry_run_that_is_misspelt_removes_nothing(serve: Any, name: str) -> None:
    anna = serve().anna
    anna.put("a/x", A)
    told = anna.error("DELETE", "/v1/chunks/a/**", None, 400, params={name: "true"})
    assert "dry_run" in told["hint"]
    for method, path, body in CHANGES:
        anna.error(method, path, body | {name: True}, 400)
    assert anna.names() == ["a/x"] and not anna("GET", "/v1/chunks/a/x")["pinned"]


@pytest.mark.parametrize("where", ["query", "body", "both", "against"])
def test_a_dry_run_is_one_wherever_it_is_said(serve: Any, where: str) -> None:
    anna = serve().anna
    anna.put("a/x", A)
    before = anna("GET", "/v1/chunks/a/x")
    params = {"dry_run": "true"} if where != "body" else {}
    said: dict[str, Any] = {"body": {"dry_run": True}, "both": {"dry_run": True}}.get(where, {})
    said |= {"dry_run": False} if where == "against" else {}
    for method, path, body in CHANGES:
        anna(method, path, body | said, params=params)
        assert anna("GET", "/v1/chunks/a/x") == before, (method, path)
        assert anna.names() == ["a/x"]


def test_what_is_said_twice_or_where_nobody_reads_is_refused(serve: Any) -> None:
    anna = serve().anna
    anna.put("a/x", A)
    both = [("dry_run", "true"), ("dry_run", "false")]
    assert "twice" in anna.error("DELETE", "/v1/chunks/a/**", None, 400, params=both)["message"]
    assert anna.error("GET", "/v1/chunks", {"pattern": "zzz"}, 400)["param"] == "body"
    anna.error("POST", "/v1/contexts/c:preview", {"dry_run": True}, 400)
    assert anna("GET", "/v1/chunks", params={"patern": "zzz"}, status=400)["error"]["hint"] == (
        "did you mean pattern?"
    )
    assert anna.names() == ["a/x"]


def test_a_put_answers_as_it_is_described(serve: Any) -> None:
    served = serve()
    described = served.app.openapi()["paths"]["/v1/chunks/{name}"]["put"]["responses"]
    for status in (201, 200):
        served.anna("PUT", "/v1/chunks/a", {"text": A, "replace": True}, status)
        assert str(status) in described
