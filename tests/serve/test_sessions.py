"""Idle contexts that are used again. python -m pytest tests/serve/test_sessions.py"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from conftest import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import SINGLE, full_prefill
from weaving import text

from kvweave import Engine, Sampling
from kvweave.chunk.identity import ChunkId
from kvweave.errors import OverBudget, OverQuota
from kvweave.run.loop import Task
from kvweave.serve.driver.tasks import Tasks
from kvweave.serve.guard.quota import Quota
from kvweave.serve.reuse.find import Assembler
from kvweave.serve.reuse.library import Library
from kvweave.serve.reuse.names import AutoNames
from kvweave.serve.reuse.pool import Sessions
from kvweave.serve.reuse.pooled import PooledContext, WeaveOptions
from kvweave.serve.reuse.render import PromptSegment
from kvweave.weave.answer import Answer

Make = Callable[..., Engine]
SYSTEM = text(6, 100)


class Pool:
    """Sessions of one engine, and requests of token lists."""

    def __init__(self, engine: Engine, **options: Any) -> None:
        self.engine = engine
        self.library = Library(engine.table)
        self.assembler = Assembler(engine, self.library)
        self.late: list[ChunkId] = []
        self.sessions = Sessions(engine, self.library, later=self.late.extend, **options)

    def open(
        self,
        *messages: list[int],
        namespace: str = "",
        how: WeaveOptions | None = None,
        reuse: Any = "all",
    ) -> PooledContext:
        """Open a session for a system message and these; the last one is new."""
        opening = self.opening(*messages, namespace=namespace, how=how, reuse=reuse)
        session = self.engine.loop.finish(opening)
        assert session.context.tokens() == [*SYSTEM, *(t for m in messages for t in m)]
        return session

    def opening(
        self,
        *messages: list[int],
        namespace: str = "",
        how: WeaveOptions | None = None,
        reuse: Any = "all",
    ) -> Task[PooledContext]:
        last = len(messages) - 1
        segments = [PromptSegment("system", "", "system 0", False, tokens=tuple(SYSTEM))]
        for i, message in enumerate(messages):
            kind: Any = "assistant" if i % 2 else "user"
            segments.append(
                PromptSegment(kind, "", f"{kind} {i}", i == last, tokens=tuple(message))
            )
        base = self.sessions.engine_base
        wanted = self.assembler.assemble(segments, namespace, base, reuse)
        return self.sessions.opening(wanted, how or WeaveOptions(), reuse)

    def answer(self, session: PooledContext, n: int = 3) -> Answer:
        sampling = Sampling(max_tokens=n, logprobs=1, ignore_eos=True)
        return self.sessions.begin(session, sampling).run()

    def ask(self, *messages: list[int], idle: bool = True, **options: Any) -> Answer:
        """Answer and give back; the idle work is done too, if there is time for it."""
        session = self.open(*messages, **options)
        answer = self.answer(session)
        self.sessions.give_back([session])
        if idle:
            self.idle()
        return answer

    def idle(self) -> None:
        alive = [id for id in self.late if self.library.table.lookup(f"#{id}") is not None]
        self.engine.maker.canonicalise(alive)
        self.late.clear()

    def talk(self, n: int, first: int = 0, **options: Any) -> list[list[int]]:
        """Say ``n`` messages of 12 tokens, each with its answer; return all of it."""
        said: list[list[int]] = []
        for i in range(n):
            said.append(text(12, first + i))
            said.append(list(self.ask(*said, **options).tokens))
        return said


def counts(answer: Answer) -> tuple[int, int, int]:
    """Return tokens exact, reused and prefilled."""
    plan = answer.plan
    return plan.exact, plan.reused, plan.prefilled


def test_the_next_request_of_a_conversation_keeps_its_rows(engines: Make) -> None:
    pool = Pool(engines())
    said = pool.talk(3)
    answer = pool.ask(*said, text(9, 9))
    assert counts(answer) == (6 + 3 * 15 - 1, 0, 9 + 1), "the last sampled token had no row"
    assert len(pool.sessions) == 1


def test_a_dropped_turn_leaves_the_rest_placed(engines: Make) -> None:
    pool = Pool(engines())
    said = pool.talk(4)
    answer = pool.ask(*said[2:], text(9, 9))
    assert counts(answer) == (6 + 12, 3 * 15 - 12, 9)
    names = [span.part for span in answer.plan.spans]
    assert [name.split("/")[-1] for name in names[1:3]] == ["u-001", "a-001"]


def test_without_idle_time_canonical_kv_is_computed_once_when_it_is_needed(engines: Make) -> None:
    calm, busy = Pool(engines()), Pool(engines())
    said = calm.talk(4)
    assert busy.talk(4, idle=False) == said, "while nothing is dropped all rows are kept"
    assert all(busy.engine.shelf.tier(id) == "none" for id in busy.late)
    expected = calm.ask(*said[2:], text(9, 9))
    session = busy.open(*said[2:], text(9, 9))
    answer = busy.answer(session)
    assert counts(answer) == counts(expected) == (6 + 12, 3 * 15 - 12, 9)
    assert answer.tokens == expected.tokens
    assert [c.logprob for c in answer.choices] == pytest.approx(
        [c.logprob for c in expected.choices]
    )
    assert session.n_completed == 3 * 15
    busy.sessions.give_back([session])
    said = [*said[4:], text(9, 9), list(answer.tokens), text(9, 10)]
    session = busy.open(*said)
    assert session.n_completed == 9 + 3, "the last turn only"
    assert counts(busy.answer(session)) == (6 + 12, 2 * 15 - 12 + 9 + 3, 9)
    busy.sessions.give_back([session])


def test_what_is_computed_so_is_bounded_by_a_pass_the_rest_is_prefilled(engines: Make) -> None:
    pool = Pool(engines(max_rows=16))
    said = pool.talk(4, idle=False)
    session = pool.open(*said[2:], text(9, 9))
    assert session.n_completed == 12 + 3
    assert counts(pool.answer(session)) == (6 + 12, 3, 2 * 15 + 9)
    pool.sessions.give_back([session])


def test_a_regenerated_answer_takes_the_session_a_branch_copies_it(engines: Make) -> None:
    pool = Pool(engines())
    said = pool.talk(4)
    again = pool.ask(*said[:-1])
    assert list(again.tokens) == said[-1] and len(pool.sessions) == 1
    branch = pool.ask(*said[:3], text(9, 9))
    assert counts(branch) == (6 + 15 + 12, 0, 9)
    assert len(pool.sessions) == 2, "the long conversation is still there"
    assert counts(pool.ask(*said, text(9, 8)))[2] == 9 + 1


def test_a_conversation_with_little_in_common_gets_a_context_of_its_own(engines: Make) -> None:
    pool = Pool(engines())
    said = pool.talk(3)
    pool.talk(1, first=50)
    assert len(pool.sessions) == 2
    assert counts(pool.ask(*said, text(9, 9)))[1] == 0


def test_sessions_in_use_are_not_shared(engines: Make) -> None:
    pool = Pool(engines())
    said = pool.talk(2)
    first, second = pool.open(*said, text(9, 9)), pool.open(*said, text(9, 8))
    assert first.context is not second.context
    one, two = pool.answer(first), pool.answer(second)
    assert counts(one)[2] == 10
    assert counts(two) == (6 + 12, 18, 9), "it places the chunks"
    pool.sessions.give_back([first, second])
    assert len(pool.sessions) == 2


def test_how_a_request_is_woven_parts_sessions(engines: Make) -> None:
    pool = Pool(engines())
    said = pool.talk(2)
    other = pool.open(*said, text(9, 9), how=WeaveOptions(repair="full"))
    assert other.context.settings.repair == "full"
    pool.sessions.give_back([other])
    assert len(pool.sessions) == 2


def test_namespaces_share_nothing(engines: Make) -> None:
    pool = Pool(engines())
    said = pool.talk(2, namespace="anna")
    n = len(SYSTEM) + sum(map(len, said)) + 9
    session = pool.open(*said, text(9, 9), namespace="berta")
    answer = pool.answer(session)
    assert session.n_computed == 6 and counts(answer) == (6, 0, n - 6)
    pool.sessions.give_back([session])


def test_no_more_than_so_many_are_kept_the_oldest_go(engines: Make) -> None:
    engine = engines()
    pool = Pool(engine, max_sessions=2)
    talks = [pool.talk(1, first=10 * i) for i in range(3)]
    assert len(pool.sessions) == len(engine.contexts) == 2
    assert counts(pool.ask(*talks[0], text(9, 9)))[1] > 0, "its chunks are still known"
    assert counts(pool.ask(*talks[2], text(9, 8)))[1] == 0, "its rows were kept"


def test_memory_is_made_by_closing_idle_contexts(engines: Make) -> None:
    row = tiny().row_bytes
    engine = engines(budget=150 * row)
    pool = Pool(engine)
    for i in range(12):
        pool.talk(1, first=10 * i)
    assert 0 < len(pool.sessions) < 12
    with pytest.raises(OverBudget):
        pool.answer(pool.open(text(160, 6)))
    assert len(pool.sessions) == 0


def test_a_quota_takes_the_servers_own_names_first(engines: Make) -> None:
    engine = engines()
    pool = Pool(engine, quota=Quota(n_chunks=12))
    engine.put("docs/a", text(20, 3))
    for i in range(6):
        pool.talk(1, first=10 * i)
    assert len(list(engine.table)) <= 12 and engine.files.stat("docs/a")
    full = Pool(engine, quota=Quota(n_chunks=1))
    with pytest.raises(OverQuota):
        full.ask(text(9, 9))


def test_the_oldest_of_its_names_go_never_a_clients(engines: Make) -> None:
    engine = engines()
    pool = Pool(engine, max_sessions=1)
    pool.sessions.names.most = 4
    engine.put("auto/mine", text(20, 3))
    talks = [pool.talk(1, first=10 * i) for i in range(3)]
    names = engine.table.names()
    assert len(pool.sessions.names) == 4 and "auto/mine" in names and len(names) == 5
    assert pool.library.find("", talks[0][0]) == [], "what nothing keeps is gone"
    assert len(pool.library.find("", talks[1][0])) == 1
    assert len(AutoNames(engine.table)) == 4, "a new server finds them"


def test_contexts_that_their_owner_closed_or_changed_are_left_alone(engines: Make) -> None:
    engine = engines()
    pool = Pool(engine)
    said = pool.talk(2)
    (context,) = engine.contexts.values()
    context.replace(0, text(6, 77))
    assert counts(pool.ask(*said, text(9, 9)))[1] > 0
    for each in list(engine.contexts.values()):
        engine.close_context(each.name)
    assert counts(pool.ask(*said, text(9, 9)))[1] > 0
    busy = Pool(engine, is_busy=lambda context: True)
    busy.ask(*said, text(9, 9))
    assert not busy.sessions.close_oldest()


def test_several_answers_share_the_rows(engines: Make) -> None:
    pool = Pool(engines())
    session = pool.open(text(12, 1))
    plan = pool.engine.loop.finish(pool.sessions.weaving(session))
    assert plan.prefilled == 12
    twin = pool.sessions.twin(session)
    first, second = pool.answer(session), pool.answer(twin)
    assert first.tokens == second.tokens
    assert first.plan.prefilled == second.plan.prefilled == 0
    pool.sessions.give_back([session, twin])


def test_off_computes_everything_and_leaves_nothing(engines: Make) -> None:
    engine = engines()
    pool = Pool(engine)
    before = len(list(engine.table))
    for _ in range(2):
        first, second = (pool.open(text(12, 1), reuse="off") for _ in range(2))
        answers = [pool.answer(first), pool.answer(second)]
        assert [counts(answer) for answer in answers] == [(0, 0, 18)] * 2
        pool.sessions.give_back([first, second])
    assert len(pool.sessions) == len(engine.contexts) == 0
    assert len(list(engine.table)) == before


def test_prefix_keeps_rows_up_to_the_first_changed_token(engines: Make) -> None:
    pool = Pool(engines())
    long = text(60, 1)
    assert counts(pool.ask(long, reuse="prefix")) == (0, 0, 66)
    changed = [*long[:41], 5 + long[41] % 90, *long[42:]]
    answer = pool.ask(changed, reuse="prefix")
    assert counts(answer) == (6 + 41, 0, 19) and answer.plan.drift == 0
    assert pool.late == []


messages = st.lists(st.integers(0, 4), min_size=1, max_size=5)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    requests=st.lists(
        st.tuples(messages, st.sampled_from(["", "anna"]), st.sampled_from(["all", "prefix"])),
        min_size=2,
        max_size=7,
    )
)
def test_any_requests_get_what_they_want_and_exact_ones_are_exact(
    requests: list[tuple[Sequence[int], str, str]],
) -> None:
    sizes = (20, 5, 40, 80, 11)
    with Engine(tiny(), repair="none") as engine:
        pools = {reuse: Pool(engine, max_sessions=3) for reuse in ("all", "prefix")}
        for picked, namespace, reuse in requests:
            said = [text(sizes[i], i) for i in picked]
            session = pools[reuse].open(*said, namespace=namespace, reuse=reuse)
            answer = pools[reuse].answer(session)
            if answer.plan.drift == 0:
                prompt = [*SYSTEM, *(t for message in said for t in message)]
                logits = full_prefill(engine.runner, torch.tensor(prompt))[-1]
                wanted = float(logits.log_softmax(-1).max())
                assert answer.choices[0].logprob == pytest.approx(wanted, rel=SINGLE)
            elif reuse == "prefix":
                raise AssertionError("a prefix is exact")
            pools[reuse].sessions.give_back([session])
            engine.check_integrity()


@pytest.mark.parametrize("keep", ["streaming:24,every=1", "h2o:12,every=1"])
@pytest.mark.slow
def test_a_base_that_a_token_policy_cut_is_not_taken_for_all_of_it(
    engines: Make, keep: str
) -> None:
    """`Pool.open` compares tokens: what follows 4 of the 6 tokens of a base follows no base."""
    for n in range(14, 24):
        pool = Pool(engines(keep=keep))
        said = [text(n - 3, 1)]
        said.append(list(pool.ask(*said).tokens))
        pool.ask(*said, text(9, 9))


# ---- several at once


@dataclass
class Waiter:
    """Who waits for a session."""

    found: Any = None
    given_up: bool = False
    urgent: bool = True

    def tell(self, error: Exception | None, result: Any = None) -> None:
        self.found = error or result

    def closed(self) -> None:
        self.found = "closed"


@pytest.mark.parametrize("gone", [None, 0, 1])
def test_one_base_of_two_that_come_at_once_is_computed_once(
    engines: Make, gone: int | None
) -> None:
    pool = Pool(engines(max_rows=2))  # several steps
    tasks, waiters = Tasks(pool.engine.loop), [Waiter(), Waiter()]
    for i, waiter in enumerate(waiters):
        tasks.begin(pool.opening(text(12, i)), waiter)
    assert len(pool.engine.loop.requests) == 1 and len(tasks) == 2
    for n in range(99):
        if n == 1 and gone is not None:
            waiters[gone].given_up = True
        pool.engine.loop.step()
        tasks.go_on()
        if not len(tasks):
            break
    assert not pool.engine.loop.requests
    left = [waiter.found for i, waiter in enumerate(waiters) if i != gone]
    assert [session.context.tokens()[: len(SYSTEM)] for session in left] == [SYSTEM] * len(left)
    assert sum(session.n_computed for session in left) == len(SYSTEM)
    assert all(pool.engine.shelf.tier(session.base) == "ram" for session in left)
    assert gone is None or waiters[gone].found == "closed"
    pool.engine.check_integrity()
