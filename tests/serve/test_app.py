"""The app as a whole, behind a real socket where that matters, and `kvweave serve`."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving import BUNDLED, METRICS_KEY

from kvweave import Engine
from kvweave.cli import parser
from kvweave.cli.serve import keys_of, options_of
from kvweave.errors import InvalidArgument, StoreError
from kvweave.serve import listening as server_module
from kvweave.serve.listening import listen, url_of
from kvweave.serve.options import Options
from kvweave.serve.server import Server

A = "Nina's river is wide . so well then we saw it ."


def scrape(served):
    text = served.client.get("/metrics", headers=headers(METRICS_KEY)).text
    families = text_string_to_metric_families(text)
    return {(s.name, *sorted(s.labels.values())): s.value for f in families for s in f.samples}


# ---- health, metrics, description


def test_health_needs_no_key_and_says_when_the_server_stops(serve):
    served = serve(model_name="m")
    told = served.nobody("GET", "/health")
    assert {k: told[k] for k in ("status", "model", "waiting", "active")} == {
        "status": "ok", "model": "m", "waiting": 0, "active": 0,
    }  # fmt: skip
    served.driver.refuse()
    assert served.nobody("GET", "/health", status=503)["status"] == "stopping"
    refused = served.client.put("/v1/chunks/a", json={"text": A}, headers=served.anna.headers)
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "overloaded"
    assert refused.headers["retry-after"] == "10"
    assert served.client.get("/metrics", headers=headers(METRICS_KEY)).status_code == 200


def test_metrics_count_exactly(serve):
    served = serve()
    anna = served.anna
    anna.put("docs/a", A)
    anna.error("PUT", "/v1/chunks/docs/a", {"text": "so"}, 409)
    anna.error("GET", "/v1/chunks/secret-name", status=404)
    anna.error("GET", "/v1/secret-path", status=404)
    anna("POST", "/v1/contexts", {"name": "c", "system": A}, 201)
    anna("POST", "/v1/contexts/c:append", {"chunk": "docs/a"})
    answer = anna("POST", "/v1/contexts/c:ask", {"content": A, "max_tokens": 3, "ignore_eos": True})
    served.settle()
    found = scrape(served)
    assert found["kvweave_requests_total", "/v1/chunks/{name:path}", "201", "PUT"] == 1
    assert found["kvweave_requests_total", "/v1/chunks/{name:path}", "409", "PUT"] == 1
    assert found["kvweave_requests_total", "/v1/chunks/{name:path}", "404", "GET"] == 1
    assert found["kvweave_requests_total", "404", "GET", "none"] == 1
    for kind in ("exact", "reused", "repaired", "prefilled"):
        assert found["kvweave_tokens_total", kind] == answer["usage"]["kv"][kind]
    assert found["kvweave_tokens_total", "generated"] == 3
    assert found["kvweave_answers_total", "length"] == 1
    assert found["kvweave_ttft_seconds_count",] == found["kvweave_wait_seconds_count",] == 1
    assert found["kvweave_contexts",] == 1 and found["kvweave_steps",] >= 3
    assert found["kvweave_kv_bytes", "ram"] == served.on_engine(lambda engine: engine.shelf.n_bytes)
    assert found["kvweave_vector_bytes",] == 0
    assert found["kvweave_kv_budget_bytes",] == served.engine.shelf.budget
    if sys.platform == "linux":
        assert found["process_resident_memory_bytes",] > 1 << 20
    assert not [key for key in found if "secret" in str(key) or "anna" in str(key)]


def test_metrics_need_a_key_of_their_own(serve):
    served = serve()
    assert served.nobody.error("GET", "/metrics", status=401)
    refused = served.anna.error("GET", "/metrics", status=403)
    assert "--metrics-key" in refused["hint"]
    for path in ("/v1/status", "/v1/chunks", "/metrics/"):  # it opens nothing else
        found = served.client.get(path, headers=headers(METRICS_KEY))
        assert found.status_code == 401 and found.json()["error"]["code"] == "invalid_api_key"


def test_nobody_sees_metrics_when_there_are_keys_and_none_of_metrics(serve):
    served = serve(metrics_key=None)
    assert served.anna.error("GET", "/metrics", status=403)
    assert served.nobody.error("GET", "/metrics", status=401)


def test_metrics_of_an_open_server_are_open(serve):
    served = serve(keys={})
    assert served.client.get("/metrics").status_code == 200


def test_the_description_names_every_route_its_errors_and_no_other_host(serve):
    served = serve()
    told = served.nobody("GET", "/openapi.json")
    routes = {(method.upper(), path) for path, ways in told["paths"].items() for method in ways}
    for wanted in (
        ("PUT", "/v1/chunks/{name}"),
        ("POST", "/v1/contexts/{name}:ask"),
        ("GET", "/v1/status"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/contexts:compose"),
    ):
        assert wanted in routes
    ids = [way["operationId"] for ways in told["paths"].values() for way in ways.values()]
    assert len(set(ids)) == len(ids)
    for path, ways in told["paths"].items():
        for method, way in ways.items():
            assert way.get("summary") or way.get("description"), f"{method} {path}"
            if path.startswith("/v1/"):
                assert "401" in way["responses"], f"{method} {path}"
    assert "422" not in json.dumps(
        [list(w["responses"]) for p in told["paths"].values() for w in p.values()]
    )
    assert not re.search(r"https?://", json.dumps(told["paths"]))
    for path in ("/docs", "/redoc"):
        assert served.anna.error("GET", path, status=404)


def test_a_stored_chunk_is_found_in_a_chat_that_has_its_text(serve):
    served = serve(min_match=4)
    text = f"{A} Yuki's metal is sharp . so well . she went home with them ."
    n = served.anna.put("docs/a", text)["n_tokens"]
    body = {"model": "kvweave", "max_tokens": 2, "messages": [{"role": "user", "content": text}]}
    mine = served.anna("POST", "/v1/chat/completions", body)["usage"]["kv"]
    theirs = served.berta("POST", "/v1/chat/completions", body)["usage"]["kv"]
    assert mine["reused"] >= n - 3 and theirs["reused"] == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"port": 70000},
        {"max_waiting": 0},
        {"max_body": -1},
        {"reuse": "some"},
        {"max_sessions": -1},
        {"quota": 0},
        {"keys": {"key-of-anna": "a/b"}},
        {"metrics_key": "key-of-metrics"},  # the server is open: it would protect nothing
        {"keys": {"key-of-anna": ""}, "metrics_key": ""},
        {"keys": {"key-of-anna": ""}, "metrics_key": "short"},
        {"keys": {"key-of-anna": ""}, "metrics_key": "key-of-anna"},
        {"allowed_hosts": ("",)},
        {"allowed_hosts": ("*",)},
        {"allowed_hosts": ("*.example",)},
        {"allowed_hosts": ("http://box.example",)},
        {"allowed_hosts": ("box.example:8700",)},
        {"allowed_hosts": ("box.example", "b\u00f6x.example")},
    ],
)
def test_options_that_make_no_sense_are_refused(wrong):
    with pytest.raises(InvalidArgument):
        Options(**wrong)


# ---- behind a socket


@contextmanager
def listening(served):
    """Serve an app on a free port, in a thread; yields the port."""
    ready = threading.Event()
    with listen("127.0.0.1", 0) as sock:
        server = Server(served.app, ready.set, grace=5)
        thread = threading.Thread(target=server.run, args=([sock],))
        thread.start()
        try:
            assert ready.wait(30)
            assert url_of(sock) == f"http://127.0.0.1:{sock.getsockname()[1]}"
            yield sock.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(30)
            assert not thread.is_alive()


def test_small_packets_are_sent_at_once():
    async def accepted(sock):
        told = asyncio.get_running_loop().create_future()

        async def on_client(reader, writer):
            sock = writer.get_extra_info("socket")
            told.set_result(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()
            await writer.wait_closed()

        server = await asyncio.start_server(on_client, sock=sock)
        _, writer = await asyncio.open_connection(*sock.getsockname())
        try:
            return await told
        finally:
            writer.close()
            await writer.wait_closed()
            server.close()
            await server.wait_closed()

    assert asyncio.run(accepted(listen("127.0.0.1", 0))) == 1


@pytest.fixture
def bound(serve):
    """An app whose only lifespan is the real server's, and its port."""
    served = serve(start=False)
    with listening(served) as port:
        yield served, port


def connected(port):
    return http.client.HTTPConnection("127.0.0.1", port, timeout=20)


def headers(key="key-of-anna"):
    return {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}


def sent(port, method, path, body=None):
    connection = connected(port)
    connection.request(method, path, None if body is None else json.dumps(body), headers())
    answer = connection.getresponse()
    found = answer.status, json.loads(answer.read())
    connection.close()
    return found


def load(served):
    return [served.driver.stats()[key] for key in ("active", "waiting")]


def until(true, seconds=10):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.01)


@pytest.mark.parametrize("stream", [True, False])
def test_hanging_up_frees_the_rows_of_an_answer(bound, stream):
    served, port = bound
    assert sent(port, "POST", "/v1/contexts", {"name": "c", "system": A})[0] == 201
    connection = connected(port)
    body = {"content": A, "max_tokens": 3000, "ignore_eos": True, "stream": stream}
    connection.request("POST", "/v1/contexts/c:ask", json.dumps(body), headers())
    until(lambda: served.driver.stats()["tokens"] > 2)
    if stream:
        answer = connection.getresponse()
        assert answer.readline().startswith(b"data: ")
        answer.close()
    connection.close()
    until(lambda: served.driver.stats()["active"] == 0)
    assert served.driver.stats()["cancelled"] == 1 and served.driver.stats()["tokens"] < 3000
    status, view = sent(port, "GET", "/v1/contexts/c")
    assert status == 200 and view["busy"] is False
    assert sent(port, "DELETE", "/v1/contexts/c")[0] == 200
    asked = sent(port, "GET", "/v1/status")[1]
    assert asked["contexts"] == 0 and asked["history"][0]["finish"] == "cancelled"


@pytest.mark.parametrize("verb", ["DELETE", ":drop", ":generate", ":ask"])
def test_who_hung_up_is_not_refused_for_the_answer_left(bound, verb, monkeypatch):
    """By a plain HTTP client, and a server that notices some looks later."""
    served, port = bound
    looks, is_busy = iter([True] * 3), served.driver.is_busy
    monkeypatch.setattr(served.driver, "is_busy", lambda c: is_busy(c) or next(looks, False))
    assert sent(port, "POST", "/v1/contexts", {"name": "c"})[0] == 201
    connection = connected(port)
    body = {"content": A, "max_tokens": 3000, "ignore_eos": True, "stream": True}
    connection.request("POST", "/v1/contexts/c:ask", json.dumps(body), headers())
    reply = connection.getresponse()
    assert reply.readline().startswith(b"data: ")
    reply.close()
    connection.close()
    looks = iter([True] * 3)  # the first answer took some
    body = {
        ":drop": {"parts": [0]},
        ":generate": {"max_tokens": 1},
        ":ask": {"content": A, "max_tokens": 1},
    }
    method, path = ("DELETE", "") if verb == "DELETE" else ("POST", verb)
    status, told = sent(port, method, f"/v1/contexts/c{path}", body.get(verb))
    assert status == 200, told


def test_at_the_end_running_answers_are_finished_and_waiting_ones_refused(serve):
    served = serve(start=False, max_active=1)
    found = {}

    def ask(name):
        body = {"content": A, "max_tokens": 40, "ignore_eos": True}
        found[name] = sent(port, "POST", f"/v1/contexts/{name}:ask", body)

    with listening(served) as port:
        for name in ("run", "wait"):
            sent(port, "POST", "/v1/contexts", {"name": name, "system": A})
        real = served.engine.loop.step
        served.engine.loop.step = lambda: (time.sleep(0.02), real())[1]
        threads = [threading.Thread(target=ask, args=(name,)) for name in ("run", "wait")]
        for thread, wanted in zip(threads, ([1, 0], [1, 1]), strict=True):
            thread.start()
            until(lambda wanted=wanted: load(served) == wanted)
    for thread in threads:
        thread.join(20)
    assert found["run"][0] == 200 and len(found["run"][1]["tokens"]) == 40
    assert found["wait"][0] == 503 and found["wait"][1]["error"]["code"] == "overloaded"


def test_who_sends_headers_too_slowly_is_hung_up_on(serve, monkeypatch):
    monkeypatch.setattr(server_module, "HEADER_SECONDS", 0.3)
    served = serve(start=False)
    with listening(served) as port:
        with socket.create_connection(("127.0.0.1", port), 10) as slow:
            slow.sendall(b"GET /health HTTP/1.1\r\n")
            started = time.monotonic()
            with pytest.raises(ConnectionResetError):
                if slow.recv(1) == b"":
                    raise ConnectionResetError
            assert 0.2 < time.monotonic() - started < 5
        idle = connected(port)  # between two requests a connection may rest for longer
        for _ in range(2):
            idle.request("GET", "/health")
            assert idle.getresponse().read().startswith(b"{")
            time.sleep(0.5)
        idle.sock.sendall(b"GET /hea")
        assert idle.sock.recv(1) == b""  # the second request's headers are waited for no longer
        idle.close()


def test_too_many_headers_are_refused(bound):
    _, port = bound
    with socket.create_connection(("127.0.0.1", port), 10) as rude:
        rude.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 40_000)
        assert rude.recv(12) == b"HTTP/1.1 400"


# ---- the command


def args(*words):
    return parser.parse(["serve", *words])


def test_the_command_reads_its_options(monkeypatch, tmp_path):
    monkeypatch.setenv("KVWEAVE_HOME", str(tmp_path))
    monkeypatch.delenv("KVWEAVE_KEYS", raising=False)
    assert options_of(args()) == Options(model_name="demo")
    (tmp_path / "Model-1B").mkdir()
    found = options_of(
        args(str(tmp_path / "Model-1B"), "--port", "0", "--max-body", "2MiB", "--quota", "1GB")
    )
    assert (found.port, found.max_body, found.quota) == (0, 2 * 2**20, 10**9)
    assert options_of(args("--name", "x", "--reuse", "off")).model_name == "x"


def test_keys_come_from_options_a_file_and_the_environment(monkeypatch, tmp_path):
    file = tmp_path / "keys"
    file.write_text("# ours\nkey-of-anna:anna\n")
    monkeypatch.setenv("KVWEAVE_KEYS", "key-of-root,key-of-anna:anna")
    found = keys_of(args("--keys", str(file), "--key", "key-of-berta:berta"))
    assert found == {"key-of-anna": "anna", "key-of-berta": "berta", "key-of-root": ""}
    with pytest.raises(InvalidArgument, match="two namespaces"):
        keys_of(args("--keys", str(file), "--key", "key-of-anna:other"))
    with pytest.raises(StoreError):
        keys_of(args("--keys", str(tmp_path / "none")))


def test_without_the_extra_the_command_says_what_to_install():
    """In a process of its own, where these packages cannot be found."""
    code = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name in ("fastapi", "uvicorn", "prometheus_client"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
from kvweave.cli import main
raise SystemExit(main(["serve"]))
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 1 and "is not installed" in found.stderr
    assert "hint: pip install 'kvweave[serve]'" in found.stderr


@pytest.mark.slow
def test_the_command_serves_until_it_is_told_to_end(tmp_path):
    """A real process: one line when ready, status 0 after SIGTERM, and what it stored is there."""
    command = [sys.executable, "-m", "kvweave.cli", "serve", "--port", "0", "--json"]
    environment = os.environ | {"KVWEAVE_HOME": str(tmp_path), "KVWEAVE_KEYS": "key-of-anna:anna"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        told = json.loads(process.stdout.readline())
        assert told["url"] == f"http://127.0.0.1:{told['port']}" and told["model"] == "demo"
        assert sent(told["port"], "PUT", "/v1/chunks/a", {"text": A})[0] == 201
        process.terminate()
        assert process.stdout.read() == "" and process.wait(60) == 0
    with Engine(str(BUNDLED), home=tmp_path) as engine:
        assert engine.table.names("anna") == ["a"]
        assert engine.table.resolve("a", "anna").tier == "disk"
