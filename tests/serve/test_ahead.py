"""What waiting answers use: protected and loaded while others run."""

from __future__ import annotations

import asyncio
import contextlib
import random

from hypothesis import given
from hypothesis import strategies as st
from serving import Driven, run
from weaving import text

from kvweave.serve.driver.fair import FairLock, FairQueue
from kvweave.serve.driver.thread import Driver
from kvweave.serve.driver.work import nothing, unknown

A = "Nina's river is wide . so well then we saw it ."


@given(st.lists(st.sampled_from("abc")), st.integers(0, 9))
def test_first_is_what_would_be_taken(tenants, n):
    queue = FairQueue()
    for i, tenant in enumerate(tenants):
        queue.put(tenant, f"{tenant}{i}")
    first = queue.first(n)
    assert len(queue) == len(tenants)
    assert first == [queue.take() for _ in range(min(n, len(tenants)))]


def test_a_lock_is_held_by_one_at_a_time_and_tenants_take_turns():
    """Some give up while they wait, or just as it becomes theirs: nobody waits for ever."""

    async def all_of_them(seed: int) -> None:
        draw, lock, order, inside = random.Random(seed), FairLock(), [], 0

        async def one(tenant: str, patience: float) -> None:
            nonlocal inside
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience), lock.turn(tenant):
                    inside += 1
                    assert inside == 1
                    order.append(tenant)
                    try:
                        await asyncio.sleep(0.001 * draw.random())
                    finally:
                        inside -= 1

        many = [one("anna", 60 if draw.random() < 0.7 else 0.01 * draw.random()) for _ in range(30)]
        tasks = [asyncio.create_task(each) for each in [*many, one("berta", 60)]]
        for task in draw.sample(tasks[:30], 5):
            await asyncio.sleep(0)
            task.cancel()
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
        await asyncio.wait_for(one("last", 60), 60)
        assert order[-1] == "last" and order.index("berta") <= 6

    for seed in range(30):
        run(all_of_them(seed))


def stored(driven: Driven, *names: str) -> list[int]:
    engine = driven.engine
    for i, name in enumerate(names):
        engine.put(name, text(20, i + 1))
        engine.place(name, "disk")
    return [int(engine.table.resolve(name).id) for name in names]


def asking(driven: Driven, name: str, wants):
    """Read an answer whose chunks ``wants`` tells to the end."""
    begun = driven.begun

    def begin(engine):
        begun.append(name)
        return []

    async def read():
        return [event async for event in driven.driver.answer("", begin, wants=wants)]

    return asyncio.create_task(read())


def test_chunks_of_a_waiting_answer_are_loaded_while_another_runs(drive, tmp_path):
    driven = drive({"home": tmp_path / "home"}, max_active=1)
    a, b, other = stored(driven, "a", "b", "other")
    shelf = driven.engine.shelf
    told, asked = [], []
    upcoming = shelf.upcoming
    shelf.upcoming = lambda keys: (told.append(list(keys)), upcoming(told[-1]))

    def wants(engine):
        asked.append(1)
        return [a, b, a]

    async def main():
        first = asyncio.create_task(driven.finishes("first"))
        await driven.until(lambda: driven.begun == ["first"])
        second = asking(driven, "second", wants)
        await driven.until(lambda: driven.driver.stats()["waiting"] == 1)
        driven.steps.allow(2)
        await driven.until(lambda: shelf.tier(a) == shelf.tier(b) == "ram")
        assert driven.begun == ["first"], "before its turn"
        assert shelf.tier(other) == "disk" and told == [[a, b, a]] and asked == [1]
        driven.steps.open.set()
        await asyncio.gather(first, second)

    run(main())
    assert driven.begun == ["first", "second"]


def test_only_a_part_of_the_memory_is_filled_ahead(drive, tmp_path):
    driven = drive({"home": tmp_path / "home"}, max_active=1)
    ids = stored(driven, "a", "b", "c")
    engine = driven.engine
    engine.shelf.budget = 4 * 50 * engine.runner.row_bytes  # a quarter: two chunks of 20

    async def main():
        first = asyncio.create_task(driven.finishes("first"))
        await driven.until(lambda: driven.begun == ["first"])
        second = asking(driven, "second", lambda engine: ids)
        await driven.until(lambda: driven.driver.stats()["waiting"] == 1)
        driven.steps.allow(2)
        await driven.until(lambda: engine.shelf.tier(ids[1]) == "ram")
        assert [engine.shelf.tier(id) for id in ids] == ["ram", "ram", "disk"]
        driven.steps.open.set()
        await asyncio.gather(first, second)

    run(main())


def test_an_answer_that_cannot_tell_fails_or_not_in_its_own_turn(drive, tmp_path):
    driven = drive({"home": tmp_path / "home"}, max_active=1)

    def wants(engine):
        raise ValueError("not yet")

    async def main():
        first = asyncio.create_task(driven.finishes("first"))
        await driven.until(lambda: driven.begun == ["first"])
        second = asking(driven, "second", wants)
        await driven.until(lambda: driven.driver.stats()["waiting"] == 1)
        driven.steps.open.set()
        assert await first == ["length"] and await second == []

    run(main())


def test_chunks_that_are_gone_harm_nobody(drive, tmp_path):
    driven = drive({"home": tmp_path / "home"}, max_active=1)
    [a] = stored(driven, "a")
    driven.engine.shelf.tier = lambda id: "disk"  # says what is not so

    async def main():
        first = asyncio.create_task(driven.finishes("first"))
        await driven.until(lambda: driven.begun == ["first"])
        second = asking(driven, "second", lambda engine: [a + 100, a])
        await driven.until(lambda: driven.driver.stats()["waiting"] == 1)
        driven.steps.open.set()
        assert await first == ["length"] and await second == []

    run(main())


def test_chats_and_contexts_tell_their_chunks(serve, monkeypatch):
    told, answer = [], Driver.answer

    def spy(self, tenant, begin, done=nothing, wants=unknown):
        told.append(wants)
        return answer(self, tenant, begin, done, wants)

    monkeypatch.setattr(Driver, "answer", spy)
    served = serve()
    id = served.anna.put("docs/a", A)["id"]
    parts = [{"type": "chunk", "name": "docs/a"}, {"type": "text", "text": "so ?"}]
    body = {"model": "kvweave", "messages": [{"role": "user", "content": parts}], "max_tokens": 2}
    served.anna("POST", "/v1/chat/completions", body)
    assert id in served.on_engine(told[-1])
    opened = served.anna("POST", "/v1/contexts", {"name": "c", "system": A}, 201)
    served.anna("POST", "/v1/contexts/c:append", {"chunk": "docs/a"})
    served.anna("POST", "/v1/contexts/c:generate", {"max_tokens": 2})
    assert served.on_engine(told[-1])[:2] == [opened["base"], id]
