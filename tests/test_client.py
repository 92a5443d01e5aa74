"""What the client makes of a server's answers, without a server: errors, retries, streams, paths.

Each test runs with both clients. `test_client_server.py` has a real server.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import MISSING, fields

import httpx
import pytest
from faces import FACES, faces

from kvweave import Sampling, errors
from kvweave.chunk.files import Entry
from kvweave.chunk.identity import ChunkId
from kvweave.client import parse, wires
from kvweave.errors import KeyRefused, KVWeaveError, Overloaded, Unreachable
from kvweave.run.sampling import Choice
from kvweave.serve.guard.problems import problem_of
from kvweave.serve.routes.turns import answer_of
from kvweave.weave.answer import Answer
from kvweave.weave.parts import Part
from kvweave.weave.plan import Plan, Shed, Span

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

    @property
    def sent(self):
        """What was sent: method, path and body of each request."""
        return [
            (r.method, r.url.path, json.loads(r.content) if r.content else None)
            for r in self.requests
        ]


@pytest.fixture(params=FACES)
def make(request):
    """Makes clients of one face."""
    with faces(request.param) as make:
        yield make


@pytest.fixture
def client_of(make):
    """Makes clients of answers, or of a `Fake`."""

    def client(*answers, **options):
        fake = answers[0] if answers and isinstance(answers[0], Fake) else Fake(*answers)
        return make(URL, transport=httpx.MockTransport(fake), **options)

    return client


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

    async def sleep(seconds):
        slept.append(seconds)

    monkeypatch.setattr(wires.time, "sleep", slept.append)
    monkeypatch.setattr(wires.anyio, "sleep", sleep)
    return slept


def test_the_tokens_of_a_context_are_those_of_one_version(client_of):
    """Others may drop a part, and with it its chunk, between two of the requests that this takes."""

    def told(*ids):
        parts = [{"uid": id, "name": "x", "id": id, "start": 1, "n_tokens": 2} for id in ids]
        return httpx.Response(200, json={"name": "chat", "parts": parts, "plan": {}})

    def chunk(*tokens):
        return httpx.Response(200, json=ENTRY | {"tokens": tokens, "text": "x"})

    gone = refusal(errors.ChunkNotFound("#8"))
    answers = [told(), told(7, 8, 7), chunk(1, 2, 3), gone, told(7, 9), chunk(4, 5, 6)]
    with client_of(*answers, told(8), gone, told(8)) as client:
        context = client.get_context("chat")
        assert context.tokens() == [2, 3, 5, 6]
        with pytest.raises(errors.ChunkNotFound):
            context.tokens()


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
    errors.CannotRun("it keeps a state"),
    errors.ModelMismatch("dtype", "float32", "bfloat16"),
    errors.HoleNotFilled("docs"),
    errors.ContextTooLong(5000, 4096),
    errors.InvalidArgument("limit", "-1 is negative", "give 0 or more"),
    errors.OverBudget(10, 5, 2),
    errors.OverQuota("chunks", 1, 9, 9),
    Overloaded(61.0),
]


@pytest.mark.parametrize("error", TOLD, ids=lambda e: type(e).__name__)
def test_an_error_comes_back_as_it_was_raised(client_of, error):
    with pytest.raises(KVWeaveError) as caught:
        client_of(refusal(error)).files.stat("docs/a")
    assert type(caught.value) is type(error)
    assert (caught.value.message, caught.value.hint) == (error.message, error.hint)
    assert caught.value.data == error.data and str(caught.value) == str(error)


@pytest.mark.parametrize(
    ("status", "content", "message"),
    [
        (
            500,
            {"json": {"error": {"message": "the server failed", "id": "a1"}}},
            "the server failed",
        ),
        (502, {"text": "<html>bad gateway"}, "the server answers with status 502"),
        (404, {"json": ["not", "ours"]}, "the server answers with status 404"),
    ],
)
def test_an_unknown_error_is_a_server_error_with_its_status(client_of, status, content, message):
    with pytest.raises(errors.ServerError) as caught:
        client_of(httpx.Response(status, **content)).files.ls()
    assert caught.value.message == message and caught.value.status == status


def test_a_malformed_request_is_an_invalid_argument(client_of):
    body = {"error": {"message": "limit: too small", "param": "limit", "code": "invalid_request"}}
    with pytest.raises(errors.InvalidArgument, match="limit: too small") as caught:
        client_of(httpx.Response(400, json=body)).files.ls(limit=-1)
    assert caught.value.argument == "limit"


@pytest.mark.parametrize("status", [401, 404, 500])
def test_an_error_has_the_id_of_its_request_beside_its_data(client_of, status):
    body = {"error": {"message": "x", "code": "chunk_not_found", "name": "a", "request_id": "r-1"}}
    with pytest.raises(errors.KVWeaveError) as caught:
        client_of(httpx.Response(status, json=body)).files.ls()
    assert caught.value.request_id == "r-1" and "request_id" not in caught.value.data
    assert errors.ChunkNotFound("a").request_id == ""


def test_a_wrong_key_hints_at_the_variable(client_of):
    body = {"error": {"message": "the API key is not known", "code": "invalid_api_key"}}
    with pytest.raises(KeyRefused, match="the API key is not known") as caught:
        client_of(httpx.Response(401, json=body), key="secret-1").files.ls()
    assert "KVWEAVE_KEY" in caught.value.hint and "secret-1" not in repr(caught.value)


def test_what_is_no_kvweave_server_is_told(client_of):
    with pytest.raises(Unreachable, match="what answers there is no kvweave server"):
        client_of(httpx.Response(200, text="<html>hello")).files.ls()


def test_without_a_server_it_says_how_to_start_one(make):
    with make(URL) as client, pytest.raises(Unreachable) as caught:
        client.files.ls()
    assert caught.value.url == URL and URL in caught.value.message
    assert "kvweave serve" in caught.value.hint


def test_a_slow_server_is_told(client_of):
    with pytest.raises(Unreachable, match="it took too long"):
        client_of(httpx.ReadTimeout("")).put("docs/a", "hi")


# --- retries


def test_a_busy_server_is_asked_again_when_it_says(client_of, waits):
    busy = [refusal(Overloaded(n)) for n in (2.0, 3.0)]
    fake = Fake(*busy, httpx.Response(201, json=ENTRY))
    assert client_of(fake).put("docs/a", "hi") == Entry(**ENTRY)
    assert waits == [2.0, 3.0] and len({r.content for r in fake.requests}) == 1


def test_retries_end(client_of, waits):
    fake = Fake(*[refusal(Overloaded(1.0)) for _ in range(3)])
    with pytest.raises(Overloaded) as caught:
        client_of(fake, retries=2).files.ls()
    assert waits == [1.0, 1.0] and caught.value.retry_after == 1.0
    with pytest.raises(Overloaded):
        client_of(refusal(Overloaded(1.0)), retries=0).files.ls()


@pytest.mark.parametrize(
    "error", [errors.OverQuota("chunks", 1, 9, 9), errors.OverBudget(10, 5, 2), Overloaded(61.0)]
)
def test_what_waiting_does_not_help_is_raised_at_once(client_of, waits, error):
    with pytest.raises(type(error)):
        client_of(refusal(error)).put("docs/a", "hi")
    assert waits == []


RESET = httpx.ReadError("reset")


def test_a_broken_connection_is_tried_again_where_twice_is_once(client_of, waits):
    listing = httpx.Response(200, json={"data": [ENTRY]})
    assert client_of(RESET, listing).files.ls() == [Entry(**ENTRY)]
    gone = httpx.RemoteProtocolError("Server disconnected without sending a response.")
    assert client_of(gone, gone, listing).files.ls() == [Entry(**ENTRY)]
    assert waits == [0.1, 0.1, 0.2]
    assert client_of(RESET, listing).files.rm("docs/a") == [Entry(**ENTRY)]
    no_one = httpx.ConnectError("refused")
    assert client_of(no_one, listing).files.rm("docs/a") == [Entry(**ENTRY)]


def test_what_changes_something_has_a_key_by_which_it_is_known_again(client_of, waits):
    made = httpx.Response(201, json=ENTRY)
    fake = Fake(RESET, refusal(Overloaded(1.0)), made, made)
    client = client_of(fake)
    client.put("docs/a", "hi")
    client.put("docs/b", "hi")
    keys = [r.headers["idempotency-key"] for r in fake.requests]
    assert len(set(keys[:3])) == 1 and keys[3] != keys[0] and len(keys[0]) == 36
    fake = Fake(*[httpx.Response(200, json={"data": []})] * 2)
    client = client_of(fake)
    client.files.ls(), client.files.rm("**")
    assert ["idempotency-key" in r.headers for r in fake.requests] == [False, True]


def test_a_server_that_is_starting_is_asked_again(client_of, waits):
    starting = httpx.Response(503, headers={"retry-after": "2"}, json={"error": {"message": "x"}})
    assert client_of(starting, httpx.Response(200, json={"data": []})).files.ls() == []
    assert waits == [2.0]


# --- what is sent


def test_url_and_key_come_from_arguments_then_variables(make, monkeypatch):
    assert make().url == "http://127.0.0.1:8700"
    monkeypatch.setenv("KVWEAVE_URL", URL + "/")
    monkeypatch.setenv("KVWEAVE_KEY", "from-variable")
    well = {"status": "ok", "uptime": 1.0}
    for options, wanted in (({}, "from-variable"), ({"key": "given"}, "given")):
        fake = Fake(httpx.Response(200, json=well))
        client = make(transport=httpx.MockTransport(fake), **options)
        assert client.url == URL and client.health() == well
        assert fake.requests[0].headers["authorization"] == f"Bearer {wanted}"
        assert wanted not in repr(client)


@pytest.mark.parametrize(
    ("url", "wanted"),
    [
        ("http://h:1", "http://h:1"),
        ("http://h:1/v1/", "http://h:1"),  # as OpenAI's clients want it
        ("127.0.0.1:8700", "http://127.0.0.1:8700"),
        ("localhost:8700/", "http://localhost:8700"),
        ("[::1]:8700", "http://[::1]:8700"),
    ],
)
def test_addresses_are_taken_as_people_write_them(make, url, wanted):
    assert make(url).url == wanted


@pytest.mark.parametrize(
    "url", ["h", "ftp://h", "http://", "http://h:port", "http://me:secret@h", "h:port"]
)
def test_wrong_addresses_are_refused(make, url):
    with pytest.raises(errors.InvalidArgument) as caught:
        make(url)
    assert caught.value.argument == "url" and "secret" not in str(caught.value)


@pytest.mark.parametrize("key", ["line\nbreak", "schlüssel"])
def test_a_key_that_fits_no_header_is_refused(make, key):
    with pytest.raises(errors.InvalidArgument) as caught:
        make(URL, key)
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
def test_names_are_quoted_in_paths(client_of, name, path):
    fake = Fake(httpx.Response(200, json={"data": []}))
    assert client_of(fake).files.rm(name) == []
    assert fake.requests[0].url.raw_path.decode().split("?dry_run")[0] == path


@pytest.mark.parametrize("name", ["", ".", "..", "../contexts/a", "docs/../../contexts/a"])
def test_a_name_cannot_lead_to_another_route(client_of, name):
    fake = Fake()
    for verb in (
        client_of(fake).files.stat,
        client_of(fake).files.rm,
        client_of(fake).close_context,
    ):
        with pytest.raises(KVWeaveError):
            verb(name)
    assert fake.requests == []


def test_what_is_none_is_left_out(client_of):
    fake = Fake(httpx.Response(200, json={"data": []}))
    client_of(fake).files.find("**", pinned=False, min_tokens=3)
    assert dict(fake.requests[0].url.params) == {
        "pattern": "**",
        "pinned": "false",
        "min_tokens": "3",
    }


def test_a_server_shows_only_the_keys_own(client_of):
    with pytest.raises(errors.InvalidArgument, match="shows each key its own"):
        client_of().files.du(all_namespaces=True)


def test_put_many_is_one_request(client_of):
    both = [ENTRY, ENTRY | {"name": "docs/b", "n_tokens": 2}]
    fake = Fake(httpx.Response(201, json={"data": both}))
    told = []
    items = [("docs/a", "hi"), ("docs/b", [5, 6])]
    found = client_of(fake).put_many(items, kind="memory", progress=told.append)
    assert [entry.name for entry in found] == ["docs/a", "docs/b"] and told == [3, 2]
    [(method, path, body)] = fake.sent
    assert (method, path) == ("POST", "/v1/chunks:put")
    more = {"kind": "memory", "special_tokens": False}
    assert body == {
        "items": [
            {"name": "docs/a", "text": "hi", **more},
            {"name": "docs/b", "tokens": [5, 6], **more},
        ],
        "replace": False,
        "durable": False,
    }
    assert client_of().put_many([]) == []


def test_put_many_checks_all_names_first(client_of):
    fake = Fake()
    with pytest.raises(errors.InvalidName):
        client_of(fake).put_many([("docs/a", "hi"), ("b*", "ho")])
    assert fake.requests == []


def test_text_may_have_special_tokens(client_of):
    fake = Fake(httpx.Response(201, json=ENTRY))
    client_of(fake).put("docs/a", "<|system|>", special_tokens=True)
    assert fake.sent[0][2]["special_tokens"] is True


# --- lists that come in pages


def page(*names, next=None):
    return httpx.Response(200, json={"data": [ENTRY | {"name": n} for n in names], "next": next})


def test_a_list_is_read_to_its_last_page(client_of):
    fake = Fake(page("a", "b", next="b"), page("c", next="c"), page("d"))
    assert [e.name for e in client_of(fake).files.ls("*")] == ["a", "b", "c", "d"]
    asked = [(r.url.params.get("after"), r.url.params.get("limit")) for r in fake.requests]
    assert asked == [(None, None), ("b", None), ("c", None)]
    fake = Fake(page("a", "b", next="b"), page("c", next="c"))
    assert [e.name for e in client_of(fake).files.ls(limit=3)] == ["a", "b", "c"]
    assert [r.url.params["limit"] for r in fake.requests] == ["3", "1"]


def test_contexts_are_read_to_the_last_page(client_of):
    fake = Fake(page("a", next="a"), page("b"))
    assert sorted(client_of(fake).contexts) == ["a", "b"]


# --- contexts


PART = {"uid": 4, "id": 7, "name": "docs/a", "start": 0, "n_tokens": 3, "index": 0}
VIEW = {
    "name": "c", "namespace": "", "n_tokens": 3, "n_parts": 1, "busy": False, "version": 7,
    "base": None, "parts": [PART], "plan": {"spans": [], "strategy": "none"},
}  # fmt: skip
THE_PART = Part(4, ChunkId(7), 3, "docs/a")


@pytest.fixture
def context_of(client_of):
    """Makes a context of a fake whose next answers are these; and the fake."""

    def context(*answers):
        fake = Fake(httpx.Response(201, json=VIEW), *answers)
        made = client_of(fake).context("c")
        fake.requests.clear()
        return made, fake

    return context


def test_a_part_is_sent_by_its_uid_and_nothing_is_asked_before(context_of):
    view, part = httpx.Response(200, json=VIEW), httpx.Response(200, json=PART)
    context, fake = context_of(view, view, part)
    context.drop(THE_PART, "docs/b", -1)
    context.reorder([THE_PART, 0])
    assert context.replace(THE_PART, "so") == THE_PART
    assert [body for _, _, body in fake.sent] == [
        {"parts": [{"uid": 4}, "docs/b", -1]},
        {"order": [{"uid": 4}, 0]},
        {"part": {"uid": 4}, "kind": "document", "text": "so"},
    ]


def test_a_block_of_edits_is_one_request(context_of):
    context, fake = context_of(
        httpx.Response(200, json=VIEW | {"version": 9, "made": [PART, None]})
    )
    with context.edit(version=7) as edit:
        made = edit.append("so well", name="docs/a")
        edit.drop(THE_PART, mode="forget")
        with pytest.raises(errors.InvalidArgument, match="not made yet"):
            _ = made.part
        assert fake.requests == []
    assert made.part == THE_PART and edit.version == 9
    [(method, path, body)] = fake.sent
    assert (method, path) == ("POST", "/v1/contexts/c:edit")
    assert body == {
        "edits": [
            {"verb": "append", "text": "so well", "kind": "document", "name": "docs/a"},
            {"verb": "drop", "parts": [{"uid": 4}], "mode": "forget"},
        ]
    }
    assert fake.requests[0].headers["if-match"] == '"7"'


def test_a_block_that_fails_or_is_empty_sends_nothing(context_of):
    context, fake = context_of()
    with pytest.raises(ZeroDivisionError), context.edit() as edit:
        edit.append("so")
        _ = 1 / 0
    with context.edit():
        pass
    assert fake.requests == []


def test_a_context_that_was_changed_is_told(context_of):
    body = {"error": {"message": "it is 9", "code": "context_changed", "name": "c",
                      "wanted": 7, "found": 9}}  # fmt: skip
    context, _ = context_of(httpx.Response(412, json=body))
    with pytest.raises(errors.ContextChanged, match="it is 9") as caught:
        with context.edit(version=7) as edit:
            edit.append("so")
    assert (caught.value.wanted, caught.value.found) == (7, 9)


def test_the_history_of_a_context_is_asked_for(context_of):
    log = {"version": 7, "at": 1.0, "verb": "append", "says": "append docs/a", "n_tokens": 3,
           "added": ["docs/a"], "removed": []}  # fmt: skip
    diff = {"from": 3, "to": 7, "added": [PART], "removed": [], "moved": []}
    cause = {"uid": 4, "name": "docs/a", "n_tokens": 3, "how": "new", "n_computed": 3,
             "edit": log, "says": "docs/a is new"}  # fmt: skip
    why = {"version": 7, "since": None, "pending": True, "n_tokens": 3, "n_kept": 0, "n_moved": 0,
           "n_computed": 3, "parts": [cause]}  # fmt: skip
    answers = [{"data": [log]}, diff, why, VIEW]
    context, fake = context_of(*(httpx.Response(200, json=each) for each in answers))
    [edit] = context.log(limit=5)
    assert edit.to_dict() == {**log, "added": ("docs/a",), "removed": ()}
    assert context.diff(3).added == (THE_PART,)
    assert context.why().parts[0].edit == edit and context.revert(3) is None
    sent = [
        (r.method, r.url.raw_path.decode().removeprefix("/v1/contexts/")) for r in fake.requests
    ]
    assert sent == [
        ("GET", "c:log?limit=5"), ("GET", "c:diff?from=3"), ("GET", "c:why"), ("POST", "c:revert"),
    ]  # fmt: skip
    assert fake.sent[-1][2] == {"to": 3}


def test_version_and_rename(context_of):
    view = httpx.Response(200, json=VIEW)
    context, fake = context_of(view, view, view)
    assert context.version == 7
    context.rename("d/e")
    assert context.name == "d/e" and context.n_tokens == 3
    assert [each[:2] for each in fake.sent[1:]] == [
        ("POST", "/v1/contexts/c:rename"), ("GET", "/v1/contexts/d/e"),
    ]  # fmt: skip


def test_what_the_model_can_do_is_the_servers(client_of):
    status = httpx.Response(200, json={"can": {"move": {"ok": False, "reason": "no rotation"}}})
    move = client_of(status).can("move")
    assert not move and move.reason == "no rotation"
    with pytest.raises(errors.InvalidArgument, match="nothing is known about 'fly'"):
        client_of(status).can("fly")


# --- streams


class Lines(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A body in pieces; keeps whether it was closed."""

    def __init__(self, *pieces):
        self.pieces, self.closed, self.n_read = pieces, False, 0

    def __iter__(self):
        for piece in self.pieces:
            self.n_read += 1
            if isinstance(piece, Exception):
                raise piece
            yield piece if isinstance(piece, bytes) else piece.encode()

    async def __aiter__(self):
        for piece in self:
            yield piece

    def close(self):
        self.closed = True

    async def aclose(self):
        self.closed = True


def event(value):
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


ANSWER = {
    "text": "é b", "tokens": [5, 6], "finish": "stop", "usage": {}, "choices": [],
    "plan": {"spans": [], "strategy": "none"},
}  # fmt: skip
END = event({"finish": "stop", "answer": ANSWER}) + "data: [DONE]\n\n"


@pytest.fixture
def stream_of(context_of):
    def stream(body):
        context, _ = context_of(httpx.Response(200, stream=body))
        return context.stream(5)

    return stream


def test_events_may_be_cut_anywhere_and_signs_of_life_are_none(stream_of):
    text = ": waiting\n\n" + event({"text": "é"}) + ": waiting\n\n" + event({"text": "b"}) + END
    whole = text.encode()
    for at in range(1, len(whole)):
        assert list(stream_of(Lines(whole[:at], whole[at:]))) == ["é", "b"]
    crlf = whole.replace(b"\n", b"\r\n")
    assert list(stream_of(Lines(*(crlf[i : i + 1] for i in range(len(crlf)))))) == ["é", "b"]


def test_only_newlines_end_a_line(stream_of):
    """What str.splitlines takes for one too is text: U+2028 may stand in JSON as it is."""
    odd = "a\u2028b\u2029c\x85d"
    assert list(stream_of(Lines(event({"text": odd}) + END))) == [odd]


def test_closing_a_stream_hangs_up(stream_of):
    body = Lines(event({"text": "a"}), event({"text": "b"}), END)
    found = stream_of(body)
    assert next(found) == "a" and not body.closed
    found.close()
    assert body.closed and body.n_read == 1


def test_a_turn_is_read_whole_or_in_pieces_and_can_be_cancelled(context_of):
    bodies = [Lines(event({"text": "a"}), event({"text": "b"}), END) for _ in range(3)]
    idle = httpx.Response(200, json=VIEW)
    answers = [httpx.Response(200, stream=body) for body in bodies]
    context, fake = context_of(answers[0], answers[1], answers[2], idle, idle)
    assert context.begin(Sampling(max_tokens=2)).run().tokens == (5, 6)
    turn = context.begin(Sampling(max_tokens=2), chat=True)
    assert list(turn.stream()) == ["a", "b"] and turn.finish().finish == "stop"
    turn = context.begin(Sampling(max_tokens=2))
    turn.cancel()  # it has not begun
    assert next(turn.stream()) == "a"
    turn.cancel()
    assert bodies[2].closed
    with pytest.raises(errors.InvalidArgument, match="did not end"):
        turn.finish()
    assert context.n_tokens == 3
    assert [path for _, path, _ in fake.sent[:3]] == [
        "/v1/contexts/c:generate", "/v1/contexts/c:ask", "/v1/contexts/c:generate",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "end",
    ["", httpx.RemoteProtocolError("peer closed connection"), "data: {\n\n", "data: [DONE]\n\n"],
)
def test_a_stream_that_breaks_off_is_an_error(stream_of, end):
    body = Lines(event({"text": "a"}), end)
    found = stream_of(body)
    assert next(found) == "a"
    with pytest.raises(Unreachable):
        next(found)
    assert body.closed


def test_an_error_in_a_stream_is_raised(stream_of):
    error = errors.OverBudget(10, 5, 2)
    body = Lines(event({"text": "a"}), event(problem_of(error).body))
    found = stream_of(body)
    next(found)
    with pytest.raises(errors.OverBudget) as caught:
        next(found)
    assert caught.value.data == error.data and body.closed


def test_a_stream_is_asked_for_again_when_the_server_is_busy(context_of, waits):
    good = httpx.Response(200, stream=Lines(event({"text": "a"}), END))
    context, fake = context_of(refusal(Overloaded(4.0)), good)
    assert list(context.stream(3)) == ["a"] and waits == [4.0]
    assert "idempotency-key" not in fake.requests[0].headers


def test_one_answer_of_several_that_fails_stops_the_others(client_of):
    bodies = {name: Lines(*[event({"text": "a"})] * 1000, END) for name in ("a", "b")}

    def answer(request):
        name = request.url.path.rsplit("/", 1)[1].removesuffix(":generate")
        if name == "bad":
            return refusal(errors.OverBudget(10, 5, 2))
        return httpx.Response(200, stream=bodies[name])

    fake = Fake(*[httpx.Response(201, json=VIEW | {"name": name}) for name in ("a", "bad", "b")])
    client = client_of(fake)
    contexts = [client.context(name) for name in ("a", "bad", "b")]
    fake.__class__ = type("Routed", (Fake,), {"__call__": lambda self, request: answer(request)})
    with pytest.raises(errors.OverBudget):
        client.generate_many(contexts, 3)
    assert all(body.closed or not body.n_read for body in bodies.values())
    with pytest.raises(errors.InvalidArgument, match="there twice"):
        client.generate_many([contexts[0], contexts[0]])


# --- without the extra


def test_without_httpx_it_says_what_to_install(make, monkeypatch):
    monkeypatch.setattr(wires, "httpx", None)
    with pytest.raises(errors.ServerError) as caught:
        make(URL)
    assert "pip install 'kvweave[" in caught.value.hint


def test_neither_kvweave_nor_the_client_loads_torch():
    code = (
        "import sys, kvweave; print('httpx' in sys.modules);"
        "kvweave.Client('http://h:1'); print('torch' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.stdout.split() == ["False", "False"], found.stderr


def test_a_list_without_an_end_is_no_kvweave_servers(client_of):
    page = httpx.Response(200, json={"data": [ENTRY], "next": "docs/a"})
    with pytest.raises(Unreachable, match="no kvweave server"):
        client_of(page, page, page).files.ls()


@pytest.mark.parametrize(
    "said", [None, [], 3, "x", {}, {"data": None}, {"data": [1]}, {"data": [{}]}]
)
def test_json_of_another_server_is_told_so(client_of, said):
    for verb in (
        lambda client: client.files.ls(),
        lambda client: client.files.stat("docs/a"),
        lambda client: client.files.mv("docs/a", "docs/b"),
        lambda client: client.files.du(),
        lambda client: client.files.about("docs/a"),
        lambda client: client.health(),
        lambda client: client.status(),
        lambda client: client.get_context("c").ledger(),
    ):
        with pytest.raises(Unreachable, match="no kvweave server") as caught:
            verb(client_of(httpx.Response(200, json=said)))
        assert re.fullmatch(r"http://[^/]+", caught.value.url)
    with pytest.raises(TypeError):  # whose words these are is known
        client_of(httpx.Response(200, json=said)).files.ls(nobody=1)
    for verb in (
        lambda client: client.compose("so {docs/a}"),
        lambda client: client.get_context("c").parts,
        lambda client: client.get_context("c").describe(),
        lambda client: client.get_context("c").close(),
        lambda client: client.close_context("c"),
        lambda client: client.get_memory("m").describe(),
        lambda client: client.get_memory("m").close(),
    ):
        with pytest.raises(Unreachable):
            verb(client_of(*[httpx.Response(200, json=said)] * 2))


def test_an_answer_comes_with_all_that_it_says():
    plan = Plan((), "auto", 0.5, {}, "audit", 0.95)
    choice = Choice(3, -0.5, ((3, -0.5), (4, -1.5)))
    made = Answer("so", (3, 4), "stop", (choice,), plan, {"ttft": 0.5}, "well")
    for field in fields(Answer):
        assert field.default is MISSING or getattr(made, field.name) != field.default
    told = parse.answer(json.loads(json.dumps(answer_of(made))))
    for field in fields(Answer):
        if field.name != "plan":
            assert getattr(told, field.name) == getattr(made, field.name), field.name


def test_a_plan_comes_with_all_that_it_says():
    span = Span(
        "a", 1, 9, "reuse", "ram", 36, 0, 0, 2, 1, saw=(3,), approximate=("freed",), amends=2
    )
    shed = Shed("h2o:4", 9, 5, 0.25, 7, {"int8": 2})
    made = Plan((span,), "auto", 0.5, {"moved": 1.0}, "audit", 0.95, True, shed)
    for field in fields(Plan):
        assert getattr(made, field.name) != field.default, f"{field.name} is not told here"
    found = parse.plan(json.loads(json.dumps(made.to_dict())))
    assert found == made and found.explain() == made.explain()
