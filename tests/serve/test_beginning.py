"""What comes before an answer takes the model in the steps of all: nobody's decode stands still for it."""

from __future__ import annotations

import asyncio
import sys
import threading

import pytest
from serving import Driven, run
from weaving import text

from kvweave import Sampling
from kvweave.demo.vocabulary import ENTITIES
from kvweave.errors import InvalidArgument, Overloaded

A = " ".join(ENTITIES[:40])
SYSTEM = {"role": "system", "content": A}
CHAT = {"model": "kvweave", "max_tokens": 2, "temperature": 0}


def said(content: str) -> dict:
    return {"role": "user", "content": content}


# ---- every request that needs the model


@pytest.fixture
def outside(serve, monkeypatch):
    """A server, and the passes in its driver's thread that are in no step of the driver."""
    served = serve()
    found: list[str] = []
    runner, driver = served.engine.runner, served.driver
    forward = runner.forward

    def driving() -> bool:
        return threading.current_thread() is driver._thread

    def callers() -> list[str]:
        frame, names = sys._getframe(2), []
        while frame is not None:
            names.append(frame.f_code.co_qualname)
            frame = frame.f_back
        return names

    def passing(works):
        if driving() and "Driver._step" not in (names := callers()):
            found.append(" < ".join(names[:9]))
        return forward(works)

    monkeypatch.setattr(runner, "forward", passing)
    return served, found


CHATS: dict[str, dict] = {
    "a system message": {"messages": [SYSTEM, said("so")]},
    "several answers": {"messages": [SYSTEM, said(A)], "n": 3},
    "tools": {
        "messages": [said("so")],
        "tools": [{"type": "function", "function": {"name": "f", "description": A}}],
    },
}


@pytest.mark.parametrize("what", CHATS)
def test_of_a_chat(outside, what):
    served, found = outside
    for _ in range(2):
        served.anna("POST", "/v1/chat/completions", CHAT | CHATS[what])
        served.settle()
    assert not found


def test_of_a_prompt_that_is_read_ahead(outside):
    served, found = outside
    body = {"model": "kvweave", "max_tokens": 0, "system": A, "messages": [said(A)]}
    assert not served.anna("POST", "/v1/messages", body)["content"]
    served.settle()
    assert not found


def test_of_chunks_that_are_computed_again(outside):
    served, found = outside
    served.anna.put("docs/a", A)
    served.anna.put("docs/b", f"{A} so")
    served.anna("POST", "/v1/chunks/docs/a:place", {"tier": "none"})
    made = served.anna("POST", "/v1/chunks/docs/a:place", {"tier": "ram"})["data"]
    assert [(e["name"], e["tier"]) for e in made] == [("docs/a", "ram")]
    served.anna("POST", "/v1/chunks/docs/a:place", {"tier": "none"})
    parts = [{"type": "chunk", "name": "docs/a"}]
    served.anna("POST", "/v1/chat/completions", CHAT | {"messages": [SYSTEM, said(parts)]})
    for keep in ("kvzip:0.5", "snapkv:0.5"):
        to = {"keep": keep, "to": f"docs/{keep[:3]}"}
        made = served.anna("POST", "/v1/chunks/docs/b:compress", to)["data"]
        assert made[0]["tier"] == "ram" and 0 < made[0]["n_bytes"]
        served.anna("POST", f"/v1/chunks/docs/{keep[:3]}:place", {"tier": "none"})
        served.anna("POST", f"/v1/chunks/docs/{keep[:3]}:denoise")
    served.settle()
    assert not found


def test_of_a_context(outside):
    served, found = outside
    served.anna("POST", "/v1/contexts", {"name": "c", "system": A}, 201)
    served.anna("POST", "/v1/contexts/c:append", {"text": A})
    served.anna("POST", "/v1/contexts/c:weave")
    served.anna("POST", "/v1/contexts/c:ask", {"content": A, "max_tokens": 2})
    served.anna("POST", "/v1/contexts/c:check")
    served.settle()
    assert not found


def test_of_what_stands_behind_a_base_that_was_lost(outside):
    served, found = outside
    served.anna("POST", "/v1/contexts", {"name": "c", "system": A}, 201)
    for word in ("so", "well"):
        served.anna("POST", "/v1/contexts/c:append", {"text": f"{word} {A}"})
        served.anna("POST", "/v1/chunks/c/s-000:place", {"tier": "none"})
        part = served.anna("GET", "/v1/contexts/c")["parts"][-1]
        served.anna("POST", f"/v1/chunks/%23{part['id']}:denoise")
    for keep in ("keydiff:0.5", "kvzip:0.5"):
        served.anna("POST", "/v1/chunks/c/s-000:place", {"tier": "none"})
        served.anna("POST", f"/v1/chunks/%23{part['id']}:compress", {"keep": keep, "to": keep[:5]})
    served.settle()
    assert not found


MEMORY = "/v1/memory/c"
ZONES = {"window": 20, "summaries": 20, "summary": 6, "recalled": 60, "warm": 0, "cold": "none"}


def test_of_a_memory(outside):
    served, found = outside
    anna = served.anna
    anna("POST", "/v1/contexts", {"name": "c", "system": A}, 201)
    anna("POST", f"{MEMORY}:open", {"budget": ZONES}, 201)
    for i, word in enumerate(ENTITIES[:4]):
        anna("POST", f"{MEMORY}:write", {"name": f"notes/{i}", "text": f"{word} so well {A}"})
        anna("POST", f"{MEMORY}:tell", {"text": f"then {word} saw it and it was so well {A}"})
    assert anna("POST", f"{MEMORY}:settle")["names"], "the model wrote no summary"
    for by in ("attention", "embedding"):
        looked = {"question": f"what of {ENTITIES[1]}", "by": by}
        assert anna("POST", f"{MEMORY}:search", looked)["data"]
        assert anna("POST", f"{MEMORY}:recall", looked | {"n": 1})["names"]
        anna("POST", f"{MEMORY}:ask", {"content": "so well", "recall": by, "max_tokens": 2})
    while anna("POST", f"{MEMORY}:idle")["slept"]:
        pass
    anna("POST", f"{MEMORY}:write", {"name": "notes/new", "text": f"so {A}"})
    served.settle()
    assert not found


def test_a_context_is_not_used_before_its_first_message_is_there(serve):
    served = serve()
    opening = []

    def look(engine):
        for _ in engine.opening("c", system=A, namespace="anna"):
            opening.append(served.anna)  # a caller's thread could ask now
            yield _

    def seen(engine):
        context = engine.contexts_of("anna").get("c")
        return None if context is None else served.driver.is_busy(context)

    task = served.on_engine(look)
    assert len(opening) == 1 and task is None
    assert served.on_engine(seen) is False


# ---- a beginning that takes passes


def begin(driven: Driven, name: str, n_rows: int = 200, fails: bool = False):
    """An answer that is begun behind the computation of a chunk."""

    def beginning(engine):
        driven.begun.append(name)
        id = engine.maker.add(text(n_rows, len(name)))
        engine.table.hold(id, name)
        try:
            yield from engine.maker.computing(id)
            if fails:
                raise InvalidArgument("x", "it fails")
        finally:
            engine.table.release(id, name)
            driven.ended.append((name, ["begun"]))
        context = engine.context(name, denoise=False)
        context.append(text(5, 1))
        return [context.begin(Sampling(max_tokens=3, ignore_eos=True))]

    def done(engine, answers):
        driven.ended.append((name, [answer.finish for answer in answers]))
        engine.close_context(name)

    return driven.driver.answer("", beginning, done)


async def read(events) -> list:
    return [event async for event in events]


def test_others_go_on_while_an_answer_is_begun(drive):
    driven = drive({"max_rows": 64})

    async def main():
        other = asyncio.create_task(driven.finishes("other", n=40))
        await driven.until(lambda: driven.begun == ["other"])
        task = asyncio.create_task(read(begin(driven, "slow", 400)))
        await driven.until(lambda: driven.begun == ["other", "slow"] or bool(driven.steps.allow()))
        n = driven.driver.stats()["tokens"]
        assert driven.driver.stats()["active"] == 2
        driven.steps.allow(2)
        await driven.until(lambda: driven.driver.stats()["tokens"] > n)
        assert ("slow", ["begun"]) not in driven.ended, "it was begun in one go"
        driven.steps.open.set()
        assert await other == ["length"] and len(await task) > 1
        await driven.settled()

    run(main())
    assert driven.engine.contexts == {} and driven.driver.stats()["active"] == 0


@pytest.mark.parametrize("how", ["hangs up", "fails", "stops"])
def test_a_beginning_that_ends_early_leaves_nothing(drive, how):
    driven = drive({"max_rows": 64})

    async def main():
        task = asyncio.create_task(read(begin(driven, "slow", 300, how == "fails")))
        await driven.until(lambda: driven.steps.n_asked == 1)
        if how == "hangs up":
            task.cancel()
        if how == "stops":
            driven.driver.refuse(grace=0)
        driven.steps.open.set()
        wanted = {
            "hangs up": asyncio.CancelledError, "fails": InvalidArgument, "stops": Overloaded
        }  # fmt: skip
        with pytest.raises(wanted[how]):
            await task
        if how == "stops":
            await asyncio.to_thread(driven.driver.stop)
        else:
            await driven.settled()
            assert await driven.finishes("next") == ["length"]

    run(main())
    assert ("slow", ["begun"]) in driven.ended and ("slow", []) not in driven.ended
    assert driven.driver.stats()["active"] == 0 and driven.engine.contexts == {}
    assert not driven.engine.loop.requests
