"""What is sent again and what never is; what a client sees of a worker that dies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading

import httpx
import pytest
from httpcore._async.http11 import AsyncHTTP11Connection
from routing import CHAT, DIE, DONE, FakeWorker, Reply, answered, event, streamed, until

from kvweave.route.forward import whole
from kvweave.route.relay import Passing


def first_asked(workers, router, text="hi"):
    """The worker that a text goes to, and the other one."""
    assert router.ask(text).status_code == 200
    one = next(w for w in workers if w.asked(CHAT))
    for worker in workers:
        worker.seen.clear()
    return one, next(w for w in workers if w is not one)


def test_a_worker_that_dies_before_the_first_byte_is_replaced_by_another(workers, route):
    both = workers()
    router = route(both, probe=30)
    dying, other = first_asked(both, router)
    dying.behave = lambda seen: Reply(pieces=[DIE])
    other.behave = lambda seen: answered("from the other")
    reply = router.ask()
    assert reply.status_code == 200
    assert reply.json()["choices"][0]["message"]["content"] == "from the other"
    assert len(dying.asked(CHAT)) == len(other.asked(CHAT)) == 1
    assert router.retries() == {"died": 1}


def test_a_request_that_kills_workers_does_not_kill_them_all(workers, route):
    three = workers(3, lambda seen: Reply(pieces=[DIE]))
    router = route(three, probe=30)
    reply = router.ask()
    assert reply.status_code == 502 and reply.json()["error"]["code"] == "worker_died"
    assert sum(len(worker.asked(CHAT)) for worker in three) == 2


def test_refused_connections_are_tried_elsewhere_until_none_is_left(workers, route):
    three = workers(3)
    router = route(three, probe=30, failures=99)
    for worker in three:
        worker.stop()
    reply = router.ask()
    error = reply.json()["error"]
    assert reply.status_code == 503 and error["code"] == "worker_down", error
    assert reply.headers["retry-after"] and error["hint"] and error["type"] == "server_error"
    assert router.retries() == {"refused": 3}
    none = router.ask()
    assert none.status_code == 503 and none.json()["error"]["code"] == "no_worker"
    assert int(none.headers["retry-after"]) >= 1
    with router.client() as client:
        assert client.get("/health").status_code == 503


def test_a_worker_that_is_back_is_taken_again(workers, route):
    both = workers()
    router = route(both, probe=0.05)
    dying, other = first_asked(both, router)
    dying.stop()
    assert router.ask().status_code == 200 and len(other.asked(CHAT)) == 1
    until(lambda: router.state.named(dying.name).state == "down", "noticing")
    dying.start()
    until(lambda: router.state.named(dying.name).state == "up", "coming back")
    assert len(router.state.taking()) == 2


def test_health_that_says_no_takes_a_worker_out_after_so_many_probes(workers, route):
    both = workers()
    router = route(both, probe=0.05, failures=3)
    both[0].healthy = False
    until(lambda: not router.state.named(both[0].name).healthy, "noticing")
    assert router.state.named(both[0].name).failures >= 3
    for i in range(6):
        assert router.ask(f"question {i}").status_code == 200
    assert not both[0].asked(CHAT) and len(both[1].asked(CHAT)) == 6
    both[0].healthy = True
    until(lambda: router.state.named(both[0].name).healthy, "coming back")


def test_503_of_a_worker_that_stops_is_tried_elsewhere_and_told_if_all_say_so(workers, route):
    both = workers()
    router = route(both, probe=30)
    stopping, other = first_asked(both, router)
    stopping.behave = lambda seen: Reply({"error": {"code": "overloaded"}}, 503)
    assert router.ask().status_code == 200 and len(other.asked(CHAT)) == 1
    other.behave = stopping.behave
    reply = router.ask()
    assert reply.status_code == 503 and reply.json() == {"error": {"code": "overloaded"}}


@pytest.mark.parametrize("status", [400, 401, 404, 429, 500])
def test_other_refusals_are_told_and_not_tried_again(workers, route, status):
    both = workers(2, lambda seen: Reply({"error": {"code": "x"}}, status, {"Retry-After": "7"}))
    router = route(both, probe=30)
    reply = router.ask()
    assert reply.status_code == status and reply.headers["retry-after"] == "7"
    assert sum(len(worker.asked(CHAT)) for worker in both) == 1
    assert not router.state.tenants.all(), "who was refused is not remembered"


def lines_of(router, **more):
    body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hi"}]}
    with router.client() as client, client.stream("POST", CHAT, json=body | more) as reply:
        assert reply.status_code == 200
        return [line for line in reply.iter_lines() if line]


def test_a_stream_that_breaks_off_ends_with_an_error_and_no_done(workers, route):
    cut = b'data: {"choices": [{"index": 0, "del'
    both = workers(2, lambda seen: streamed(event("one "), event("two "), cut, DIE))
    router = route(both, probe=30)
    lines = lines_of(router)
    told = [json.loads(line.removeprefix("data: ")) for line in lines]  # each is whole
    text = [t["choices"][0]["delta"]["content"] for t in told if "choices" in t]
    assert text == ["one ", "two "] and "data: [DONE]" not in lines
    assert told[-1]["error"]["code"] == "worker_died" and told[-1]["error"]["hint"]
    assert sum(len(worker.asked(CHAT)) for worker in both) == 1, "never sent again"


def test_a_stream_that_ends_early_but_politely_is_no_whole_answer_either(workers, route):
    router = route(workers(2, lambda seen: streamed(event("one "))), probe=30)
    lines = lines_of(router)
    assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "worker_died"


def test_an_error_that_the_worker_tells_is_told_once(workers, route):
    error = b'data: {"error": {"code": "over_budget"}}\n\n'
    router = route(workers(2, lambda seen: streamed(event("one "), error)), probe=30)
    lines = lines_of(router)
    assert len(lines) == 2 and "over_budget" in lines[-1]


def test_an_answer_that_is_cut_short_is_an_error(workers, route):
    both = workers(2, lambda seen: Reply({"choices": []}, length=10_000))
    router = route(both, probe=30)
    reply = router.ask()
    assert reply.status_code == 502 and reply.json()["error"]["code"] == "worker_died"
    assert sum(len(worker.asked(CHAT)) for worker in both) == 1


def test_a_stream_goes_on_event_by_event(workers, route):
    go_on = threading.Semaphore(0)
    reply = streamed(event("one "), event("two "), DONE, between=lambda: go_on.acquire(timeout=60))
    router = route(workers(1, lambda seen: reply), probe=30)
    body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hi"}]}
    go_on.release()
    with router.client() as client, client.stream("POST", CHAT, json=body) as found:
        lines = (line for line in found.iter_lines() if line)
        assert "one " in next(lines)  # the second is not even written yet
        go_on.release()
        assert "two " in next(lines)
        go_on.release()
        assert next(lines) == "data: [DONE]"


@pytest.mark.parametrize("stream", [True, False])
def test_a_hang_up_is_passed_on(workers, route, stream):
    waits = threading.Event()
    endless = [event("x" * 1000)] * 100_000
    made = streamed(*endless) if stream else Reply({}, wait=waits)
    [worker] = workers(1, lambda seen: made)
    router = route([worker], probe=30)
    body = json.dumps({"model": "m", "stream": stream, "messages": []}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    port = int(router.url.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port), 60) as client:
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        until(lambda: bool(worker.asked(CHAT)), "the request")
        if stream:
            client.recv(100)
    until(lambda: not router.state.workers[0].jobs, "letting go of the request")
    if stream:
        until(worker.hung_up.is_set, "the worker's seeing it")
    waits.set()


def test_what_is_slow_is_not_sent_again(workers, route):
    waits = threading.Event()
    both = workers(2, lambda seen: Reply({}, wait=waits))
    router = route(both, probe=30, timeout=0.3)
    reply = router.ask()
    assert reply.status_code == 504 and reply.json()["error"]["code"] == "worker_slow"
    assert sum(len(worker.asked(CHAT)) for worker in both) == 1
    assert all(worker.healthy for worker in router.state.workers), "probes say whether it is there"
    waits.set()


def test_what_a_worker_had_when_probes_gave_it_up_goes_elsewhere(workers, route):
    """A process that is stopped keeps its connections open, and says nothing."""
    waits = threading.Event()
    both = workers()
    router = route(both, probe=0.05)
    stopped, other = first_asked(both, router)
    stopped.behave = lambda seen: Reply({}, wait=waits)
    found = []
    thread = threading.Thread(target=lambda: found.append(router.ask()))
    thread.start()
    until(lambda: bool(stopped.asked(CHAT)), "the request")
    stopped.healthy = False
    thread.join(60)
    waits.set()
    assert found[0].status_code == 200 and len(other.asked(CHAT)) == 1
    assert router.retries() == {"died": 1}
    assert not any(worker.jobs for worker in router.state.workers)


def test_a_verb_on_a_context_is_sent_once_unless_it_has_a_key(workers, route):
    def behave(seen):
        if seen.method == "GET":
            return Reply({}, 404)
        return Reply(pieces=[DIE])

    both = workers(2, behave, ours=True)
    router = route(both, probe=0.05)
    path = "/v1/contexts/chat/1:append"

    def sent():
        return [s for worker in both for s in worker.asked(path) if s.method == "POST"]

    with router.client() as client:
        reply = client.post(path, json={"text": "x"})
        assert reply.status_code == 502 and reply.json()["error"]["code"] == "worker_died"
        assert len(sent()) == 1
        until(lambda: len(router.state.there()) == 2, "coming back")
        reply = client.post(path, json={"text": "x"}, headers={"Idempotency-Key": "a"})
        assert reply.status_code == 502
        assert len(sent()) == 4, "once, and twice more"
        keyed = [s for s in sent() if s.headers.get("idempotency-key") == "a"]
        assert len(keyed) == 3 and len({s.body for s in keyed}) == 1


def test_drained_workers_get_nothing_new_until_they_are_undrained(workers, route):
    both = workers()
    router = route(both)
    first, other = first_asked(both, router)
    with router.client() as client:
        told = client.post(f"/v1/workers/{first.name}:drain").json()
        assert told["state"] == "draining"
        assert router.ask().status_code == 200 and len(other.asked(CHAT)) == 1
        assert client.get("/health").json() == {"status": "degraded", "workers": 2, "taking": 1}
        assert client.post(f"/v1/workers/{other.name}:drain").status_code == 200
        assert router.ask().json()["error"]["code"] == "no_worker"
        assert client.post(f"/v1/workers/{first.name}:undrain").json()["state"] == "up"
        assert router.ask().status_code == 200 and len(first.asked(CHAT)) == 1
        for wrong in ("nobody:1:drain", f"{first.name}:melt", first.name):
            assert client.post(f"/v1/workers/{wrong}").status_code == 404


@pytest.mark.parametrize("stream", [False, True])
def test_a_hang_up_while_a_connection_is_given_back(workers, route, stream, monkeypatch):
    """Its pool would keep it, and a file open, for ever."""
    closed, forward, asking = AsyncHTTP11Connection._response_closed, Passing.__call__, []

    async def cancelled_then(connection):
        asking.pop().cancel()  # as the guard does that watches who asks
        await closed(connection)

    async def call(self, *asgi):
        asking.append(asyncio.current_task())
        await forward(self, *asgi)

    async def body(response):
        asking.append(asyncio.current_task())
        return await whole(response)

    [worker] = workers(1, lambda seen: streamed(event("x"), DONE) if stream else answered())
    router = route([worker], probe=30)
    monkeypatch.setattr(AsyncHTTP11Connection, "_response_closed", cancelled_then)
    monkeypatch.setattr(Passing, "__call__", call)
    monkeypatch.setattr("kvweave.route.completions.whole", body)
    for _ in range(3):
        with contextlib.suppress(httpx.TransportError):
            router.ask(stream=stream)
    assert len(worker.asked(CHAT)) == 3 and not asking
    until(lambda: not router.state.forwarder._fresh._pool.connections)


def test_a_router_that_stops_lets_answers_end(workers, route):
    waits = threading.Event()
    [worker] = workers(1, lambda seen: Reply(answered("at last").body, wait=waits))
    router = route([worker], probe=30)
    found = []
    thread = threading.Thread(target=lambda: found.append(router.ask()))
    thread.start()
    until(lambda: bool(worker.asked(CHAT)), "the request")
    stopping = threading.Thread(target=router.stop)
    stopping.start()
    until(lambda: refuses(router.url), "closing the door")
    waits.set()
    thread.join(60)
    stopping.join(60)
    assert found[0].status_code == 200 and "at last" in found[0].text


def refuses(url):
    try:
        httpx.get(f"{url}/health", timeout=5)
    except httpx.TransportError:
        return True
    return False


@pytest.mark.slow
def test_many_at_once_are_all_answered_though_a_worker_dies(workers, route):
    lock, n = threading.Lock(), [0]

    def some_die(seen):
        with lock:
            n[0] += 1
            dies = n[0] % 7 == 0
        text = seen.json["messages"][0]["content"]
        return Reply(pieces=[DIE]) if dies else answered(f"echo {text}")

    bad, good = FakeWorker(some_die).start(), workers(1, lambda s: answered(
        "echo " + s.json["messages"][0]["content"]))[0]  # fmt: skip
    try:
        router = route([bad, good], probe=0.05)
        found: dict[int, httpx.Response] = {}
        threads = [
            threading.Thread(target=lambda i=i: found.update({i: router.ask(f"q{i}")}))
            for i in range(60)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        bad.stop()
    assert {reply.status_code for reply in found.values()} == {200} and len(found) == 60
    for i, reply in found.items():
        assert reply.json()["choices"][0]["message"]["content"] == f"echo q{i}"
    assert not any(worker.jobs for worker in router.state.workers)
