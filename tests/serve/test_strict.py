"""A parameter nobody knows is refused, wherever it stands: nothing is done as if it were not there."""

from __future__ import annotations

import re
from typing import Any

import pytest

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
