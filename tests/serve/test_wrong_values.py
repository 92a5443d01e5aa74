"""A wrong value is named by its field, as it was given, with what it may be: in every body of every route.

python -m pytest tests/serve/test_wrong_values.py
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError

from kvweave.serve.anthropic.schemas import MessagesRequest
from kvweave.serve.guard.malformed import faults
from kvweave.serve.openai.schemas import ChatRequest

Json = dict[str, Any]
Wrong = tuple[tuple[str | int, ...], Any, Any]  # a path, the value there, and all of it
NEITHER: Json = {"string": 5, "object": [5], "array": "no such", "number": "no such"}
KINDS = {"string": "string", "integer": "number", "number": "number", "array": "array"}
DEPTH = 9


class Schema:
    """Values of a JSON schema that are wrong in one place."""

    def __init__(self, schema: Json) -> None:
        self.defs = schema.get("$defs", {})

    def members(self, schema: Json) -> list[Json]:
        while "$ref" in schema:
            schema = self.defs[schema["$ref"].rsplit("/", 1)[-1]]
        found = schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf") or [schema]
        if found == [schema]:
            return found
        return [m for each in found for m in self.members(each) if m.get("type") != "null"]

    def right(self, schema: Json) -> Any:
        """A value that is none of those."""
        first = self.members(schema)[0]
        if "const" in first or "enum" in first:
            return first.get("const", first.get("enum", [None])[0])
        if first.get("type") == "object":
            fields = first.get("properties", {})
            needed = {*first.get("required", ()), "content", "verb"}
            return {n: self.right(fields[n]) for n in fields if n in needed}
        if first.get("type") == "array":
            inner = [*first.get("prefixItems", ()), *([first["items"]] if "items" in first else ())]
            return [self.right(each) for each in inner] if first.get("minItems") else []
        return {"string": "a", "integer": 1, "number": 1, "boolean": True}.get(first.get("type"), 1)

    def wrong(self, schema: Json, depth: int = 0) -> Iterator[Wrong]:
        members = self.members(schema)
        for member in members if depth < DEPTH else ():
            if member.get("type") == "object":
                base = self.right(member)
                for name, inner in member.get("properties", {}).items():
                    for path, given, value in self.wrong(inner, depth + 1):
                        yield (name, *path), given, {**base, name: value}
            elif member.get("type") == "array" and "items" in member:
                for path, given, value in self.wrong(member["items"], depth + 1):
                    yield (0, *path), given, [value]
        if all("const" in each or "enum" in each for each in members):
            yield (), "no such", "no such"
        kinds = {KINDS.get(each.get("type", ""), "object") for each in members}
        for kind, value in NEITHER.items():
            if kind in kinds and all("type" in each for each in members):
                unlike = {"string"} if isinstance(value, str) else {"number"}
                unlike = {"array"} if isinstance(value, list) else unlike
                if not unlike & kinds:
                    yield (), value, value


def bodies(app: Any) -> dict[str, Any]:
    found = {}
    for route in app.routes:
        if isinstance(route, APIRoute) and route.body_field is not None:
            kind = route.body_field.field_info.annotation
            found.setdefault(str(kind), (route.path, TypeAdapter(kind)))
    return dict(found.values())


def test_in_every_body_of_every_route(serve: Any) -> None:
    n, misled = 0, []
    for route, adapter in bodies(serve(start=False).app).items():
        schema = adapter.json_schema()
        for path, given, body in Schema(schema).wrong(schema):
            try:
                adapter.validate_python(body)
            except ValidationError as error:
                n += 1
                first = faults(error.errors(), body)[0]
                wanted = ".".join(map(str, path))
                ours = first.path and (
                    wanted.startswith(f"{first.path}.") and "[" not in first.path
                )
                says = repr(given) in first.message or (ours and "no such" in first.message)
                if not says or not (first.path == wanted or ours):
                    misled.append((route, wanted, given, first))
    assert not misled, "\n".join(map(str, misled))
    assert n > 500


USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("kind", "field", "value", "path", "says"),
    [
        (ChatRequest, "tool_choice", "sometimes", "tool_choice", "'none', 'auto' or 'required', not 'sometimes'"),
        (ChatRequest, "tool_choice", {"type": "function", "function": {"nam": "x"}}, "tool_choice.function.name", "required"),
        (ChatRequest, "tool_choice", {"type": "allowed_tools", "allowed_tools": {"mode": "some", "tools": []}},
         "tool_choice.allowed_tools.mode", "'auto' or 'required', not 'some'"),
        (ChatRequest, "tool_choice", {"type": "magic"}, "tool_choice.type", "'function' or 'allowed_tools', not 'magic'"),
        (ChatRequest, "tool_choice", 5, "tool_choice", "'required' or an object, not 5"),
        (ChatRequest, "stop", ["a", 5], "stop.1", "a valid string, not 5"),
        (ChatRequest, "messages", [{"role": "user", "content": [{"type": "text", "text": 5}]}],
         "messages.0.content.0.text", "a valid string, not 5"),
        (ChatRequest, "messages", [{"role": "user", "content": [{"type": "image_url"}]}],
         "messages.0.content.0.type", "'refusal', 'chunk', not 'image_url'"),
        (ChatRequest, "messages", [{"role": "user", "content": [{"text": "a"}]}],
         "messages.0.content.0.type", "required"),
        (ChatRequest, "messages", [{"role": "user", "content": 5}], "messages.0.content", "a string or a list, not 5"),
        (MessagesRequest, "messages", [{"role": "user", "content": 5}], "messages.0.content", "list of blocks, not 5"),
        (MessagesRequest, "thinking", {"type": "between_tools"}, "thinking.type", "'disabled'"),
    ],
)  # fmt: skip
def test_what_is_told_is_of_the_member_that_is_meant(
    kind: Any, field: str, value: Any, path: str, says: str
) -> None:
    body = {"model": "m", "max_tokens": 1, "messages": [USER], field: value}
    with pytest.raises(ValidationError) as refused:
        kind.model_validate(body)
    found = faults(refused.value.errors(), body)
    assert [each.path for each in found] == [path] and says in found[0].message


def test_places_that_are_not_of_the_body_stay(serve: Any) -> None:
    anna = serve().anna
    told = anna.error("GET", "/v1/chunks", status=400, params={"limit": "many"})
    assert told["param"] == "limit" and "'many'" in told["message"]
    body = {"model": "kvweave", "messages": [USER], "stop": 5}
    told = anna.error("POST", "/v1/chat/completions", body, 400)
    assert told["param"] == "stop" and told["message"].startswith("stop: Input should be a string")
