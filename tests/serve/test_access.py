"""Keys, origins, bodies, paths and hang-ups, each against the bare middleware."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving import run

from kvweave import errors
from kvweave.errors import InvalidArgument
from kvweave.serve.guard.access import Access, Keys, tenant_of
from kvweave.serve.guard.limits import MAX_DEPTH, MAX_INNER, MAX_URL, Limits, Parsed, check_json
from kvweave.serve.guard.problems import Problem, problem_of, snake_case
from kvweave.serve.options import Options, is_loopback


class Exchange:
    """One request played to an ASGI app, message by message."""

    def __init__(self, app, method="GET", path="/v1/chunks", headers=None, parts=(b"",), **scope):
        self.scope = {
            "type": "http", "method": method, "path": path, "query_string": b"",
            "headers": [(k.lower().encode(), v.encode()) for k, v in (headers or {}).items()],
        } | scope  # fmt: skip
        self.parts = [
            {"type": "http.request", "body": part, "more_body": i + 1 < len(parts)}
            for i, part in enumerate(parts)
        ]
        self.gone = asyncio.Event()
        self.sent = []
        self.app = app

    async def receive(self):
        if self.parts:
            part = self.parts.pop(0)
            if part is None:
                await asyncio.sleep(60)
            return part
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        self.sent.append(message)

    async def answer(self):
        await self.app(self.scope, self.receive, self.send)
        return self

    @property
    def status(self):
        return self.sent[0]["status"]

    @property
    def headers(self):
        return {k.decode(): v.decode() for k, v in self.sent[0]["headers"]}

    @property
    def error(self):
        return json.loads(b"".join(m.get("body", b"") for m in self.sent[1:]))["error"]


def played(app, **request):
    made = []

    async def main():
        made.append(await Exchange(app, **request).answer())

    run(main())
    return made[0]


async def echo(scope, receive, send):
    """Says who asked and how long the body was."""
    body = (await receive())["body"]
    told = json.dumps({"tenant": scope.get("state", {}).get("tenant"), "n": len(body)}).encode()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": told})


def told(exchange):
    return json.loads(exchange.sent[1]["body"])


# ---- keys

KEYS = {"key-of-anna": "anna", "key-of-berta": "berta"}


@pytest.mark.parametrize(
    ("header", "tenant"),
    [
        ("Bearer key-of-anna", "anna"),
        ("bearer  key-of-berta", "berta"),
        ("Bearer key-of-ann", None),
        ("Bearer key-of-annaa", None),
        ("Bearer", None),
        ("Basic key-of-anna", None),
        ("key-of-anna", None),
        ("Bearer schl\u00fcssel", None),
        (None, None),
    ],
)
def test_a_key_stands_for_its_namespace(header, tenant):
    headers = {} if header is None else {"Authorization": header}
    found = played(Access(echo, KEYS), headers=headers)
    if tenant is None:
        assert found.status == 401 and found.error["code"] == "invalid_api_key"
        assert found.headers["www-authenticate"] == "Bearer"
        assert "key-of" not in json.dumps(found.error)
    else:
        assert told(found)["tenant"] == tenant


@pytest.mark.parametrize(
    ("path", "is_open"),
    [
        ("/", True),
        ("/health", True),
        ("/openapi.json", True),
        ("/web/app.js", True),
        ("/v1/models", False),
        ("/metrics", False),
        ("/health/x", False),
        ("//health", False),
        ("/webx", False),
        ("/Health", False),
    ],
)
def test_only_the_page_and_health_are_open(path, is_open):
    assert (played(Access(echo, KEYS), path=path).status == 200) is is_open


def test_every_key_is_compared_whatever_is_found(monkeypatch):
    compared = []
    real = Keys.namespace.__globals__["compare_digest"]

    def compare(a, b):
        compared.append(len(a) == len(b))
        return real(a, b)

    monkeypatch.setitem(Keys.namespace.__globals__, "compare_digest", compare)
    keys = Keys({f"a-long-key-{i}": str(i) for i in range(5)})
    for key in ("a-long-key-0", "a-long-key-4", "x"):
        compared.clear()
        keys.namespace(key)
        assert compared == [True] * 5


def test_keys_are_in_no_repr_and_no_dict():
    options = Options(keys=KEYS, metrics_key="key-of-metrics")
    assert "key-of" not in repr(options) + str(options.to_dict())
    assert "key-of" not in repr(vars(Keys(KEYS)))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "example.org", ""])
def test_a_server_without_keys_stays_on_this_machine(host):
    with pytest.raises(InvalidArgument) as refused:
        Options(host=host)
    assert "--key" in refused.value.hint
    assert Options(host=host, keys=KEYS).host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_needs_no_key(host):
    assert is_loopback(host) and Options(host=host).keys == {}


@pytest.mark.parametrize(
    "key", ["short", "with space in it", "schl\u00fcssel-lang", "line\nbreak-in"]
)
def test_a_key_is_long_and_plain_and_not_in_the_error(key):
    with pytest.raises(InvalidArgument) as refused:
        Options(keys={key: "anna"})
    assert key not in str(refused.value)


# ---- other pages of the browser


@pytest.mark.parametrize(
    ("method", "headers", "status"),
    [
        ("POST", {"Host": "127.0.0.1:8700"}, 200),
        ("POST", {"Host": "localhost:8700", "Origin": "http://localhost:8700"}, 200),
        ("GET", {"Host": "[::1]:8700"}, 200),
        (
            "GET",
            {"Host": "127.0.0.1:8700", "Origin": "http://evil.example"},
            200,
        ),  # reads no answer
        ("POST", {"Host": "127.0.0.1:8700", "Origin": "http://evil.example"}, 403),
        ("DELETE", {"Host": "127.0.0.1:8700", "Origin": "null"}, 403),
        ("POST", {"Host": "127.0.0.1:8700", "Origin": "http://127.0.0.1:9999"}, 403),
        ("GET", {"Host": "evil.example"}, 403),  # a name that was rebound to this machine
        ("GET", {"Host": "10.0.0.7:8700"}, 403),
        ("GET", {"Host": "[::1"}, 403),  # no address at all
        ("GET", {"Host": "a]b"}, 403),
        ("POST", {"Host": "localhost", "Origin": "http://[x"}, 403),
    ],
)
def test_an_open_server_answers_no_page_of_another_origin(method, headers, status):
    assert played(Access(echo, {}), method=method, headers=headers).status == status


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200), ("LOCALHOST.:80", 200), ("127.9.8.7", 200), ("[::1]:8700", 200),
        ("box.example", 200), ("Box.Example.:8700", 200), ("[fd00::1]", 200), ("10.0.0.7", 200),
        ("box", 403), ("intranet:8700", 403), ("localhost.evil.example", 403), ("notlocalhost", 403),
        ("x.box.example", 403), ("box.example.evil", 403), ("2130706433", 403), ("0x7f000001", 403),
        ("127.0.0.1.nip.io", 403), ("0.0.0.0", 403), ("localhost@evil.example", 403), ("", 403),
        ("[fd00::2]", 403), ("[box.example]", 403), ("..", 403), ("*", 403),
    ],
)  # fmt: skip
def test_only_names_that_were_told_are_answered(host, status):
    names = ("BOX.example.", "[FD00::1]")
    app = Access(echo, {}, host="10.0.0.7", allowed_hosts=names)
    found = played(app, headers={"Host": host})
    assert found.status == status
    if status == 403:
        assert found.headers["connection"] == "close"


def test_an_open_server_answers_no_name_that_has_no_dot():
    for host in ("intranet", "printer:80", "a"):
        refused = played(Access(echo, {}), headers={"Host": host})
        assert refused.status == 403 and "--allowed-host" in refused.error["hint"]
    assert played(Access(echo, {})).status == 403  # a browser always sends a name


def test_with_keys_a_host_matters_only_where_names_were_told():
    key = {"Authorization": "Bearer key-of-anna"}
    for host in ("evil.example", "intranet", ""):
        headers = key | {"Host": host}
        assert played(Access(echo, KEYS), headers=headers).status == 200
        bound = Access(echo, KEYS, allowed_hosts=("box.example",))
        assert played(bound, headers=headers).status == 403
        assert played(bound, path="/health", headers={"Host": host}).status == 403
        assert played(bound, headers=key | {"Host": "box.example"}).status == 200
        assert played(bound, headers=key | {"Host": "localhost"}).status == 200
        assert played(bound, headers={"Host": "box.example"}).status == 401


def test_with_keys_the_origin_does_not_matter():
    headers = {"Authorization": "Bearer key-of-anna", "Host": "a.example", "Origin": "http://b"}
    assert played(Access(echo, KEYS), method="POST", headers=headers).status == 200


# ---- bodies


def limits(app=echo, max_body=100, body_timeout=0.2):
    return Limits(app, max_body, body_timeout)


JSON = {"Content-Type": "application/json"}


def test_a_body_arrives_whole():
    found = played(limits(), method="POST", parts=(b"a" * 60, b"b" * 40))
    assert told(found)["n"] == 100


@pytest.mark.parametrize(
    "type", ["application/json", "Application/JSON", "application/x+json; a=b"]
)
def test_every_spelling_of_json_is_checked(type):
    found = played(limits(), method="POST", headers={"Content-Type": type}, parts=(b'"\\ud800"',))
    assert found.status == 400 and found.error["code"] == "invalid_json"


def test_a_body_that_says_it_is_too_large_is_not_read():
    app = limits()
    exchange = None

    async def main():
        nonlocal exchange
        exchange = Exchange(app, method="POST", headers={"Content-Length": "101"}, parts=(b"x",))
        await exchange.answer()

    run(main())
    assert exchange.status == 413 and exchange.headers["connection"] == "close"
    assert len(exchange.parts) == 1


def test_a_body_that_lies_about_its_size_is_counted():
    headers = {"Content-Length": "5"}
    found = played(limits(), method="POST", headers=headers, parts=(b"a" * 60, b"b" * 41))
    assert found.status == 413 and found.error["code"] == "request_too_large"


def test_a_slow_body_is_given_up():
    async def main():
        exchange = Exchange(limits(), method="POST", parts=(b"a", b"b"))
        exchange.parts[1] = None  # never comes
        await exchange.answer()
        assert exchange.status == 408 and exchange.headers["connection"] == "close"

    run(main())


def test_one_who_goes_away_while_sending_gets_no_answer():
    async def main():
        exchange = Exchange(limits(), method="POST", parts=(b"a", b"b"))
        exchange.parts[1] = {"type": "http.disconnect"}
        await exchange.answer()
        assert exchange.sent == []

    run(main())


@pytest.mark.parametrize("started", [False, True], ids=["before the answer", "while streaming"])
def test_one_who_goes_away_cancels_what_answers_him(started):
    cancelled = []

    async def slow(scope, receive, send):
        if started:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(1)
            raise

    async def main():
        exchange = Exchange(limits(slow))
        task = asyncio.create_task(exchange.answer())
        await asyncio.sleep(0.05)
        exchange.gone.set()
        await task
        assert len(exchange.sent) == started

    run(main())
    assert cancelled == [1]


def test_what_follows_an_answer_is_not_cancelled():
    ended = []

    async def lingers(scope, receive, send):
        await echo(scope, receive, send)
        await asyncio.sleep(0.05)
        ended.append(1)

    async def main():
        exchange = Exchange(limits(lingers))
        exchange.gone.set()
        await exchange.answer()

    run(main())
    assert ended == [1]


def test_a_bug_is_an_error_with_an_id_and_no_trace(caplog):
    async def broken(scope, receive, send):
        raise ZeroDivisionError("secret detail")

    found = played(limits(broken))
    assert found.status == 500 and found.error["code"] == "internal_error"
    assert "secret" not in json.dumps(found.error)
    assert found.error["id"] in caplog.text and "secret detail" in caplog.text


# ---- JSON


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"nul",
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"a": -Infinity}',
        b'{"a": 1e999}',
        b'{"a": "\xff"}',
        b'{"a": "\\ud800"}',
        '{"a": 1}'.encode("utf-16"),
        '{"a": 1}'.encode("utf-16-le"),
        b"\xef\xbb\xbf{}",
        b'{"a": ' + b"1" * 5000 + b"}",
        b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1),
        b'{"a":' * (MAX_DEPTH + 1) + b"1" + b"}" * (MAX_DEPTH + 1),
        b"[1e999, " + b"[" * 900 + b"]" * 900 + b"]",
        b"[" * 100_000,
        b"[" * 100_000 + b"]" * 100_000,
        b"[" + b"[]," * MAX_INNER + b"[]]",
        b'{"dry_run": true, "dry_run": false}',
        b'[{"a": {"b": 1, "c": 2, "\\u0062": 1}}]',
        b'[{"a\\"": "b"}' + b', {"[": 1}' * MAX_INNER + b"]",
    ],
)
def test_what_is_not_sound_json_is_refused(body):
    found = check_json(body)
    assert isinstance(found, Problem) and found.status == 400
    assert found.error["code"] == "invalid_json"


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b"[" * MAX_DEPTH + b"]" * MAX_DEPTH,
        b"[" + b"[]," * 5000 + b"[]]",
        b'["' + b'[{\\"' * MAX_INNER + b'"]',  # in a string they are text
        b'{"a": "\\ud83d\\ude00", "b": "\\\\ud800", "c": 1e300}',
        '{"ü": "\u4e16"}'.encode(),
    ],
)
def test_sound_json_passes_as_it_is(body):
    assert check_json(body) == Parsed(json.loads(body))


@pytest.mark.slow
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
                    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))  # fmt: skip
def test_all_that_python_writes_soundly_passes(value):
    body = json.dumps(value).encode()
    assert check_json(body) == Parsed(json.loads(body))


def test_only_json_is_read_as_json():
    assert told(played(limits(), method="POST", parts=(b"{",)))["n"] == 1
    assert played(limits(), method="POST", headers=JSON, parts=(b"{",)).status == 400
    assert told(played(limits(), method="POST", headers=JSON, parts=(b"",)))["n"] == 0


# ---- addresses


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"/v1/chunks/a", 200),
        (b"/v1/chunks/%C3%BC", 200),
        (b"/v1/chunks/%FF", 400),
        (b"/v1/chunks/%C0%AE%C0%AE", 400),  # an overlong ".."
        (b"/v1/chunks/%ED%A0%80", 400),  # half a surrogate pair
        (b"/v1/chunks/a%00b", 400),
        (b"/v1/chunks/a%0d%0ab", 400),
        (b"/" + b"a" * (MAX_URL - 1), 200),
        (b"/" + b"a" * MAX_URL, 414),
    ],
)
def test_addresses(raw, status):
    assert played(limits(), raw_path=raw).status == status


def test_the_query_counts_and_is_utf8():
    assert played(limits(), query_string=b"pattern=%FF").status == 400
    assert played(limits(), query_string=b"a" * MAX_URL).status == 414


# ---- errors

ERRORS = [
    (errors.ChunkNotFound("x"), 404, "chunk_not_found", "invalid_request_error"),
    (errors.ContextNotFound("x"), 404, "context_not_found", "invalid_request_error"),
    (errors.MemoryNotFound("x"), 404, "memory_not_found", "invalid_request_error"),
    (errors.NotStored("conversation", "x"), 404, "not_stored", "invalid_request_error"),
    (
        errors.PreviousResponseNotFound("x"),
        404,
        "previous_response_not_found",
        "invalid_request_error",
    ),
    (errors.SummaryForgotten("x"), 410, "summary_forgotten", "invalid_request_error"),
    (errors.ChunkLost("x"), 410, "chunk_lost", "invalid_request_error"),
    (errors.NameTaken("x", 1), 409, "name_taken", "invalid_request_error"),
    (errors.ChunkPinned("x", 1), 409, "chunk_pinned", "invalid_request_error"),
    (errors.ChunkInUse("x", 1, ("c",)), 409, "chunk_in_use", "invalid_request_error"),
    (errors.ContextBusy("x"), 409, "context_busy", "invalid_request_error"),
    (errors.IdempotencyKeyReused("x"), 422, "idempotency_key_reused", "invalid_request_error"),
    (errors.ContextChanged("x", 1, 2), 412, "context_changed", "invalid_request_error"),
    (errors.CannotMove("x"), 409, "cannot_move", "invalid_request_error"),
    (errors.CannotRun("x"), 409, "cannot_run", "invalid_request_error"),
    (errors.ModelMismatch("a", "b", "c"), 409, "model_mismatch", "invalid_request_error"),
    (errors.InvalidName("x", "y"), 400, "invalid_name", "invalid_request_error"),
    (errors.EmptyChunk("x"), 400, "empty_chunk", "invalid_request_error"),
    (errors.HoleNotFilled("x"), 400, "hole_not_filled", "invalid_request_error"),
    (errors.InvalidArgument("x", "y"), 400, "invalid_argument", "invalid_request_error"),
    (errors.ContextTooLong(2, 1), 400, "context_length_exceeded", "invalid_request_error"),
    (errors.OverBudget(3, 2, 1), 503, "over_budget", "server_error"),
    (errors.Overloaded(2.4), 429, "overloaded", "rate_limit_error"),
    (errors.OverQuota("chunks", 1, 2, 3), 429, "insufficient_quota", "insufficient_quota"),
    (errors.NoSpace("cannot write /secret", "/secret"), 507, "no_space", "server_error"),
    (errors.HomeMoved("/secret"), 503, "home_moved", "server_error"),
    (errors.CorruptChunk("/secret/17.kv", "x"), 500, "corrupt_chunk", "server_error"),
    (errors.LoadFailed(17, "late: /secret/kv"), 500, "internal_error", "server_error"),
    (errors.FormatTooNew("/secret", 2, 1), 500, "internal_error", "server_error"),
    (errors.ModelUnusable("/secret", "x"), 500, "internal_error", "server_error"),
    (ValueError("secret"), 500, "internal_error", "server_error"),
]


@pytest.mark.parametrize(("error", "status", "code", "kind"), ERRORS, ids=lambda x: str(x)[:20])
def test_each_error_has_its_status_code_and_type(error, status, code, kind):
    problem = problem_of(error)
    told = problem.body["error"]
    assert (problem.status, told["code"], told["type"]) == (status, code, kind)
    assert {"message", "param", "hint"} <= set(told) and "secret" not in json.dumps(told)


def test_what_a_client_can_use_of_an_error():
    assert problem_of(errors.Overloaded(2.4)).headers == {"Retry-After": "2"}
    stopping = problem_of(errors.Overloaded(10), stopping=True)
    assert (stopping.status, stopping.headers) == (503, {"Retry-After": "10"})
    told = problem_of(errors.InvalidArgument("share", "is 2", "0 to 1")).body["error"]
    assert (told["param"], told["hint"]) == ("share", "0 to 1")
    assert problem_of(errors.ChunkNotFound("x", ("y",))).error["did_you_mean"] == ["y"]
    assert "Retry-After" not in problem_of(errors.OverQuota("chunks", 1, 2, 3)).headers


RAISED = (errors.CannotMove, errors.NotStored)  # though others are below them


def test_every_error_of_the_tree_is_known_here():
    def leaves(kind):
        below = kind.__subclasses__()
        own = {kind} if not below or kind in RAISED else set()
        return own.union(*map(leaves, below))

    ours = {type(error) for error, *_ in ERRORS}
    theirs = {errors.Unreachable, errors.KeyRefused}  # the client raises these itself
    mine = {kind for kind in leaves(errors.KVWeaveError) if kind.__module__ == "kvweave.errors"}
    assert mine - theirs == ours - {ValueError}
    assert snake_case("ChunkNotFound") == "chunk_not_found"


def test_tenant_of_a_request_is_what_access_said():
    class Request:
        scope = {"state": {"tenant": "anna"}}  # noqa: RUF012

    assert tenant_of(Request()) == "anna"


def test_what_a_request_says_is_read_once(serve, monkeypatch):
    """Large requests of one tenant are other tenants' time."""
    anna = serve().anna

    def again(*_, **__):
        raise ZeroDivisionError("read again")

    monkeypatch.setattr("starlette.requests.json.loads", again)
    reply = anna.client.put("/v1/chunks/a", headers=anna.headers, json={"text": "so so"})
    assert reply.status_code == 201, reply.content
