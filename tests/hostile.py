"""Malformed requests as bytes, by kind; each is made from a seed alone.

A `Probe` is what one connection sends, in pieces, and whether any of it may be answered with 2xx.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

KEY = "key-of-mallory"
MAX_BODY = 256 * 1024  # what the server under test is told
CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "Anna's river is cold . what about Anna's river"}

End = Literal["read", "hang_up", "half", "reset"]


@dataclass(frozen=True)
class Probe:
    """One connection.

    ``end`` after the last piece: read what comes, hang up at once, send FIN and read, or read a few
    bytes and reset. ``fine``: 2xx is no mistake. ``silent``: no answer at all is none either.
    """

    kind: str
    pieces: tuple[bytes, ...]
    fine: bool = False
    silent: bool = False
    end: End = "read"


def request(
    method: str, path: str, body: bytes | None = None, *, key: str | None = KEY, close: bool = True,
    type: str = "application/json", more: tuple[str, ...] = (), version: str = "1.1",
) -> bytes:  # fmt: skip
    """Return a sound request but for what it is given."""
    lines = [f"{method} {path} HTTP/{version}", "Host: localhost"]
    if key is not None:
        lines.append(f"Authorization: Bearer {key}")
    if close:
        lines.append("Connection: close")
    if body is not None:
        lines += [f"Content-Length: {len(body)}", f"Content-Type: {type}"]
    head = "\r\n".join([*lines, *more]) + "\r\n\r\n"
    return head.encode("latin-1") + (body or b"")


def dumps(value: object) -> bytes:
    return json.dumps(value).encode()


# ---- the endpoints, each with a body it would take

GOOD: dict[tuple[str, str], dict[str, Any]] = {
    ("POST", CHAT): {
        "model": "demo", "messages": [USER], "max_tokens": 2, "temperature": 0.0, "n": 1,
        "top_p": 1.0, "top_k": 0, "seed": 1, "stop": ["x"], "stream": False, "logprobs": False,
        "top_logprobs": 0, "logit_bias": {}, "stream_options": {}, "tools": [], "tool_choice": "none",
        "response_format": {"type": "text"}, "frequency_penalty": 0.0, "modalities": ["text"],
        "max_completion_tokens": 2, "kvweave": {"repair": "none", "share": 0.1}, "user": "m",
    },
    ("POST", "/v1/completions"): {
        "model": "demo", "prompt": "Anna's river", "max_tokens": 2, "n": 1, "best_of": 1, "echo": False,
        "logprobs": 0, "suffix": "", "stream": False, "temperature": 1.0, "stop": "x", "seed": 0,
    },
    ("PUT", "/v1/chunks/docs/mine"): {
        "text": "Anna's river is cold .", "kind": "document", "replace": True, "durable": False,
    },
    ("POST", "/v1/chunks/docs/a:place"): {"tier": "ram", "dry_run": True},
    ("POST", "/v1/chunks/docs/a:pin"): {"dry_run": True},
    ("POST", "/v1/chunks/docs/a:unpin"): {"dry_run": True},
    ("POST", "/v1/chunks/docs/a:cp"): {"to": "docs/c", "replace": True, "dry_run": True},
    ("POST", "/v1/chunks/docs/a:mv"): {"to": "docs/c", "replace": True, "dry_run": True},
    ("POST", "/v1/contexts"): {
        "name": "docs/a", "system": "keep the notes .", "repair": "none", "share": 0.1,
        "max_drift": 1.0, "prune": "forget", "positions": "compact",
    },
    ("POST", "/v1/compose"): {
        "template": "use {d} .", "values": {"d": ["docs/a"]}, "name": "chat/a", "repair": "none",
    },
    ("POST", "/v1/contexts/chat/a:append"): {
        "chunk": "docs/a", "kind": "document", "at": 9999, "start": 0, "stop": 2,
    },
    ("POST", "/v1/contexts/chat/a:message"): {"role": "robot", "content": "Anna's river ?"},
    ("POST", "/v1/contexts/chat/a:drop"): {"parts": [], "mode": "forget"},
    ("POST", "/v1/contexts/chat/a:replace"): {"part": "docs/none", "text": "x", "kind": "document"},
    ("POST", "/v1/contexts/chat/a:amend"): {
        "part": "docs/none", "text": "x", "kind": "document", "role": "user",
    },
    ("POST", "/v1/contexts/chat/a:reorder"): {"order": [0]},
    ("POST", "/v1/contexts/chat/a:fork"): {"to": "chat/a"},
    ("POST", "/v1/contexts/chat/a:refine"): {"n_rows": 3},
    ("POST", "/v1/contexts/chat/a:weave"): {"repair": "none", "share": 0.0, "max_drift": 1.0},
    ("POST", "/v1/contexts/chat/none:generate"): {
        "max_tokens": 2, "temperature": 0.0, "top_p": 1.0, "top_k": 0, "seed": 1, "stop": [],
        "stop_tokens": [], "logprobs": 0, "ignore_eos": True, "max_drift": 1.0, "stream": False,
    },
    ("POST", "/v1/contexts/chat/none:ask"): {"content": "Anna's river ?", "max_tokens": 2},
}  # fmt: skip
ENDPOINTS = sorted(GOOD)
TOKENS = ("max_tokens", "max_completion_tokens", "n")  # big ones would keep the model busy

VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 2**31, 2**63, 2**64, -(2**70), 10**300, 1e308, -1e308, 5e-324, 0.5, "", " ",
    "\x00", "\ud7ff\uffff", "\u202e", "../../etc/passwd", "#1", "#-1", "#0", "#99999999999999999999",
    "#1[0:2]", "a//b", "/", ".", "..", "a/../b", "x" * 10_000, "\U0001f600" * 300, [], {}, [[]], [{}],
    [None], ["a"], [1], [-1], [2**40], [0.5], [True], {"": ""}, {"a": {"b": []}}, ["x"] * 2_000,
    {"type": "json_schema"}, "{0.__class__}", "{", "}}", "{" * 200, "%s%n", "**/**/**/**/**", "[a-",
    "{a,{b,c}", "?" * 300, "{{ 7 * 7 }}", "{% for x in y %}", "<|im_end|>", "NaN", "1e999", "1",
)  # fmt: skip
MESSAGES: tuple[Any, ...] = (
    [], [None], ["x"], [{}], [{"role": "user"}], [{"role": 1, "content": "x"}], [{"content": "x"}],
    [{"role": "user", "content": 7}], [{"role": "user", "content": [{"type": "text"}]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}],
    [{"role": "user", "content": [{"type": "chunk", "name": "../x"}]}],
    [{"role": "user", "content": [{"type": "chunk", "name": "docs/none"}]}],
    [{"role": "user", "content": [{"type": "chunk", "name": ""}]}],
    [{"role": "user", "content": [{"type": "chunk", "name": "x" * 5000}]}],
    [{"role": "user", "content": ["x"]}], [{"role": "system", "content": None}] * 3,
    [{"role": "assistant", "content": None, "tool_calls": 7}],
    [{"role": "assistant", "content": None, "tool_calls": [7]}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": 1, "arguments": "{"}}]}],
    [{"role": "assistant", "tool_calls": [{"function": 3}]}],
    [{"role": "tool", "content": "x", "tool_call_id": {}}], [{"role": "user", "content": ""}],
    [{"role": "developer", "content": [{"type": "text", "text": 3}]}], {"role": "user"}, "hello",
    [USER | {"name": {"a": [1]}}], [USER | {"audio": {"id": 1}, "refusal": []}],
    [{"role": "user", "content": "Anna " * 20_000}], [USER] * 5_000,
)  # fmt: skip


def wrong_value(rng: random.Random) -> Probe:
    """One field of one endpoint holds what it should not."""
    endpoint = rng.choice(ENDPOINTS)
    body = dict(GOOD[endpoint])
    for _ in range(rng.choice((1, 1, 1, 2))):
        field = rng.choice(sorted(body))
        body[field] = rng.choice(VALUES)
        if field == "messages":
            body[field] = rng.choice(MESSAGES)
        if field in TOKENS and (body[field] is None or isinstance(body[field], int)):
            body[field] = rng.choice((-1, 0, 2**63, 10**300, True, "3", 2.5))
    return Probe("wrong value", (request(*endpoint, dumps(body)),), fine=True)


def wrong_messages(rng: random.Random) -> Probe:
    """A conversation that is none, or the odd thing within a message or a tool."""
    odd = rng.choice(
        (7, "x", [], [7], {}, [{}], [[]], None, [{"function": 3}], [None], True, {"a": 1})
    )
    body = dict(GOOD["POST", CHAT])
    match rng.randrange(4):
        case 0:
            body["messages"] = rng.choice(MESSAGES)
        case 1:
            key = rng.choice(
                ("tool_calls", "name", "content", "tool_call_id", "function_call", "refusal")
            )
            role = rng.choice(("user", "assistant", "tool", "system", "developer", "function"))
            body["messages"] = [USER, {"role": role, "content": "x", key: odd}, USER]
        case 2:
            body |= {"tools": odd, "tool_choice": rng.choice(("auto", "none", "required", odd))}
        case _:
            function = {"name": odd, "parameters": odd, "description": odd}
            body |= {"tools": [{"type": "function", "function": function}], "tool_choice": "auto"}
    return Probe("wrong messages", (request("POST", CHAT, dumps(body)),), fine=True)


def wrong_fields(rng: random.Random) -> Probe:
    """A field is missing, misspelled or too many; or the body is no object."""
    endpoint = rng.choice(ENDPOINTS)
    body: Any = dict(GOOD[endpoint])
    match rng.randrange(4):
        case 0:
            body.pop(rng.choice(sorted(body)))
        case 1:
            body[rng.choice(("", "__class__", "x" * 3_000, "max_token", "\x00"))] = 1
        case 2:
            body = {key.upper(): value for key, value in body.items()}
        case _:
            body = rng.choice(([], [body], "x", 7, None, True, [[]], {}))
    return Probe("wrong fields", (request(*endpoint, dumps(body)),), fine=True)


def deep(rng: random.Random) -> bytes:
    n = rng.choice((101, 500, 1_100, 20_000))
    return rng.choice((b"[" * n + b"]" * n, b'{"a":' * n + b"1" + b"}" * n, b"[" * n))


def bad_json(rng: random.Random) -> Probe:
    """The body is no JSON, or JSON nobody should send."""
    method, path = endpoint = rng.choice(ENDPOINTS)
    good = dumps(GOOD[endpoint])
    at = rng.randrange(1, len(good))
    body = rng.choice((
        good[:at],
        good[:at] + rng.randbytes(5) + b"\xff" + good[at:],
        good + b"}",
        good.replace(b'"', b"'"),
        b"\xff\xfe" + good,
        good.decode().encode("utf-16"),
        b'{"model": "demo", "x": "\xc3\x28"}',
        b'{"model": "\\ud800"}',
        b'{"text": "\\udfff\\ud800"}',
        good[:-1] + b', "x": NaN}',
        good[:-1] + b', "x": -Infinity}',
        good[:-1] + b', "x": 1e999}',
        good[:-1] + b', "x": ' + b"9" * 5_000 + b"}",
        good[:-1] + b', "x": 0x10}',
        good[:-1] + b', "x": 01}',
        good[:-1] + b', "x": .5}',
        good[:-1] + b', "x": "a\nb"}',
        good[:-1] + b', "x": "\x00"}',
        b"/* */" + good,
        b"\x00", b"", b" ", b"{", b"nul", b"tru", b"--1", b'"', b"\xf0\x9f\x98",
        deep(rng),
    ))  # fmt: skip
    fine = not body and path.endswith(
        ("pin", "weave", "refine", "check", "preview")
    )  # they need none
    return Probe("bad JSON", (request(method, path, body),), fine)


def bad_type(rng: random.Random) -> Probe:
    """The content type is not JSON's, or looks like it but is not; the body is bad as well."""
    endpoint = rng.choice(ENDPOINTS)
    kind = rng.choice((
        "APPLICATION/JSON", "Application/Json; charset=utf-8", "application/vnd.api+json",
        "application/JSON; charset=utf-16", "text/plain", "multipart/form-data",
        "multipart/form-data; boundary=x", "application/x-www-form-urlencoded", "", "x", "application/",
        "json", "application/json, text/html", "\xe9", "application/octet-stream", "text/json;" * 50,
    ))  # fmt: skip
    good = dumps(GOOD[endpoint])
    body = rng.choice((
        good[:-1] + b', "x": NaN}', deep(rng), b"\xff", good[:-3], b"--x\r\n\r\n--x--\r\n", b"a=b&c=%ff",
        b'{"model": "\\ud800"}', good.replace(b":", b": 1e999, ", 1), good.replace(b": 0.0", b": NaN", 1),
        good.replace(b'"Anna', b'"\\ud800 Anna'),
    ))  # fmt: skip
    return Probe("bad content type", (request(*endpoint, body, type=kind),), fine=body == good)


PATHS = (
    "/v1/chunks/%2e%2e/%2e%2e/etc/passwd", "/v1/chunks/../../etc/passwd", "/v1/chunks//", "//v1/chunks",
    "/v1/chunks/%00", "/v1/chunks/a%00b", "/v1/chunks/..%5c..%5cwindows", "/v1/chunks/%c0%ae%c0%ae/x",
    "/v1/chunks/%e0%80%af", "/v1/chunks/%ff", "/v1/chunks/%", "/v1/chunks/%zz", "/v1/chunks/%2",
    "/v1/chunks/a%2f..%2f..%2fb", "/v1/chunks/%2fetc%2fpasswd", "/v1/chunks/a#b", "/v1/chunks/%23",
    "/v1/chunks/%23-1", "/v1/chunks/%2399999999999999999999999", "/v1/chunks/%231e9", "/v1/chunks/%23 1",
    "/v1/chunks/" + "x" * 10_000, "/v1/chunks/" + "%41" * 5_000, "/" + "a/" * 3_000, "/web/../app.py",
    "/web/%2e%2e/app.py", "/web/..%2f..%2fapp.py", "/web/%2fetc%2fpasswd", "/web/", "/web", "/web/app.js/",
    "/v1/contexts/%2e%2e", "/v1/contexts/..:weave", "/v1/contexts/a%0d%0aSet-Cookie:x", "/v1/contexts/:",
    "/v1/contexts/" + "y" * 250 + ":preview", "/v1/contexts/%F0%9F%98%80:check", "/v1/contexts/a:nothing",
    "/v1/models/..%2f..", "/v1/models/%0a", "/v1/chunks:du?by=secret", "/v1/chunks?limit=-1",
    "/v1/chunks?limit=99999999999999999999", "/v1/chunks?sort=__class__", "/v1/chunks?reverse=perhaps",
    "/v1/chunks?pattern=**/**/**/**/**/x", "/v1/chunks?pattern=%00", "/v1/chunks?pattern=%ff",
    "/v1/chunks?pattern={a,{b,{c,d}}}", "/v1/chunks?pattern=" + "[" * 200, "/v1/chunks?pattern=" + "?" * 999,
    "/v1/chunks?a=b&" * 500, "/v1/chunks:find?unused_since=nan", "/v1/chunks:find?unused_since=1e999",
    "/v1/chunks:find?min_tokens=1e3", "/v1/chunks:find?min_tokens=" + "9" * 5_000, "/v1/chunks:find?tier=/",
    "/v1/chunks:find?pinned=2", "/v1/chunks:find?kind=", "/v1/chunks:find?nothing=1", "/v1/chunks:find?limit=",
    "http://evil.example/v1/chunks/none", "http://[::1/v1/chunks", "*", "v1/chunks", "?", "/?" + "q" * 9_000,
    "/v1/chunks/docs/a?text=maybe", "/v1/chunks/docs/none?force=2", "/v1/../v1/secret", "/.env", "/\u00e9",
    "/v1/chunks/%E2%80%AE", "/v1/chunks/%EF%BB%BF", "/v1/chunks/a%20", "/v1/chunks/.", "/v1/chunks/a//b",
    "/v1/chunks/%7B%7B", "/v1/chunks/a;b=c", "/v1/chunks/%5Ba-", "/v1/chunks/-rf", "/v1/chunks/~root",
)  # fmt: skip
FINE_PATHS = ("/v1/chunks?pattern", "//v1", "/?", "*", "/v1/chunks?a=b", "http://")


def bad_path(rng: random.Random) -> Probe:
    """The address tries to leave its place, or is none."""
    path = rng.choice(PATHS)
    method = rng.choice(("GET", "GET", "DELETE", "PUT", "POST"))
    body = None if method in ("GET", "DELETE") else b'{"text": 7}'
    if method == "DELETE":
        path = path.replace("/v1/chunks?", "/v1/chunks/none?").replace("/docs/a?", "/docs/none?")
    raw = request(method, path, body)
    return Probe("bad path", (raw,), fine=method == "GET" and path.startswith(FINE_PATHS))


def bad_method(rng: random.Random) -> Probe:
    """The method does not exist there, or nowhere."""
    method = rng.choice(
        (
            "FOO",
            "TRACE",
            "CONNECT",
            "OPTIONS",
            "PATCH",
            "get",
            "G\u00e9T",
            "",
            "GET GET",
            "P" * 5_000,
            "QUERY",
        )
    )
    path = rng.choice((CHAT, "/v1/chunks", "/", "/health", "*", "evil.example:443"))
    return Probe("bad method", (request(method, path, rng.choice((None, b"{}"))),))


HEADERS: tuple[tuple[str, ...], ...] = (
    ("X: " + "a" * 70_000,), tuple(f"X-{i}: {'b' * 90}" for i in range(900)), ("Content-Length: -1",),
    ("Content-Length: 1e3",), ("Content-Length: 5", "Content-Length: 6"), ("Content-Length: +5",),
    ("Content-Length: 99999999999999999999",), ("Content-Length: 0x5",), ("Content-Length: \u00b2",),
    ("Transfer-Encoding: gzip",), ("Transfer-Encoding: chunked, chunked",), ("Transfer-Encoding: xchunked",),
    ("Transfer-Encoding: chunked", "Content-Length: 4"), ("Transfer-Encoding : chunked",), ("no colon",),
    (": no name",), (" X: folded",), ("X: a\x00b",), ("X: a\rb",), ("X\x01: a",), ("Host: a", "Host: b"),
    ("Host: evil/../x",), ("Expect: 200-maybe",), ("Upgrade: websocket", "Connection: upgrade"),
    ("Content-Encoding: gzip",), ("Range: bytes=-1",), ("Cookie: " + "c=d;" * 900,), ("Te: trailers",),
    ("Accept: " + "*/*," * 2_000,), ("If-None-Match: " + '"x",' * 2_000,), ("Origin: null",),
    ("X-Forwarded-For: 127.0.0.1",), ("X-Forwarded-Host: evil.example",),
)  # fmt: skip


def bad_header(rng: random.Random) -> Probe:
    """A header is none, too large, given twice, or says what is not so."""
    more = rng.choice(HEADERS)
    method, path, body = rng.choice(
        (
            ("GET", "/v1/chunks/docs/none", None),
            ("POST", CHAT, b"{}"),
            ("POST", "/v1/contexts", b"[]"),
        )
    )
    # " X: folded" goes on with "Connection: close", which then says something else
    waits = any(each.startswith(("Content-Length", "Transfer", "Expect", " ")) for each in more)
    raw = request(method, path, body, more=more)
    return Probe("bad header", (raw,), silent=True, end="half" if waits else "read")


def bad_line(rng: random.Random) -> Probe:
    """The first line is not HTTP/1's."""
    line = rng.choice((
        b"GET / HTTP/9.9\r\n\r\n", b"GET /\r\n\r\n", b"GET  / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(400), rng.randbytes(2_000), b"\r\n\r\n\r\n",
        b"GET / HTTP/1.1\n\n", b"GET / HTTP/1.1\r\r\n\r\n", b"SSH-2.0-x\r\n", b"\x00" * 1_000, b"GET / HTTP/1.1 \r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n", b"A" * 100_000, b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n", b"*1\r\n$4\r\nPING\r\n",
    ))  # fmt: skip
    return Probe("bad first line", (line,), silent=True, end="half", fine=True)


CHUNKS = (
    b"zz\r\n{}\r\n0\r\n\r\n", b"-1\r\n", b"ffffffffffffffff\r\n{}", b"2\r\n{}{}\r\n0\r\n\r\n", b"2;" + b"e" * 70_000,
    b"2\r\n{}\r\n", b"2\n{}\n0\n\n", b"0\r\nX: a\r\n" * 3_000, b"0x2\r\n{}\r\n0\r\n\r\n", b" 2\r\n{}\r\n0\r\n\r\n",
    b"1\r\n{\r\n" * 30_000, b"0\r\n\r\n", b"2\r\n{}\r\n0\r\n\r\nGARBAGE\r\n\r\n", b"\r\n", b"\xff\xff\r\n",
)  # fmt: skip


def bad_body(rng: random.Random) -> Probe:
    """The body is longer or shorter than it says, too large, or in broken chunks."""
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
    start, good = head.encode(), dumps(GOOD["POST", CHAT] | {"model": "none"})
    chunked = start + b"Transfer-Encoding: chunked\r\n\r\n"

    def sized(n: int) -> bytes:
        return start + f"Content-Length: {n}\r\n\r\n".encode()

    match rng.randrange(6):
        case 0:  # promised more: the rest never comes
            return Probe("bad body", (sized(len(good) + 9), good), silent=True, end="half")
        case 1:  # promised less: the rest looks like another request
            return Probe("bad body", (sized(9), good), end="half")
        case 2:  # too large, and says so
            pieces = (sized(MAX_BODY + 1), b" " * 60_000)
            return Probe("bad body", pieces, end="half", silent=True)
        case 3:  # too large, and does not say so
            piece = b"8000\r\n" + b" " * 0x8000 + b"\r\n"
            return Probe("bad body", (chunked, *[piece] * 12), end="half", silent=True)
        case 4:
            return Probe("bad body", (chunked, rng.choice(CHUNKS)), silent=True, end="half")
        case _:
            return Probe("bad body", (chunked, rng.randbytes(3_000)), silent=True, end="half")


def bad_key(rng: random.Random) -> Probe:
    """There is no key, or a wrong one."""
    method, path = endpoint = rng.choice([*ENDPOINTS, ("GET", "/metrics"), ("GET", "/v1/status")])
    body = dumps(GOOD[endpoint]) if endpoint in GOOD else None
    given = rng.choice((
        (), ("Authorization: Bearer ",), ("Authorization: Basic " + KEY,), (f"Authorization: Bearer {KEY}x",),
        (f"Authorization: Bearer {KEY[:-1]}",), ("Authorization: Bearer " + "k" * 10_000,), ("Authorization: \xe9",),
        (f"Authorization: Bearer {KEY.upper()}",), (f"X-Api-Key: {KEY}x",), (f"Api-Key: {KEY}",), ("Authorization: Bearer \xff\xfe",),
        ("Authorization: Bearer none", f"X-Api-Key: {KEY}"),
        ("Authorization: Bearer none", f"Authorization: Bearer {KEY}"), ("Authorization: Bearer",),
    ))  # fmt: skip
    return Probe("bad key", (request(method, path, body, key=None, more=given),))


def cut_off(rng: random.Random) -> Probe:
    """The client goes away: in the headers, in the body, while it is answered, or in a stream."""
    stream = {"stream": True, "max_tokens": 40, "temperature": 1.0, "max_completion_tokens": None}
    raw = request("POST", CHAT, dumps(GOOD["POST", CHAT] | stream | {"n": rng.choice((1, 2))}))
    whole = request("POST", CHAT, dumps(GOOD["POST", CHAT]))
    match rng.randrange(4):
        case 0:
            return Probe("cut off", (raw[: rng.randrange(1, 90)],), silent=True, end="hang_up")
        case 1:
            return Probe("cut off", (raw[:-30],), silent=True, end="hang_up")
        case 2:
            return Probe("cut off", (whole,), silent=True, fine=True, end="hang_up")
        case _:
            return Probe("cut off", (raw,), silent=True, fine=True, end="reset")


def old_or_many(rng: random.Random) -> Probe:
    """HTTP/1.0, pipelined requests, 100-continue."""
    bad = request("POST", CHAT, b"{", close=False)
    missing = request("GET", "/v1/chunks/docs/none", close=False)
    last = request("DELETE", "/v1/contexts/none")
    match rng.randrange(5):
        case 0:
            return Probe("old or many", (request("POST", CHAT, b"[]", version="1.0"),))
        case 1:
            return Probe(
                "old or many",
                (
                    request(
                        "GET", "/v1/contexts/no", version="1.0", more=("Connection: keep-alive",)
                    ),
                ),
            )
        case 2:
            return Probe("old or many", (b"".join([bad, missing] * 8) + last,))
        case 3:
            whole = request("POST", CHAT, b"{}", more=("Expect: 100-continue",))
            return Probe("old or many", (whole[:-2], whole[-2:]))
        case _:
            whole = request("POST", CHAT, b"{}", more=("Expect: 100-continue",))
            return Probe("old or many", (whole[:-2],), silent=True, end="half")


def heavy() -> dict[str, tuple[str, str, bytes]]:
    """Return requests of up to 8 MB, which must cost a server little more than reading them."""
    chat, many = GOOD["POST", CHAT], 100_000

    def talk(content: Any, n: int = 1) -> bytes:
        return dumps(chat | {"messages": [{"role": "user", "content": content}] * n})

    tokens = dumps({"tokens": [60] * 10 * many})
    part = {"type": "chunk", "name": "docs/a"}
    return {
        "a long message": ("POST", CHAT, talk("Anna " * 15 * many)),
        "a long word": ("POST", CHAT, talk("p" * 75 * many)),
        "many messages": ("POST", CHAT, talk("a", many // 2)),
        "many texts": ("POST", CHAT, talk([{"type": "text", "text": "a"}] * (many // 2))),
        "many chunks": ("POST", CHAT, talk([part] * (many // 2))),
        "a long name": ("POST", CHAT, talk([part | {"name": "x" * 75 * many}])),
        "many keys": ("POST", CHAT, dumps(chat | {f"k{i}": 0 for i in range(5 * many)})),
        "many lists": ("POST", CHAT, b"[" + b"[]," * 25 * many + b"[]]"),
        "many tokens": ("PUT", "/v1/chunks/x", tokens),
        "many prompts": ("POST", "/v1/completions", dumps({"model": "demo", "prompt": ["a"] * many, "n": 16})),
        "many token prompts": ("POST", "/v1/completions", dumps({"model": "demo", "prompt": [60] * 10 * many})),
        "many names": ("POST", "/v1/compose", dumps({"template": "{a}", "values": {"a": ["docs/a"] * 5 * many}})),
        "many holes": ("POST", "/v1/compose", dumps({"template": "{docs/a}" * 9 * many})),
        "a long template": ("POST", "/v1/compose", dumps({"template": "Anna " * 15 * many})),
        "a long chunk": ("PUT", "/v1/chunks/x", dumps({"text": "Anna " * 15 * many})),
        "a long part": ("POST", "/v1/contexts/chat/a:append", dumps({"text": "Anna " * 15 * many})),
        "many parts": ("POST", "/v1/contexts/chat/a:reorder", dumps({"order": list(range(10 * many))})),
        "many stops": ("POST", CHAT, dumps(chat | {"stop": [f"z{i}" for i in range(6 * many)]})),
    }  # fmt: skip


KINDS: dict[Callable[[random.Random], Probe], int] = {
    wrong_value: 26, wrong_messages: 6, wrong_fields: 8, bad_json: 16, bad_type: 6, bad_path: 14, bad_method: 4,
    bad_header: 7, bad_line: 4, bad_body: 5, bad_key: 5, cut_off: 4, old_or_many: 4,
}  # fmt: skip


def probes(n: int, seed: int) -> Iterator[Probe]:
    """Yield ``n`` probes."""
    rng = random.Random(seed)
    makers, weights = list(KINDS), list(KINDS.values())
    for _ in range(n):
        yield rng.choices(makers, weights)[0](rng)


def drips(seed: int) -> Iterator[tuple[bytes, bytes, float]]:
    """Yield what slow clients send at once, then byte by byte, and the seconds they are given."""
    rng = random.Random(seed)
    for i in range(36):
        if i % 3:
            yield b"GET /health HTTP/1.1\r\n", b"X: " + rng.randbytes(200).hex().encode(), 10.0
        else:
            body = b" " * 400
            whole = request("POST", CHAT, body, close=False)
            yield whole.removesuffix(body), body, 30.0
