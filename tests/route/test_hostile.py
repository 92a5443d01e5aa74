"""What strangers send, and what must not pass from one hop to the next."""

from __future__ import annotations

import json
import socket

import pytest
from routing import CHAT, Reply, answered

from kvweave.errors import InvalidArgument
from kvweave.route.forward import end_to_end
from kvweave.route.options import RouteOptions, worker_url
from kvweave.route.relay import events

BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()


def raw(router, data):
    """Send bytes, and return all that comes."""
    port = int(router.url.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port), 30) as client:
        client.sendall(data)
        found = b""
        while piece := client.recv(65536):
            found += piece
    return found


def head(*more, length=str(len(BODY)), path=CHAT, host="localhost"):  # noqa: B008
    lines = [f"POST {path} HTTP/1.1", f"Host: {host}", "Content-Type: application/json", *more]
    lines += [] if any(each.startswith("Connection") for each in more) else ["Connection: close"]
    lines += [] if length is None else [f"Content-Length: {length}"]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def test_headers_of_one_hop_stay_there(workers, route):
    [worker] = workers(1, lambda seen: Reply(answered().body, headers={
        "Connection": "X-Secret", "X-Secret": "1", "Keep-Alive": "timeout=9", "X-Told": "2",
        "Server": "theirs", "Proxy-Authenticate": "Basic"}))  # fmt: skip
    router = route([worker], probe=30)
    sent = ["Connection: close, X-Mine", "X-Mine: 1", "TE: trailers", "Upgrade: h2c", "Origin: http://localhost",
            "Proxy-Authorization: Basic abc", "X-Other: 2", "Authorization: Bearer k", "Expect: 100-continue"]  # fmt: skip
    reply = raw(router, head(*sent) + BODY)
    reply = reply.split(b"HTTP/1.1 100 Continue\r\n\r\n")[-1]
    assert reply.startswith(b"HTTP/1.1 200")
    told = reply.split(b"\r\n\r\n")[0].lower()
    assert b"x-told: 2" in told
    for gone in (b"x-secret", b"keep-alive", b"server: theirs", b"proxy-authenticate"):
        assert gone not in told
    [seen] = worker.asked(CHAT)
    assert seen.headers["x-other"] == "2" and seen.headers["authorization"] == "Bearer k"
    assert seen.headers["host"] == worker.name and seen.headers["accept-encoding"] == "identity"
    for gone in ("x-mine", "te", "upgrade", "origin", "proxy-authorization", "expect"):
        assert gone not in seen.headers
    assert seen.body == BODY and len(seen.headers["x-request-id"]) == 32


@pytest.mark.parametrize(
    "data",
    [
        head("Content-Length: 3") + BODY,
        head("Transfer-Encoding : chunked", length=None) + b"0\r\n\r\n",
        head("X-Bad: a\x00b") + BODY,
        head(length="+5") + BODY,
        head("Transfer-Encoding: xchunked", length=None) + BODY,
        b"POST http://evil/ HTTP/9.9\r\n\r\n",
        head(path=f"{CHAT}%0d%0aX-Smuggled:%201") + BODY,
        head(host="evil.example") + BODY,
        head("Origin: http://evil.example") + BODY,
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)  # fmt: skip
def test_what_could_be_read_in_two_ways_reaches_no_worker(workers, route, data):
    [worker] = workers(1)
    router = route([worker], probe=30)
    reply = raw(router, data)
    assert not worker.asked(), reply
    assert not reply or reply.split(b" ")[1][:1] in (b"4", b"5"), reply
    assert router.ask().status_code == 200


def test_what_was_said_in_two_ways_goes_on_in_one(workers, route):
    """Chunks beat a length (RFC 9112, 6.3); the worker gets a length only, so cannot read it otherwise."""
    [worker] = workers(1)
    router = route([worker], probe=30)
    smuggled = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n\r\n"
    chunks = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
    raw(router, head("Transfer-Encoding: chunked", length="3") + chunks + smuggled)
    [seen] = worker.asked()
    assert seen.path == CHAT and seen.body == BODY
    assert seen.headers["content-length"] == str(len(BODY))
    assert "transfer-encoding" not in seen.headers


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400), (b'{"a": NaN}', 400), (b"[" * 300, 400), (b"\xff\xfe", 400), (b"", 200),
        (b"x" * 5000, 413), (b"3", 200), (b"null", 200), (b'{"messages": {"a": [1]}}', 200),
    ],
)  # fmt: skip
def test_malformed_bodies_are_refused_or_left_to_the_worker(workers, route, body, status):
    both = workers(2)
    router = route(both, probe=30, max_body=4096)
    with router.client() as client:
        reply = client.post(CHAT, content=body, headers={"Content-Type": "application/json"})
    assert reply.status_code == status, reply.text
    if status != 200:
        assert reply.json()["error"]["code"] and not any(w.asked() for w in both)


def test_vllm_has_no_contexts_and_no_chunks(workers, route):
    plain = workers(1, lambda seen: Reply({"detail": "Not Found"}, 404))
    router = route(plain, probe=30)
    with router.client() as client:
        for method, path in (
            ("GET", "/v1/contexts"), ("POST", "/v1/contexts"), ("GET", "/v1/chunks"), ("PUT", "/v1/chunks/a"),
            ("GET", "/v1/contexts/a"), ("DELETE", "/v1/chunks/a"), ("POST", "/v1/contexts/a:ask"),
        ):  # fmt: skip
            reply = client.request(
                method, path, json={"name": "a"} if method in ("POST", "PUT") else None
            )
            assert reply.status_code == 501 and "kvweave" in reply.json()["error"]["hint"], path
    assert not plain[0].asked()
    mixed = [*workers(1, lambda seen: Reply({"data": [], "next": None}), ours=True), *plain]
    with route(mixed, probe=30).client() as client:
        assert client.get("/v1/contexts").json()["data"] == []
        assert client.get("/v1/chunks").status_code == 200 and not plain[0].asked()


def test_a_large_body_goes_through_whole(workers, route):
    both = workers(2)
    router = route(both, probe=30)
    text = "wort " * 400_000
    assert router.ask(text).status_code == 200
    [seen] = [s for w in both for s in w.asked(CHAT)]
    assert seen.json["messages"][0]["content"] == text
    with router.client() as client:
        reply = client.post(CHAT, content=iter([b'{"messages"', b": []}"]))  # chunked
        assert reply.status_code == 200


def test_the_routers_own_view_takes_its_own_key(workers, route):
    both = workers()
    router = route(both, probe=30, key="key-of-operator")
    paths = [
        ("GET", "/v1/workers"),
        ("GET", "/metrics"),
        ("POST", f"/v1/workers/{both[0].name}:drain"),
    ]
    for method, path in paths:
        for key in ("", "key-of-somebody"):
            with router.client(key) as client:
                reply = client.request(method, path)
                assert reply.status_code == 401 and "--key-file" in reply.json()["error"]["hint"]
        with router.client("key-of-operator") as client:
            reply = client.request(method, path)
            assert reply.status_code == 200 and "key-of" not in reply.text
    assert len(router.state.taking()) == 1
    assert router.ask().status_code == 200, "no other path asks for it"


def test_metrics_and_view_name_nobody_and_no_text(workers, route):
    router = route(workers(2, lambda seen: answered("the secret answer")), probe=30)
    router.ask("a secret question", key="key-of-anna")
    with router.client() as client:
        for path in ("/metrics", "/v1/workers", "/health"):
            text = client.get(path).text
            assert "secret" not in text and "anna" not in text
        assert 'kvweave_route_answers_total{status="200"' in client.get("/metrics").text


@pytest.mark.parametrize(
    "wrong",
    [
        {"workers": []}, {"workers": ["http://a:1", "a:1"]}, {"workers": ["ftp://a"]},
        {"workers": ["http://a:1/v1"]}, {"workers": ["http://u:p@a:1"]}, {"workers": ["http://a:x"]},
        {"policy": "best"}, {"port": 70000}, {"bound": 0.9}, {"probe": 0}, {"host": "0.0.0.0"},
        {"key": "short"}, {"allowed_hosts": ["a/b"]}, {"slots": 0}, {"bound": float("nan")},
    ],
)  # fmt: skip
def test_options_that_make_no_sense_are_refused(wrong):
    with pytest.raises(InvalidArgument):
        RouteOptions(**({"workers": ["http://a:1"]} | wrong))
    assert worker_url("a:1") == "http://a:1" and worker_url("https://a") == "https://a:443"
    assert worker_url("http://[::1]:5/") == "http://[::1]:5"
    assert "key-of" not in repr(RouteOptions(["a:1"], key="key-of-operator"))


def test_hop_headers_by_any_case():
    given = [(b"Connection", b"close, X-A"), (b"X-a", b"1"), (b"TE", b"x"), (b"Ok", b"2")]
    assert end_to_end(given, frozenset()) == [(b"ok", b"2")]


@pytest.mark.parametrize("n", [1, 2, 3, 7, 1000])
def test_events_are_whole_however_they_come(n):
    import asyncio

    data = b'data: 1\n\ndata: {"a": "b"}\r\n\r\n: waiting\n\ndata: [DONE]\n\ndata: cut'

    async def pieces():
        for at in range(0, len(data), n):
            yield data[at : at + n]

    async def run():
        return [found async for found in events(pieces())]

    found = asyncio.run(run())
    assert b"".join(found) == data.removesuffix(b"data: cut")
    assert all(each.endswith((b"\n\n", b"\r\n\r\n")) for each in found)
