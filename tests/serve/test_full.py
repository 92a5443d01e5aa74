"""A full disk is said as such (507, a degraded /health), loses nothing, and is over when there is room."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from loaded import short_runner

from kvweave import Engine
from kvweave.store.tier import files

A = "Anna's river is cold so well"


def health(served: Any) -> str:
    return str(served.nobody("GET", "/health")["status"])


def test_an_index_without_room(serve: Any, tmp_path: Path) -> None:
    served = serve(home=tmp_path / "home")
    anna = served.anna
    anna.put("a", A)
    assert health(served) == "ok"

    def pages(engine: Any, more: int) -> None:
        db = engine.table._rows.db
        n = db.execute("PRAGMA page_count").fetchone()[0]
        db.execute(f"PRAGMA max_page_count={n + more}")

    served.client.portal.call(served.driver.call, lambda engine: pages(engine, 0))
    for n in range(40):  # until what is free in its pages is used up
        body = {"text": f"{n} {A} " * 60}
        if anna.client.put(f"/v1/chunks/f{n}", json=body, headers=anna.headers).is_error:
            break
    before = anna.names()
    long = {"text": " ".join(f"{A} {i}" for i in range(100))}
    chat = {"model": "kvweave", "messages": [{"role": "user", "content": long["text"]}]}
    for method, path, body in (
        ("PUT", "/v1/chunks/b", long),
        ("POST", "/v1/chat/completions", chat | {"max_tokens": 2}),
        ("POST", "/v1/compose", {"template": long["text"]}),
    ):
        told = anna.error(method, path, body, 507)
        assert told["code"] == "no_space" and told["hint"] and "sqlite" not in told["message"]
    assert health(served) == "degraded"
    assert anna.names() == before and anna("GET", "/v1/chunks/a", params={"text": "true"})["text"]
    assert anna("DELETE", "/v1/chunks/a")["data"], "what goes needs no room"
    served.client.portal.call(served.driver.call, lambda engine: pages(engine, 1000))
    anna("PUT", "/v1/chunks/b", long, 201)
    served.app.state.kvweave.disk_failed -= 61
    assert health(served) == "ok"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_tier_without_room(
    serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    served = serve(home=tmp_path / "home")
    anna = served.anna

    def full(*args: Any) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(files, "_write_all", full)
        told = anna.error("PUT", "/v1/chunks/a", {"text": A, "durable": True}, 507)
        assert told["code"] == "no_space" and health(served) == "degraded"
        assert anna.names() == [], "it is not half there"
    anna("PUT", "/v1/chunks/a", {"text": A, "durable": True}, 201)
    assert anna("GET", "/v1/chunks/a")["name"] == "a"


@pytest.mark.parametrize("another", [False, True])
def test_a_home_that_was_moved(serve: Any, tmp_path: Path, another: bool) -> None:
    served = serve(home=tmp_path / "home")
    served.anna.put("a", A)
    os.rename(tmp_path / "home", tmp_path / "away")
    if another:
        with Engine(short_runner(), home=tmp_path / "home") as engine:
            engine.put("other", A)
    try:
        text = {"text": A + " b"}
        chat = {"model": "kvweave", "messages": [{"role": "user", "content": A}], "max_tokens": 2}
        for method, path, body in (
            ("PUT", "/v1/chunks/b", text),
            ("PUT", "/v1/chunks/b", text | {"durable": True}),
            ("DELETE", "/v1/chunks/a", None),
            ("POST", "/v1/chat/completions", chat),
        ):
            told = served.anna.error(method, path, body, 503)
            assert told["code"] == "home_moved" and "moved" in told["message"] and told["hint"]
            assert str(tmp_path) not in str(told), "where it was is not the client's business"
        assert health(served) == "degraded" and served.anna.names() == ["a"]
    finally:
        shutil.rmtree(tmp_path / "home", ignore_errors=True)
        os.rename(tmp_path / "away", tmp_path / "home")
    served.anna.put("b", A + " b")
    served.app.state.kvweave.disk_failed -= 61
    assert health(served) == "ok"
