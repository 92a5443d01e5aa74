"""What the client makes of a server's answers, without a server: errors, retries, streams, paths.

`test_client_server.py` has the real one.
"""

from __future__ import annotations

import json
import subprocess
import sys

import httpx
import pytest

from kvweave import Client, errors
from kvweave.chunk.files import Entry
from kvweave.client import http
from kvweave.errors import KeyRefused, KVWeaveError, Overloaded, Unreachable
from kvweave.serve.guard.problems import problem_of

URL = "http://127.0.0.1:9"  # nothing listens there
ENTRY = {
    "name": "docs/a", "id": 7, "n_tokens": 3, "n_bytes": 36, "kind": "document", "tier": "ram",
    "pinned": False, "refs": 1, "created": 1.0, "last_used": 2.0, "n_uses": 0,
}  # fmt: skip


class Fake:
    """Answers requests from a list, in order; keeps the requests."""

    def __init__(self, *answers):
        self.answers, self.requests = list(answers), []

    def __call__(self, request):
        self.requests.append(request)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def client(self, **options):
        return Client(URL, transport=httpx.MockTransport(self), **options)


def client_of(*answers, **options):
    return Fake(*answers).client(**options)


def refusal(error):
    problem = problem_of(error)
    return httpx.Response(problem.status, json=problem.body, headers=problem.headers)


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch):
    monkeypatch.delenv("KVWEAVE_URL", raising=False)
    monkeypatch.delenv("KVWEAVE_KEY", raising=False)


@pytest.fixture
def waits(monkeypatch):
    """Seconds the client slept, without sleeping."""
    slept = []
    monkeypatch.setattr(http.time, "sleep", slept.append)
    return slept


# --- errors

TOLD = [
    errors.ChunkNotFound("docs/aa", ("docs/a", "docs/b")),
    errors.ContextNotFound("chat/1", ("chat/2",)),
    errors.NameTaken("docs/a", 7),
    errors.InvalidName("a*", "a glob"),
    errors.ChunkPinned("docs/a", 7),
    errors.ChunkInUse("docs/a", 7, ("chat/1",)),
    errors.EmptyChunk("docs/a"),
    errors.CannotMove("it has no rotation"),
    errors.ModelMismatch("dtype", "float32", "bfloat16"),
    errors.HoleNotFilled("docs"),
    errors.ContextTooLong(5000, 4096),
    errors.InvalidArgument("limit", "-1 is negative", "give 0 or more"),
    errors.OverBudget(10, 5, 2),
    errors.OverQuota("chunks", 1, 9, 9),
    Overloaded(61.0),
]


@pytest.mark.parametrize("error", TOLD, ids=lambda e: type(e).__name__)
def test_an_error_comes_back_as_it_was_raised(error):
    with pytest.raises(KVWeaveError) as caught:
        client_of(refusal(error)).files.stat("docs/a")
    assert type(caught.value) is type(error)
    assert (caught.value.message, caught.value.hint) == (error.message, error.hint)
    assert caught.value.data == error.data and str(caught.value) == str(error)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (httpx.Response(500, json={"error": {"message": "the server failed", "id": "a1"}}), "the server failed"),
        (httpx.Response(502, text="<html>bad gateway"), "the server answers with status 502"),
        (httpx.Response(404, json=["not", "ours"]), "the server answers with status 404"),
    ],
)  # fmt: skip
def test_an_unknown_error_is_a_server_error_with_its_status(answer, message):
    with pytest.raises(errors.ServerError) as caught:
        client_of(answer).files.ls()
    assert caught.value.message == message and caught.value.status == answer.status_code


def test_a_malformed_request_is_an_invalid_argument():
    body = {"error": {"message": "limit: too small", "param": "limit", "code": "invalid_request"}}
    with pytest.raises(errors.InvalidArgument, match="limit: too small") as caught:
        client_of(httpx.Response(400, json=body)).files.ls(limit=-1)
    assert caught.value.argument == "limit"


@pytest.mark.parametrize("status", [401, 404, 500])
def test_an_error_has_the_id_of_its_request_beside_its_data(status):
    body = {"error": {"message": "x", "code": "chunk_not_found", "name": "a", "request_id": "r-1"}}
    with pytest.raises(errors.KVWeaveError) as caught:
        client_of(httpx.Response(status, json=body)).files.ls()
    assert caught.value.request_id == "r-1" and "request_id" not in caught.value.data
    assert errors.ChunkNotFound("a").request_id == ""


def test_a_wrong_key_hints_at_the_variable():
    body = {"error": {"message": "the API key is not known", "code": "invalid_api_key"}}
    with pytest.raises(KeyRefused, match="the API key is not known") as caught:
        client_of(httpx.Response(401, json=body), key="secret-1").files.ls()
    assert "KVWEAVE_KEY" in caught.value.hint and "secret-1" not in repr(caught.value)


def test_what_is_no_kvweave_server_is_told():
    with pytest.raises(Unreachable, match="what answers there is no kvweave server"):
        client_of(httpx.Response(200, text="<html>hello")).files.ls()


def test_without_a_server_it_says_how_to_start_one():
    with Client(URL) as client, pytest.raises(Unreachable) as caught:
        client.files.ls()
    assert caught.value.url == URL and URL in caught.value.message
    assert "kvweave serve" in caught.value.hint


def test_a_slow_server_is_told():
    with pytest.raises(Unreachable, match="it took too long"):
        client_of(httpx.ReadTimeout("")).put("docs/a", "hi")


# --- retries


def test_a_busy_server_is_asked_again_when_it_says(waits):
    busy = [refusal(Overloaded(n)) for n in (2.0, 3.0)]
    fake = Fake(*busy, httpx.Response(201, json=ENTRY))
    assert fake.client().put("docs/a", "hi") == Entry(**ENTRY)
    assert waits == [2.0, 3.0] and len({r.content for r in fake.requests}) == 1


def test_retries_end(waits):
    fake = Fake(*[refusal(Overloaded(1.0)) for _ in range(3)])
    with pytest.raises(Overloaded) as caught:
        fake.client(retries=2).files.ls()
    assert waits == [1.0, 1.0] and caught.value.retry_after == 1.0
    with pytest.raises(Overloaded):
        client_of(refusal(Overloaded(1.0)), retries=0).files.ls()


@pytest.mark.parametrize(
    "error", [errors.OverQuota("chunks", 1, 9, 9), errors.OverBudget(10, 5, 2), Overloaded(61.0)]
)
def test_what_waiting_does_not_help_is_raised_at_once(waits, error):
    with pytest.raises(type(error)):
        client_of(refusal(error)).put("docs/a", "hi")
    assert waits == []


def test_a_broken_connection_is_tried_again_only_by_what_reads():
    listing = httpx.Response(200, json={"data": [ENTRY]})
    assert client_of(httpx.ReadError("reset"), listing).files.ls() == [Entry(**ENTRY)]
    gone = httpx.RemoteProtocolError("Server disconnected without sending a response.")
    assert client_of(gone, gone, listing).files.ls() == [Entry(**ENTRY)]
    with pytest.raises(Unreachable, match="reset"):
        client_of(httpx.ReadError("reset"), listing).files.rm("docs/a")


# --- what is sent


def test_url_and_key_come_from_arguments_then_variables(monkeypatch):
    assert Client().url == "http://127.0.0.1:8700"
    monkeypatch.setenv("KVWEAVE_URL", URL + "/")
    monkeypatch.setenv("KVWEAVE_KEY", "from-variable")
    for options, wanted in (({}, "from-variable"), ({"key": "given"}, "given")):
        fake = Fake(httpx.Response(200, json={"status": "ok"}))
        client = Client(transport=httpx.MockTransport(fake), **options)
        assert client.url == URL and client.health() == {"status": "ok"}
        assert fake.requests[0].headers["authorization"] == f"Bearer {wanted}"
        assert wanted not in repr(client)
    assert Client("http://h:1").url == "http://h:1"
    assert Client("http://h:1/v1/").url == "http://h:1", "as OpenAI's clients want it"


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8700", "ftp://h", "http://", "http://h:port", "http://me:secret@h"]
)
def test_wrong_addresses_are_refused(url):
    with pytest.raises(errors.InvalidArgument) as caught:
        Client(url)
    assert caught.value.argument == "url" and "secret" not in str(caught.value)


@pytest.mark.parametrize("key", ["line\nbreak", "schlüssel"])
def test_a_key_that_fits_no_header_is_refused(key):
    with pytest.raises(errors.InvalidArgument) as caught:
        Client(URL, key)
    assert caught.value.argument == "key" and key not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("docs/faq", "/v1/chunks/docs/faq"),
        ("#17", "/v1/chunks/%2317"),
        ("docs/**", "/v1/chunks/docs/%2A%2A"),
        ("a b?c=d", "/v1/chunks/a%20b%3Fc%3Dd"),
        ("wiki/Überlingen", "/v1/chunks/wiki/%C3%9Cberlingen"),
    ],
)
def test_names_are_quoted_in_paths(name, path):
    fake = Fake(httpx.Response(200, json={"data": []}))
    assert fake.client().files.rm(name) == []
    assert fake.requests[0].url.raw_path.decode().split("?dry_run")[0] == path


@pytest.mark.parametrize("name", ["", ".", "..", "../contexts/a", "docs/../../contexts/a"])
def test_a_name_cannot_lead_to_another_route(name):
    fake = Fake()
    for verb in (fake.client().files.stat, fake.client().files.rm, fake.client().close_context):
        with pytest.raises(KVWeaveError):
            verb(name)
    assert fake.requests == []


def test_what_is_none_is_left_out():
    fake = Fake(httpx.Response(200, json={"data": []}))
    fake.client().files.find("**", pinned=False, min_tokens=3)
    assert dict(fake.requests[0].url.params) == {
        "pattern": "**",
        "pinned": "false",
        "min_tokens": "3",
    }


def test_a_server_shows_only_the_keys_own():
    with pytest.raises(errors.InvalidArgument, match="shows each key its own"):
        client_of().files.du(all_namespaces=True)


def test_put_many_removes_the_new_names_when_one_fails():
    made = httpx.Response(201, json=ENTRY)
    fake = Fake(made, refusal(errors.EmptyChunk("docs/b")), httpx.Response(200, json={"data": []}))
    told = []
    with pytest.raises(errors.EmptyChunk):
        fake.client().put_many([("docs/a", "hi"), ("docs/b", "")], progress=told.append)
    sent = [(r.method, r.url.path) for r in fake.requests]
    assert sent[1:] == [("PUT", "/v1/chunks/docs/b"), ("DELETE", "/v1/chunks/docs/a")]
    assert told == [3]


def test_put_many_checks_all_names_first():
    fake = Fake()
    with pytest.raises(errors.InvalidName):
        fake.client().put_many([("docs/a", "hi"), ("b*", "ho")])
    assert fake.requests == []


# --- streams


class Lines(httpx.SyncByteStream):
    """A body in pieces; keeps whether it was closed."""

    def __init__(self, *pieces):
        self.pieces, self.closed, self.n_read = pieces, False, 0

    def __iter__(self):
        for piece in self.pieces:
            self.n_read += 1
            if isinstance(piece, Exception):
                raise piece
            yield piece.encode()

    def close(self):
        self.closed = True


def event(value):
    return f"data: {json.dumps(value)}\n\n"


def stream_of(body):
    answer = httpx.Response(200, stream=body, headers={"content-type": "text/event-stream"})
    return client_of(answer)._http.events("/v1/contexts/c:generate", {"stream": True})


def test_events_may_be_cut_anywhere():
    text = ": hello\n\n" + event({"text": "é"}) + event({"text": "b"}) + "data: [DONE]\n\n"
    whole = [{"text": "é"}, {"text": "b"}]
    for at in range(1, len(text)):
        assert list(stream_of(Lines(text[:at], text[at:]))) == whole


def test_closing_a_stream_hangs_up():
    body = Lines(event({"text": "a"}), event({"text": "b"}), "data: [DONE]\n\n")
    found = stream_of(body)
    assert next(found) == {"text": "a"} and not body.closed
    found.close()
    assert body.closed and body.n_read == 1


@pytest.mark.parametrize(
    "end", ["", httpx.RemoteProtocolError("peer closed connection"), "data: {\n\n"]
)
def test_a_stream_that_breaks_off_is_an_error(end):
    body = Lines(event({"text": "a"}), end)
    found = stream_of(body)
    assert next(found) == {"text": "a"}
    with pytest.raises(Unreachable):
        next(found)
    assert body.closed


def test_an_error_in_a_stream_is_raised():
    error = errors.OverBudget(10, 5, 2)
    body = Lines(event({"text": "a"}), event(problem_of(error).body))
    found = stream_of(body)
    next(found)
    with pytest.raises(errors.OverBudget) as caught:
        next(found)
    assert caught.value.data == error.data and body.closed


def test_a_stream_is_asked_for_again_when_the_server_is_busy(waits):
    good = httpx.Response(200, stream=Lines(event({"text": "a"}), "data: [DONE]\n\n"))
    client = client_of(refusal(Overloaded(4.0)), good)
    assert list(client._http.events("/x", {})) == [{"text": "a"}] and waits == [4.0]


# --- without the extra


def test_without_httpx_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(http, "httpx", None)
    with pytest.raises(errors.ServerError) as caught:
        Client(URL)
    assert "pip install 'kvweave[" in caught.value.hint


def test_neither_kvweave_nor_the_client_loads_torch():
    code = (
        "import sys, kvweave; print('httpx' in sys.modules);"
        "kvweave.Client('http://h:1'); print('torch' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.stdout.split() == ["False", "False"], found.stderr
