"""Every request has an id that its answer and its errors repeat, and a line without content."""

from __future__ import annotations

import json
import logging
import re

import pytest
from serving import run
from starlette.datastructures import Headers
from starlette.responses import StreamingResponse

from kvweave.serve.guard.access_log import AccessLog, request_id
from kvweave.serve.guard.problems import REQUEST_ID, make

NEW = re.compile(r"[0-9a-f]{32}")
A = "Nina's river is wide . so well then we saw it ."


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, "kvweave.access")
    return lambda: [r.getMessage() for r in caplog.records if r.name == "kvweave.access"]


def fields(line):
    return dict(word.split("=", 1) for word in line.split() if "=" in word)


@pytest.mark.parametrize("given", ["a", "req-1_2.3", "x" * 64])
def test_a_clients_id_is_kept(serve, given):
    served = serve()
    found = served.client.get("/health", headers={"X-Request-Id": given})
    assert found.headers["x-request-id"] == given


@pytest.mark.parametrize(
    "given", ["", "x" * 65, "a b", "a\nb", "a\r\nSet-Cookie: b", "\u00fc", "a/b", "a\n"]
)
def test_what_is_no_id_is_replaced(given):
    headers = Headers(raw=[(b"x-request-id", given.encode())])
    assert NEW.fullmatch(request_id(headers))


def test_ids_differ_and_errors_repeat_them(serve):
    served = serve()
    seen = set()
    for path, status in (("/health", 200), ("/v1/chunks", 401), ("/none", 401)):
        found = served.client.get(path)
        assert found.status_code == status
        id = found.headers["x-request-id"]
        assert NEW.fullmatch(id)
        seen.add(id)
        if status != 200:
            assert found.json()["error"]["request_id"] == id
    assert len(seen) == 3
    mine = served.anna.headers | {"X-Request-Id": "mine-1"}
    for method, path, body in (
        ("GET", "/v1/chunks/none", None),
        ("GET", "/v1/none", None),
        ("PUT", "/v1/chunks/a", {"text": 1}),
        ("POST", "/v1/chat/completions", {"messages": []}),
        ("GET", "/metrics", None),
    ):
        found = served.client.request(method, path, json=body, headers=mine)
        assert found.status_code >= 400 and found.json()["error"]["request_id"] == "mine-1", path
    assert REQUEST_ID.get() == ""


def test_a_line_has_what_was_asked_for_but_no_content(serve, lines):
    served = serve()
    name, text = "secret-name", "Nina's river is wide"
    served.anna.put(f"docs/{name}", text)
    headers = served.anna.headers | {"X-Request-Id": "mine-2"}
    found = served.client.get(f"/v1/chunks/docs/{name}", params={"x": "secret"}, headers=headers)
    served.anna.error("GET", "/secret/path", status=404)
    served.client.request("BREW", "/secret", headers=headers)
    put, got, lost, odd = lines()
    assert got.startswith("mine-2 namespace='anna' GET /v1/chunks/{name:path} ")
    told = fields(got)
    assert (told["status"], told["bytes"]) == ("400", str(len(found.content)))
    assert float(told["ms"]) > 0 and "peer" not in told
    assert " PUT /v1/chunks/{name:path} status=201 " in put
    assert " GET none status=404 " in lost and " other none " in odd
    said = "\n".join(lines())
    assert "secret" not in said and "Nina" not in said and "key-of" not in said


def test_who_is_refused_is_a_warning_with_his_address_and_without_the_key(serve, caplog):
    served = serve()
    wrong = {"Authorization": "Bearer key-of-mallory"}
    served.client.get("/v1/chunks/secret", headers=wrong)
    served.anna.error("GET", "/metrics", status=403)
    served.anna("GET", "/v1/status")
    first, second = [r for r in caplog.records if r.name == "kvweave.access"]
    assert first.levelno == second.levelno == logging.WARNING
    assert fields(first.getMessage())["peer"] == "testclient"
    assert "status=401" in first.getMessage() and "namespace=''" in first.getMessage()
    assert "status=403" in second.getMessage() and "namespace='anna'" in second.getMessage()
    assert "key-of" not in caplog.text and "secret" not in caplog.text


def test_a_stream_counts_until_its_end(serve, lines):
    served = serve()
    body = {"model": "kvweave", "max_tokens": 3, "stream": True}
    body |= {"messages": [{"role": "user", "content": A}]}
    found = served.client.post("/v1/chat/completions", json=body, headers=served.anna.headers)
    assert found.status_code == 200 and "x-request-id" in found.headers
    (line,) = lines()
    assert fields(line)["bytes"] == str(len(found.content)) and A not in line


class Played:
    """One request played to the bare middleware; a client that leaves after ``n`` messages."""

    def __init__(self, app, leaves_after=None, **scope):
        self.sent, self.n = [], leaves_after
        self.scope = {
            "type": "http", "method": "GET", "path": "/", "headers": [], "client": ("10.0.0.7", 1),
            "asgi": {"spec_version": "2.4"}, "state": {"tenant": "anna"},
        } | scope  # fmt: skip
        run(AccessLog(app)(self.scope, self.receive, self.send))

    async def receive(self):
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(self, message):
        if len(self.sent) == self.n:
            raise OSError
        self.sent.append(message)


def test_an_error_in_a_stream_has_the_id_of_its_request():
    async def events():
        yield b"one"
        yield json.dumps(make(500, "x").body)

    async def app(scope, receive, send):
        await StreamingResponse(events())(scope, receive, send)

    found = Played(app, headers=[(b"x-request-id", b"mine-3")])
    assert dict(found.sent[0]["headers"])[b"x-request-id"] == b"mine-3"
    assert b'"request_id": "mine-3"' in found.sent[2]["body"]


def test_a_stream_that_breaks_off_has_its_line_too(lines):
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"four", "more_body": True})
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Played(app)
    assert fields(lines()[0])["bytes"] == "4" and "status=200" in lines()[0]

    async def nothing(scope, receive, send):
        pass

    Played(nothing)
    assert "status=499 bytes=0" in lines()[1]


def test_a_head_has_no_bytes(serve, lines):
    served = serve()
    served.client.head("/")
    assert fields(lines()[0])["bytes"] == "0" and "HEAD / " in lines()[0]
