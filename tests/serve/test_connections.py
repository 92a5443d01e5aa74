"""Many connections, and many requests at once."""

from __future__ import annotations

import asyncio
import json
import socket
import time

import pytest
from needs import need
from serve.test_app import connected, headers, listening

from kvweave.serve import app as app_module
from kvweave.serve import listening as server_module

openai = need("openai")
A = "Nina's river is wide . so well then we saw it ."


@pytest.fixture
def few(serve, monkeypatch):
    monkeypatch.setattr(server_module, "CONNECTIONS", 12)
    served = serve(start=False)
    with listening(served) as port:
        yield served, port


def test_those_that_ask_nothing_make_room_for_those_that_do(few):
    _, port = few
    idle = [socket.create_connection(("127.0.0.1", port), 10) for _ in range(40)]
    try:
        for _ in range(5):
            asking = connected(port)
            asking.request("GET", "/health")
            assert asking.getresponse().status == 200
            asking.close()
        idle[0].settimeout(5)
        with pytest.raises(ConnectionResetError):
            if idle[0].recv(1) == b"":
                raise ConnectionResetError
    finally:
        for each in idle:
            each.close()


def test_where_all_are_being_answered_one_more_is_told_so(few):
    served, port = few
    real = served.engine.loop.step
    served.engine.loop.step = lambda: (time.sleep(0.05), real())[1]
    body = {"model": "kvweave", "prompt": A, "max_tokens": 400, "stream": True}
    busy = []
    for _ in range(12):
        each = connected(port)
        each.request("POST", "/v1/completions", json.dumps(body), headers())
        busy.append(each)
    end = time.monotonic() + 20
    while served.driver.stats()["active"] + served.driver.stats()["waiting"] < 12:
        assert time.monotonic() < end
        time.sleep(0.01)
    more = connected(port)
    more.request("GET", "/health")
    answer = more.getresponse()
    assert answer.status == 503 and answer.getheader("retry-after")
    assert json.loads(answer.read())["error"]["code"] == "overloaded"
    for each in (*busy, more):
        each.close()


@pytest.mark.slow
def test_two_hundred_requests_at_once_are_all_answered(serve):
    served = serve(start=False)

    async def ask(port):
        client = openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="key-of-anna", max_retries=0
        )
        async with client:
            asked = (
                client.chat.completions.create(
                    model="kvweave",
                    messages=[{"role": "user", "content": f"what about {i} . {A}"}],
                    max_tokens=2,
                )
                for i in range(200)
            )
            return await asyncio.gather(*asked)

    with listening(served) as port:
        replies = asyncio.run(ask(port))
    assert len(replies) == 200 and all(reply.usage.completion_tokens for reply in replies)


def test_bodies_under_way_are_bounded_for_each_namespace(serve, monkeypatch):
    served = serve(start=False, max_body=4096)
    real = served.engine.loop.step
    served.engine.loop.step = lambda: (time.sleep(0.02), real())[1]
    body = json.dumps({"model": "kvweave", "prompt": A, "max_tokens": 200}).ljust(4000)
    with listening(served) as port:
        busy = [connected(port) for _ in range(12)]
        for each in busy:
            each.request("POST", "/v1/completions", body, headers())
        time.sleep(0.5)
        refused = busy[8:]
        for each in refused:
            answer = each.getresponse()
            assert answer.status == 429 and answer.getheader("retry-after")
        other = connected(port)
        short = json.dumps({"model": "kvweave", "prompt": A, "max_tokens": 1})
        other.request("POST", "/v1/completions", short, headers("key-of-berta"))
        assert other.getresponse().status == 200
        for each in (*busy, other):
            each.close()


def test_requests_that_never_come_whole_make_room_too(few):
    _, port = few
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: {headers()['Authorization']}\r\n"
    half = [socket.create_connection(("127.0.0.1", port), 10) for _ in range(12)]
    try:
        for each in half:
            each.sendall(
                f"{head}Content-Type: application/json\r\nContent-Length: 9\r\n\r\n{{".encode()
            )
        time.sleep(0.3)
        for _ in range(5):
            asking = connected(port)
            asking.request("GET", "/health")
            assert asking.getresponse().status == 200
            asking.close()
    finally:
        for each in half:
            each.close()


def test_one_namespace_leaves_connections_to_the_others(serve, monkeypatch):
    """However many requests of it wait: for the model, or with a body that does not come."""
    monkeypatch.setattr(server_module, "CONNECTIONS", 12)
    monkeypatch.setattr(app_module, "CONNECTIONS", 12)
    served = serve(start=False)  # for two namespaces, and for those who have no key: 4 each
    real = served.engine.loop.step
    served.engine.loop.step = lambda: (time.sleep(0.05), real())[1]
    body = json.dumps({"model": "kvweave", "prompt": A, "max_tokens": 400})
    with listening(served) as port:
        busy = [connected(port) for _ in range(20)]
        told = []
        for i, each in enumerate(busy):
            each.request("POST", "/v1/completions", body, headers())
            if i >= 4:
                answer = each.getresponse()
                told.append((answer.status, answer.getheader("retry-after")))
        assert told == [(429, "5")] * 16
        other = connected(port)
        short = json.dumps({"model": "kvweave", "prompt": A, "max_tokens": 1})
        other.request("POST", "/v1/completions", short, headers("key-of-berta"))
        assert other.getresponse().status == 200
        for each in (*busy, other):
            each.close()


@pytest.mark.parametrize(
    ("soft", "hard", "most", "asked"),
    [(1024, 2**20, 4096, 4608), (1024, 1024, 512, None), (20_000, 20_000, 4096, None), (256, 256, 1, None)],
)  # fmt: skip
def test_there_are_no_more_connections_than_files(monkeypatch, soft, hard, most, asked):
    told = []
    monkeypatch.setattr(server_module.resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(server_module.resource, "setrlimit", lambda _, both: told.append(both[0]))
    assert server_module.most_connections() == most
    assert told == ([] if soft >= 4608 else [asked or hard])
