"""What object stores answer that says nothing of the object, on loopback."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from needs import PIP, lack
from store.values import aligned, put_one

from kvweave.errors import StoreError
from kvweave.store.tier.base import Get, Outcome, Tier
from kvweave.store.tier.s3 import Archive

pytest.importorskip("obstore", reason=lack("obstore is not installed", PIP, "obstore"))
stores = pytest.importorskip("obstore.store")
Answer = tuple[int, str]  # status, code; 200: it worked, and what there is, or its length
Ask = Callable[[str], Answer]  # of a method


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, *_: Any) -> None:
        pass

    def do_any(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.asked.append(self.command)
        status, code = self.server.answer(self.command)
        said = f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode()
        body = said if status != 200 else code.encode() if code.startswith("<") else b"rows"
        self.send_response(status)
        self.send_header("Content-Length", code if code.isdigit() else str(len(body)))
        self.send_header("ETag", '"1"')
        self.send_header("Last-Modified", "Wed, 21 Oct 2015 07:28:00 GMT")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = do_any


class _Server(ThreadingHTTPServer):
    answer: Ask
    asked: list[str]


@pytest.fixture
def at(request: pytest.FixtureRequest) -> Iterator[Callable[[Ask], tuple[Tier, list[str]]]]:
    server = _Server(("127.0.0.1", 0), _Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    store = stores.S3Store(
        "bucket", endpoint=f"http://127.0.0.1:{server.server_port}", region="r",
        access_key_id="a", secret_access_key="b", client_options={"allow_http": True},
        retry_config={"max_retries": 0},
    )  # fmt: skip
    tier = Archive(store, timeout=5.0)

    def serve(answer: Ask) -> tuple[Tier, list[str]]:
        server.answer, server.asked = answer, []
        return tier, server.asked

    yield serve
    tier.close()
    server.shutdown()
    thread.join()
    server.server_close()


REFUSED = [
    (404, "NoSuchBucket"), (403, "AccessDenied"), (301, "PermanentRedirect"), (400, "RequestTimeTooSkewed"),
    (405, "MethodNotAllowed"), (501, "NotImplemented"), (503, "SlowDown"), (404, "default backend"),
]  # fmt: skip


@pytest.mark.parametrize("said", REFUSED, ids=[code for _, code in REFUSED])
def test_a_refusal_says_nothing_of_a_value(
    at: Callable[[Ask], tuple[Tier, list[str]]], said: Answer
) -> None:
    tier, _ = at(lambda method: said)
    outcomes = [put_one(tier, "a", b"rows"), *tier.get([Get("a", 0, [aligned(4)])])]
    outcomes += [*tier.discard(["a", "b"]), *tier.look(["a", "b"])]  # type: ignore[list-item]
    for outcome in outcomes:
        assert isinstance(outcome, Outcome) and outcome.state == "failed" and outcome.why
    with pytest.raises(StoreError) as caught:
        list(tier.keys())
    assert caught.value.hint


def test_what_is_not_there_is_missing(at: Callable[[Ask], tuple[Tier, list[str]]]) -> None:
    tier, asked = at(lambda method: (404, "NoSuchKey"))
    assert [o.state for o in tier.look(["a", "b"])] == ["missing"] * 2  # type: ignore[union-attr]
    assert asked == ["GET", "GET"], "an answer to HEAD would not say what it is that is not there"
    assert tier.get([Get("a", 0, [aligned(4)])])[0].state == "missing"
    assert tier.discard(["a"])[0].ok


@pytest.mark.parametrize("status", [409, 412])
@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("n", [1, 9, 99])
def test_a_create_that_was_in_anothers_way_is_no_value(
    at: Callable[[Ask], tuple[Tier, list[str]]], status: int, there: bool, n: int
) -> None:
    """409, ConditionalRequestConflict: somebody else was at it, or removed it just then."""

    def answer(method: str) -> Answer:
        if method == "PUT":
            return (status, "Conflict") if asked.count("PUT") <= n else (200, "")
        return (200, "") if there else (404, "NoSuchKey")

    tier, asked = at(answer)
    outcome = put_one(tier, "a", b"rows")
    assert outcome.state == ("exists" if there else "done" if n < 10 else "failed"), outcome
    assert asked.count("PUT") == (1 if there else min(n + 1, 10))


def test_a_page_of_something_else_is_no_verdict(
    at: Callable[[Ask], tuple[Tier, list[str]]],
) -> None:
    """A login page, or what has no ranges: its length is not the value's."""
    tier, _ = at(lambda method: (200, ""))
    (outcome,) = tier.get([Get("a", 0, [aligned(100)])])
    assert outcome.state == "failed" and "non-partial" in outcome.why


def test_a_length_that_no_index_takes_is_none(
    at: Callable[[Ask], tuple[Tier, list[str]]],
) -> None:
    tier, _ = at(lambda method: (200, str(2**64 - 1) if method == "HEAD" else ""))
    (found,) = tier.look(["a"])
    assert isinstance(found, Outcome) and found.state == "failed" and str(2**64 - 1) in found.why


def _page(names: list[str], token: str = "") -> Answer:
    when = "<LastModified>2026-11-29T00:00:00.000Z</LastModified>"
    each = "".join(f"<Contents><Key>{n}</Key>{when}<Size>7</Size></Contents>" for n in names)
    more = f"<NextContinuationToken>{token}</NextContinuationToken>" if token else ""
    return 200, f"<ListBucketResult>{each}{more}</ListBucketResult>"


def test_a_list_that_never_ends_is_left(at: Callable[[Ask], tuple[Tier, list[str]]]) -> None:
    tier, asked = at(lambda method: _page([f"kvweave/k{i}.kv" for i in range(400)], "again"))
    for ask in (lambda: list(tier.keys()), lambda: tier.n_bytes):
        with pytest.raises(StoreError, match="circles") as caught:
            ask()
        assert caught.value.hint
    assert len(asked) < 30


def test_a_list_may_tell_twice_and_of_others(at: Callable[[Ask], tuple[Tier, list[str]]]) -> None:
    others = ["kvweave/A B.kv", f"kvweave/{'x' * 201}.kv", "kvweave/.kv", "kvweave/", "kvweave/a/b.kv"]  # fmt: skip
    tier, _ = at(lambda method: _page(["kvweave/a.kv", *others, "kvweave/b.kv", "kvweave/a.kv"]))
    assert sorted(tier.keys()) == ["a", "b"] and tier.n_bytes == 14


def test_an_object_that_hides_others_is_named(at: Callable[[Ask], tuple[Tier, list[str]]]) -> None:
    tier, _ = at(lambda method: _page(["kvweave/a.kv", "kvweave//b.kv"]))
    with pytest.raises(StoreError, match=r"kvweave//b\.kv") as caught:
        list(tier.keys())
    assert "remove it" in caught.value.hint
