"""Chunks that are computed while vLLM has nothing to do, without vLLM."""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import replace
from types import SimpleNamespace

import oracle
import pytest
import torch
from vllm_blocks import SIZE, Blocks, ids, parts_of, woven

from kvweave import Engine
from kvweave.connect.vllm import ahead, plugin
from kvweave.connect.vllm.ahead import DONE, LATER, MORE
from kvweave.connect.vllm.asks import PromptAsk, WeaveLoad, WeaveOffer
from kvweave.connect.vllm.host import Host
from kvweave.connect.vllm.plugin import KVWeavePlugin
from kvweave.connect.vllm.scheduling import Scheduling
from kvweave.connect.vllm.spec import PartSpec, WeaveSpec
from kvweave.connect.vllm.verbs import VerbRequest, Verbs

A, B, C = ids(12, 1), ids(9, 2), ids(14, 3)
SPEC = WeaveSpec(repair="none")


@pytest.fixture
def host(runner, monkeypatch):
    monkeypatch.setattr(ahead, "QUIET_SECONDS", -1.0)
    made = Host(runner, Blocks(len(runner.layers)), {"budget": "64MiB", "max_rows": 16}, ahead=True)
    yield made
    made.engine.check_integrity()
    made.close()


def prompt(*chunks, question=(7, 8, 9), system=(), **said):
    """Return a request of these chunks, each declared."""
    tokens = (*system, *(t for chunk in chunks for t in chunk), *question)
    parts = parts_of([len(chunk) for chunk in chunks], len(system))
    return PromptAsk(tokens, replace(SPEC, parts=parts, system=len(system), **said))


def until_done(host):
    """Let vLLM have nothing to do until nothing is left."""
    for _ in range(1000):
        if (said := host.go_ahead()) != MORE:
            return said
    raise AssertionError("it never ended")


def n_run(host, work):
    """Return how many rows the model computed for ``work``."""
    forward, rows = host.backend.forward, []
    host.backend.forward = lambda works: (rows.append(sum(w.n for w in works)), forward(works))[1]
    try:
        work()
    finally:
        host.backend.forward = forward
    return sum(rows)


def begin_long(host, monkeypatch, *chunks):
    """Have a slice end in the middle of a long chunk; return it."""
    long, ticks = ids(300, 5), iter(range(4))  # of the clock
    host.find(prompt(long, *chunks))
    with monkeypatch.context() as patch:
        now = lambda: 0.0 if next(ticks, None) is not None else 9.9  # noqa: E731
        patch.setattr(ahead.time, "perf_counter", now)
        assert host.go_ahead() == MORE
    assert long not in canonical(host)
    return long


def chunks_in(ask, job):
    """Return the chunks, by tokens, that a prompt was woven of."""
    assert job.plan is not None, job.error
    spans = [s for s in job.plan.spans if s.part not in ("new", "system")]
    return {ask.tokens[s.position : s.position + s.n_tokens] for s in spans}


def canonical(host):
    """Return the KV of all chunks that have some, by tokens."""
    engine = host.engine
    found = {}
    for record in engine.table:
        if engine.shelf.tier(record.id) != "none":
            found[tuple(engine.table.tokens(record.id).tolist())] = engine.shelf.get(record.id)
    return found


@pytest.mark.parametrize("system", [(), ids(6, 9)])
def test_chunks_named_once_are_vllms_to_compute_and_are_there_for_the_first_edit(host, system):
    assert host.find(prompt(A, B, C, system=system)) == WeaveOffer(), "nothing of it is known"
    assert not len(list(host.engine.table)), "a question stores nothing"
    n = n_run(host, lambda: until_done(host))
    assert n == len((*A, *B, *C)) + len(system) and host.go_ahead() == DONE
    found = canonical(host)
    assert found.keys() == {A, B, C} | ({system} if system else set())
    with Engine(host.engine.runner, base=list(system) or None) as engine:
        for chunk in (A, B, C):
            engine.put("c", chunk, replace=True)
            wanted = engine.shelf.get(engine.table.resolve("c").id)
            for mine, its in zip(
                (*found[chunk].k, *found[chunk].v), (*wanted.k, *wanted.v), strict=True
            ):
                assert oracle.relative(mine, its) < 1e-6
    edited = prompt(C, A, system=system)
    job, _ = woven(host, edited)
    assert chunks_in(edited, job) == {A, C} and host.go_ahead() == DONE


def test_an_edit_computes_nothing_of_the_chunks_it_moves(host):
    host.find(prompt(A, B, C))
    until_done(host)
    assert n_run(host, lambda: woven(host, prompt(C, B, A))) == 0


def test_a_chunk_that_is_new_among_others_is_new_text_in_its_place(host, runner):
    host.find(prompt(A, C))
    until_done(host)
    ask = prompt(A, B, C, repair="full", share=1.0)
    job, blocks = woven(host, ask)
    assert chunks_in(ask, job) == {A, C}
    wanted, _ = oracle.rows_of(runner, torch.tensor([ask.tokens]))
    for layer, written in enumerate(host.writer.slots):
        keys, values = wanted.read(layer)
        for row in range(job.load.stop):
            found = written[blocks[row // SIZE] * SIZE + row % SIZE]
            assert oracle.relative(found[0], keys[row]) < 1e-6
            assert oracle.relative(found[1], values[row]) < 1e-6
    until_done(host)
    assert canonical(host).keys() == {A, B, C}, "and a chunk from then on"


def test_where_no_time_came_the_second_request_computes_them(host):
    host.find(prompt(A, B, C))
    job, _ = woven(host, prompt(C, A))
    assert chunks_in(prompt(C, A), job) == {A, C}
    assert canonical(host).keys() == {A, C}
    assert n_run(host, lambda: until_done(host)) == len(B), "what is left"


def test_nothing_is_computed_while_vllm_runs_or_a_weave_does(host, monkeypatch):
    host.find(prompt(A, B))
    monkeypatch.setattr(ahead, "QUIET_SECONDS", 3600.0)
    host.step(idle=False)
    assert n_run(host, lambda: host.go_ahead()) == 0 and host.go_ahead() == LATER
    monkeypatch.setattr(ahead, "QUIET_SECONDS", -1.0)
    ask = prompt(A, B)
    offer = host.find(ask)
    host.load("r", WeaveLoad(ask, tuple(range(50, 60)), 0, offer.covered, offer.digest))
    assert host.go_ahead() == LATER
    assert host.step(idle=True)["r"].plan is not None and until_done(host) == DONE


def test_vllm_has_run_until_its_step_is_over(host, monkeypatch):
    monkeypatch.setattr(ahead, "QUIET_SECONDS", 1.0)
    host.find(prompt(A))
    clock = [0.0]
    monkeypatch.setattr(ahead.time, "perf_counter", lambda: clock[0])
    host.step(idle=False)
    clock[0] = 60.0  # a long one
    host.over()
    clock[0] += 0.9
    assert host.go_ahead() == LATER
    clock[0] += 0.2
    assert host.go_ahead() == DONE and A in canonical(host)


def test_who_is_to_have_vllm_run_is_one(host, monkeypatch):
    """Of several servers; the other is not handed the next piece before the first one's is there."""
    monkeypatch.setattr(ahead, "QUIET_SECONDS", 1.0)
    clock = [60.0]
    monkeypatch.setattr(ahead.time, "perf_counter", lambda: clock[0])
    assert (host.says(), host.says()) == (MORE, LATER)
    clock[0] += 1.1
    assert host.says() == MORE


def test_a_request_does_not_wait_for_it(host, monkeypatch):
    """What is under way is given up when a request is woven, and made later."""
    host.engine.put("a", A)
    host.engine.put("c", C)
    forward, passes = host.backend.forward, []
    host.backend.forward = lambda works: (passes.append([w.n for w in works]), forward(works))[1]
    long = begin_long(host, monkeypatch)
    assert 0 < sum(map(sum, passes)) < 300
    host.backend.forward = forward
    ask = prompt(A, C, repair="full", share=1.0)
    n = n_run(host, lambda: woven(host, ask))
    assert n == n_run(host, lambda: woven(host, replace(ask, tokens=(*ask.tokens[:-1], 5)))) > 0
    assert until_done(host) == DONE and long in canonical(host)


def test_nothing_goes_for_it(runner, monkeypatch):
    monkeypatch.setattr(ahead, "QUIET_SECONDS", -1.0)
    row = runner.row_bytes
    host = Host(runner, Blocks(len(runner.layers)), {"budget": 150 * row}, ahead=True)
    for name, n, seed in (("a", 40, 1), ("b", 40, 2), ("c", 30, 3)):
        host.engine.put(name, ids(n, seed))
    host.find(prompt(ids(35, 4), ids(15, 5)))
    assert until_done(host) == DONE
    assert canonical(host).keys() == {ids(40, 1), ids(40, 2), ids(30, 3), ids(15, 5)}
    host.close()


def test_nothing_goes_for_it_where_others_take_the_room_meanwhile(runner, monkeypatch):
    monkeypatch.setattr(ahead, "QUIET_SECONDS", -1.0)
    host = Host(runner, Blocks(len(runner.layers)), {"budget": 150 * runner.row_bytes}, ahead=True)
    host.engine.put("a", ids(25, 1))
    system, chunk = ids(20, 9), ids(35, 4)
    host.find(prompt(chunk, system=system))
    step = host.engine.loop.step

    def others():
        if host.engine.table.lookup("b") is None:
            host.engine.put("b", ids(50, 2))
        return step()

    host.engine.loop.step = others
    assert until_done(host) == DONE
    assert canonical(host).keys() == {ids(25, 1), ids(50, 2), system}
    host.engine.files.rm("b")
    host.engine.loop.step = step
    assert until_done(host) == DONE and chunk in canonical(host), "it has waited"
    host.close()


def test_a_verb_does_not_wait_for_it(host, monkeypatch):
    verbs, long, mine = Verbs(host), begin_long(host, monkeypatch), ids(100, 6)
    forward, passes = host.backend.forward, []

    def slow(works):
        passes.extend(work.n for work in works)
        time.sleep(0.03)
        return forward(works)

    host.backend.forward = slow
    monkeypatch.setattr("kvweave.connect.vllm.verbs.SLICE_SECONDS", 0.02)  # one pass
    body = json.dumps({"tokens": list(mine)}).encode()
    json_body = [("content-type", "application/json")]
    ticket, reply = verbs.begin(VerbRequest("PUT", "/v1/chunks/mine", json_body, body))
    assert reply is None
    while reply is None:
        assert host.go_ahead() == LATER
        reply = verbs.go_on(ticket)
    assert reply.status == 201 and sum(passes) == len(mine), "none of the long chunk's"
    host.backend.forward = forward
    assert until_done(host) == DONE and {long, mine} <= canonical(host).keys()
    verbs.close()


def test_what_its_user_removed_does_not_come_back(host, monkeypatch):
    remove = lambda: [host.engine.files.rm(e.name) for e in host.engine.files.ls()]  # noqa: E731
    host.engine.put("x", A)
    host.engine.shelf.drop(host.engine.table.resolve("x").id)
    named = PromptAsk((*A, 7, 8), replace(SPEC, parts=(PartSpec(chunk="x"),)))
    assert not host.find(named).covered, "its KV was evicted"
    remove()
    assert until_done(host) == DONE and not canonical(host)
    begin_long(host, monkeypatch)
    remove()  # while it is under way
    assert until_done(host) == DONE and not list(host.engine.table)
    begin_long(host, monkeypatch)
    host.ahead.pause()
    remove()  # while it waits to be begun anew
    assert until_done(host) == DONE and not list(host.engine.table)
    system = ids(6, 9)
    host.find(prompt(A, system=system))
    until_done(host)
    host.find(prompt(B, system=system))
    remove()  # what it is computed after
    assert until_done(host) == DONE and not list(host.engine.table)


def test_a_part_that_stands_there_twice_is_new_both_times(host):
    assert host.find(prompt(A, B, A)) == WeaveOffer()
    assert until_done(host) == DONE and canonical(host).keys() == {A, B}


def test_what_is_made_is_found_where_nothing_is_declared(host):
    long = ids(40, 7)
    host.find(prompt(long))
    until_done(host)
    ask = PromptAsk((*ids(5, 8), *long, 7, 8), replace(SPEC, match=True))
    job, _ = woven(host, ask)
    assert chunks_in(ask, job) == {long}


def test_a_part_of_a_chunk_without_kv_is_computed_with_the_chunk(host):
    """It is no chunk of its own, and a thinned one would be made whole."""
    host.engine.put("x", A)
    host.engine.shelf.drop(host.engine.table.resolve("x").id)
    ask = PromptAsk((*A[:-1], 91, 7, 8), replace(SPEC, parts=(PartSpec(chunk="x"),)))
    assert host.find(ask).covered == len(A) - 1 and host.go_ahead() == DONE


def test_names_that_it_gives_are_limited_too(host):
    host.names.most = 2
    host.find(prompt(A, B, C))
    assert until_done(host) == host.go_ahead() == DONE
    assert len(host.names) == len(host.engine.files.ls()) == 2


def test_the_latest_wait(host, monkeypatch):
    monkeypatch.setattr(ahead, "MOST_WAITING", 2)
    host.find(prompt(A, B, C))
    until_done(host)
    assert canonical(host).keys() == {B, C}


def test_what_was_offered_as_text_is_text_where_a_chunk_goes_meanwhile(host):
    host.find(prompt(A))
    until_done(host)
    ask = prompt(A, B)
    offer = host.find(ask)
    for entry in host.engine.files.ls():
        host.engine.files.rm(entry.name)
    host.load("r", WeaveLoad(ask, tuple(range(50, 60)), 0, offer.covered, offer.digest))
    while not (over := host.step(idle=True)):
        pass
    assert chunks_in(ask, over["r"]) == {A}


def test_what_cannot_be_computed_is_let_go_of(host):
    host.find(prompt(A, B))
    forward = host.backend.forward

    def fails(works):
        raise RuntimeError("no such kernel")

    host.backend.forward = fails
    assert until_done(host) == DONE
    host.backend.forward = forward
    assert not canonical(host)
    host.find(prompt(A, B))
    until_done(host)
    assert canonical(host).keys() == {A, B}, "the next request has them tried again"


@pytest.mark.slow
def test_random_prompts_are_woven_of_what_was_named(host, runner):
    """Whatever is edited and whenever there is time: a full repair is a prefill, rows that are reused were
    named before, and a prompt whose chunks are all new is left to vLLM."""
    rng, pool = (
        random.Random(5),
        [ids(rng_n, 100 + i) for i, rng_n in enumerate((5, 9, 17, 30, 12, 24))],
    )
    named, n_woven, n_left = set(), 0, 0
    for _ in range(60):
        chunks = rng.sample(pool, rng.randrange(1, 5))
        ask = prompt(*chunks, repair="full", share=1.0)
        offer = host.find(ask)
        if not offer.covered:
            assert not named & {*chunks}
            n_left += 1
        else:
            blocks = tuple(range(50, 50 + -(-len(ask.tokens) // SIZE)))
            host.load("r", WeaveLoad(ask, blocks, 0, offer.covered, offer.digest))
            while not (over := host.step(idle=False)):
                pass
            job = over["r"]
            wanted, _ = oracle.rows_of(runner, torch.tensor([ask.tokens]))
            for layer, written in enumerate(host.writer.slots):
                keys, _ = wanted.read(layer)
                for at in range(offer.covered):
                    found = written[blocks[at // SIZE] * SIZE + at % SIZE][0]
                    assert oracle.relative(found, keys[at]) < 1e-6
            assert chunks_in(ask, job) == named & {*chunks}
            n_woven += 1
        named |= {*chunks}
        for _ in range(rng.randrange(3)):
            host.go_ahead()
    assert n_woven > 30 and n_left > 0


# ---- the scheduler's side


class Hashed:
    """A request, and under which keys vLLM would look for its rows."""

    def __init__(self, name, tokens):
        self.request_id, self.prompt_token_ids = name, list(tokens)
        self.kv_transfer_params = {"kvweave": {}}
        self.mm_features, self.block_hashes, self.forks = [], [], ()
        self.lora_request = self.pooling_params = None
        self.resumable = self.skip_reading_prefix_cache = False
        self.cache_salt = None


@pytest.fixture
def scheduling():
    return Scheduling(lambda request, forks: setattr(request, "forks", forks), SIZE, False)


def offered(scheduling, request, offer, n_local, under=None):
    """Take a request to where vLLM knows how much of it is woven: with the keys of ``under`` it finds
    ``n_local`` rows, with others 8."""
    scheduling.new(request)
    scheduling.external(request, n_local)
    scheduling.told()
    scheduling.found(request.request_id, offer)
    found = None, False
    while found == (None, False):  # it looks under other keys
        n = n_local if under is None or request.forks == under.forks else 8
        found = scheduling.external(request, n)
    if not found[1]:
        scheduling.allocated(request, (), 0)
    return found


def wove(scheduling, request, drift=None, approximate=(), spans=()):
    told = {
        "drift": drift,
        "drift_by": "unknown",
        "strategy": "auto",
        "approximate": {*approximate},
    }
    scheduling.wove(request.request_id, {"woven": True, "spans": spans, **told})


OFFER = WeaveOffer(39, 30, b"plan", looks=False)


def conversation(scheduling):
    """Weave a prompt of 40 tokens; return it."""
    first = Hashed("a", ids(40, 1))
    assert offered(scheduling, first, OFFER, 8) == (31, True)
    wove(scheduling, first)
    return first


def test_a_conversation_goes_on_from_its_weave_when_its_last_turn_has_become_a_chunk(scheduling):
    first, tokens = conversation(scheduling), ids(40, 1)
    for i, n_local in enumerate((40, 52, 72)):
        tokens = (*tokens, *ids(16, 50 + i))
        turn = Hashed(f"t{i}", tokens)
        offer = WeaveOffer(len(tokens) - 1, len(tokens) - 18, bytes([i]), looks=False)
        assert offered(scheduling, turn, offer, n_local, first) == (0, False)
        assert turn.forks == first.forks
        told = scheduling.finished(f"t{i}")
        assert (told["woven"], told["cached"], told["drift"]) == (False, n_local, None)


@pytest.mark.parametrize(
    ("change", "n_local"),
    [
        ({}, 24),  # evicted in part
        ({"useful": 45}, 40),  # a chunk that is known was put behind
        ({"tokens": (*ids(39, 1), 5)}, 40),  # another prompt
        ({"repair": "none"}, 40),
        ({"namespace": "anna"}, 40),
        ({"bounded": True}, 40),
        ({"looks": True}, 40),  # rows are repaired for each question
        ({"forget": True}, 40),
    ],
)
def test_else_it_is_woven(scheduling, change, n_local):
    first = conversation(scheduling)
    if change.get("forget"):
        scheduling.forget()
    turn = Hashed("t", (*change.get("tokens", ids(40, 1)), *ids(16, 50)))
    said = {k: v for k, v in change.items() if k in ("repair", "namespace")}
    turn.kv_transfer_params = {"kvweave": said}
    offer = WeaveOffer(55, change.get("useful", 38), b"next", bounded=change.get("bounded", False))
    assert offered(scheduling, turn, offer, n_local, first) == (47, True)
    assert turn.forks != first.forks


def test_nothing_goes_on_from_what_was_not_woven(scheduling):
    first = Hashed("a", ids(40, 1))
    offered(scheduling, first, OFFER, 8)
    before = first.forks
    scheduling.wove("a", {"woven": False, "failed": "no such kernel"})
    first.forks = before
    turn = Hashed("t", (*ids(40, 1), *ids(16, 50)))
    assert offered(scheduling, turn, WeaveOffer(55, 38, b"next", looks=False), 40, first) == (
        47,
        True,
    )


@pytest.mark.parametrize(("n_local", "rest"), [(0, 35), (28, 7), (32, 0), (36, 0)])
def test_less_than_a_block_behind_what_vllm_has_is_vllms(scheduling, n_local, rest):
    found = offered(
        scheduling, Hashed("a", ids(40, 1)), WeaveOffer(35, 35, b"plan", looks=False), n_local
    )
    assert found == (rest, bool(rest))
    if not rest:
        assert scheduling.finished("a") == {
            "woven": False,
            "drift": 0.0,
            "drift_by": "exact",
            "local": n_local,
        }


@pytest.mark.parametrize(("n_blocks", "exact"), [(9, True), (8, True), (7, False), (0, False)])
def test_where_vllm_has_rows_of_its_own_of_all_chunks_none_of_a_weave_are_found(
    scheduling, n_blocks, exact
):
    """As where a prompt that was woven was prefilled while nobody asked."""
    conversation(scheduling)
    turn = Hashed("t", (*ids(40, 1), *ids(16, 50)))
    turn.block_hashes = list(range(len(turn.prompt_token_ids) // SIZE))
    scheduling.is_cached = lambda block: block < n_blocks
    found = offered(scheduling, turn, WeaveOffer(55, 35, b"next"), n_blocks * SIZE)
    assert found == ((0, False) if exact else (55 - n_blocks * SIZE, True))
    told = scheduling.finished("t")
    assert bool(turn.forks) != exact and (told.get("drift_by") == "exact") == exact


@pytest.mark.parametrize("n_exact", [0, 16])
def test_a_prompt_that_is_woven_is_told_of_and_what_of_it_stands_under_vllms_own_keys(
    scheduling, n_exact
):
    """No plain request finds exact rows of ours."""
    for name, n_local in (("a", 8), ("b", 8 + n_exact)):
        ask = Hashed(name, (*ids(30, 1), *ids(10, len(name))))
        assert offered(scheduling, ask, OFFER, n_local) == (30 + 9 - n_local, True)
        spans = [{"n_tokens": 8 + n_exact, "exact": True}, {"n_tokens": 40, "exact": False}]
        wove(scheduling, ask, approximate=["position"], spans=spans)
        assert scheduling.inexact() == [(scheduling._requests[name].ask, 8)]
    exact = Hashed("c", ids(40, 9))
    offered(scheduling, exact, WeaveOffer(39, 30, b"other", looks=False), 8)
    wove(scheduling, exact, 0.0)
    assert not scheduling.inexact()


def test_less_than_a_block_behind_rows_of_a_weave_is_approximate_too(scheduling):
    first = conversation(scheduling)
    scheduling._plans[b"plan"][0].report["approximate"] = {"position": 9}
    other = Hashed("o", (*ids(40, 1)[:30], *ids(9, 3)))
    assert offered(scheduling, other, OFFER, 28, first) == (0, False)
    assert [(ask.tokens[:30], n) for ask, n in scheduling.inexact()] == [(ids(40, 1)[:30], 8)]


def test_what_was_answered_over_rows_of_a_weave_is_not_exact_where_the_rest_is(scheduling):
    """It was preempted, its rows were evicted, and vLLM had some of its own by then."""
    first = conversation(scheduling)
    turn = Hashed("t", ids(40, 1))
    assert offered(scheduling, turn, WeaveOffer(39, 30, b"plan"), 36, first) == (0, False)
    told = dict(scheduling._requests["t"].report)
    assert (told["cached"], told["drift"]) == (36, None)
    assert scheduling.external(turn, 12) == (None, False) and not turn.forks
    assert scheduling.external(turn, 36) == (0, False)
    scheduling.allocated(turn, (), 0)
    assert scheduling.finished("t") == told
    turn = Hashed("u", (*ids(40, 1), 5))
    conversation(scheduling)
    assert offered(scheduling, turn, WeaveOffer(40, 30, b"plan"), 36, turn) == (0, False)
    assert scheduling.external(turn, 12)[0] is None and scheduling.external(turn, 8)[1]
    wove(scheduling, turn, 0.25)
    told = scheduling.finished("u")
    assert told["woven"] and told["drift"] is None, "a bound is of rows of one weave"


def test_a_stream_is_told_once_of_rows_that_vllm_found(scheduling):
    conversation(scheduling)
    turn = Hashed("t", ids(40, 1))
    turn.kv_transfer_params = {"kvweave": {"ticket": "me"}}
    scheduling.new(turn)
    scheduling.external(turn, 36)
    scheduling.found("t", OFFER)
    for n in (36, 32):  # no room yet
        assert scheduling.external(turn, n) == (0, False) and not scheduling.reported()
    scheduling.allocated(turn, (), 0)
    assert scheduling.reported()["me"]["cached"] == 32 and not scheduling.reported()
    woven = Hashed("w", ids(40, 7))
    woven.kv_transfer_params = {"kvweave": {"ticket": "it"}}
    offer = WeaveOffer(39, 30, b"mine", looks=False)
    assert offered(scheduling, woven, offer, 8) == (31, True)
    wove(scheduling, woven)
    assert scheduling.external(woven, 36) == (0, False), "it was preempted"
    scheduling.allocated(woven, (), 0)
    assert not scheduling.reported(), "the worker has told of its weave"


@pytest.mark.parametrize(
    ("n_own", "n_ours", "exact"), [(11, 14, True), (10, 14, True), (9, 13, False), (9, 8, True)]
)
def test_what_was_begun_to_be_prefilled_is_not_computed_by_the_next_turn(
    scheduling, n_own, n_ours, exact
):
    """vLLM has rows of its own of all chunks, and not of all that was said behind them."""
    first = conversation(scheduling)
    turn = Hashed("t", (*ids(40, 1), *ids(16, 50)))

    def fork(request, forks):
        request.forks = forks
        request.block_hashes = [(i, forks) for i in range(14)]

    fork(turn, ())
    scheduling.fork = fork
    scheduling.is_cached = lambda block: block[0] < (n_ours if block[1] else n_own)
    scheduling.new(turn)
    scheduling.external(turn, 0)
    scheduling.found("t", WeaveOffer(30, 30, b"plan", looks=False))
    assert turn.forks == (() if exact else first.forks)
    assert scheduling.external(turn, 52 - 12 * exact) == (0, False)
    scheduling.allocated(turn, (), 0)
    assert (scheduling.finished("t")["drift"] == 0) == exact


def test_a_prompt_is_told_of_that_is_answered_over_approximate_rows_of_before(scheduling):
    first = conversation(scheduling)
    for approximate in ({"position": 9}, {}):
        first_point = scheduling._plans[b"plan"][0]
        first_point.report["approximate"] = approximate
        turn = Hashed("t", ids(40, 1))
        turn.cache_salt = "salt"
        assert offered(scheduling, turn, OFFER, 36, first) == (0, False)
        told = [(ask.tokens, ask.salt, n) for ask, n in scheduling.inexact()]
        assert told == ([(ids(40, 1), "salt", 8)] if approximate else [])
        assert scheduling.inexact() == []


# ---- the server's side


class Client:
    """vLLM's client of an engine that says these, one by one, and counts how often it was asked; and these
    when it is asked what to prefill."""

    def __init__(self, *says, errored=False, asleep=0, refine=(), matches=False):
        self.says, self.errored, self.asleep, self.n = [*says], errored, asleep, 0
        self.refine, self.prefilled, self.took = [*refine], [], []
        transfer = SimpleNamespace(kv_connector_extra_config={"match": matches})
        self.vllm_config = SimpleNamespace(kv_transfer_config=transfer)

    async def is_sleeping(self):
        self.asleep -= 1
        return self.asleep >= 0

    async def collective_rpc(self, name, args=()):
        if name == "kvweave_refine":
            self.took += args
            return [self.refine.pop(0) if self.refine else DONE]
        self.n += 1
        await asyncio.sleep(0)
        said = self.says.pop(0)
        if isinstance(said, Exception):
            raise said
        return [said]


def asked_after(client, n_requests):
    """Return how often workers were asked behind so many requests, each behind the end of the one before."""

    async def serves():
        state = SimpleNamespace()
        await KVWeavePlugin().init_state(client, state, None)
        for _ in range(n_requests):
            state.kvweave_woken.set()
            await asyncio.sleep(0.2)
        state.kvweave_ahead.cancel()

    asyncio.run(serves())
    return client.n


def test_workers_are_asked_until_nothing_is_left(monkeypatch):
    monkeypatch.setattr(plugin, "SOONEST", 0.01)
    assert asked_after(Client(MORE, LATER, MORE, DONE), 1) == 4
    assert asked_after(Client(DONE, DONE), 2) == 2 and asked_after(Client(), 0) == 0
    assert asked_after(Client(DONE, asleep=2), 1) == 1, "behind its sleep"


def test_what_is_to_be_prefilled_is_asked_of_vllm(monkeypatch):
    """And workers are told how long it took, so that the next piece may be another."""
    client = Client(MORE, DONE, DONE, DONE, DONE, refine=[([1, 2], "s"), LATER, ([1, 2, 3], "s")])

    async def prefilled(engine, tokens, salt):
        engine.prefilled.append((tokens, salt))
        return 0.5

    monkeypatch.setattr(plugin, "SOONEST", 0.01)
    monkeypatch.setattr(plugin, "_prefilled", prefilled)
    assert asked_after(client, 1) == 5
    assert client.prefilled == [([1, 2], "s"), ([1, 2, 3], "s")] and client.took == [0, 0.5, 0, 0.5]


@pytest.mark.parametrize(("says", "matches"), [(True, False), (False, True), (False, False)])
def test_workers_are_asked_behind_what_may_have_been_woven(says, matches):
    async def wakes():
        state = SimpleNamespace()
        await KVWeavePlugin().init_state(Client(matches=matches), state, None)
        state.kvweave_ahead.cancel()
        plugin._wake(state, says)
        return state.kvweave_woken.is_set()

    assert asyncio.run(wakes()) == (says or matches)


def test_a_failure_is_not_the_last_that_is_computed_ahead():
    assert asked_after(Client(RuntimeError("busy"), MORE, DONE), 2) == 3
    assert asked_after(Client(RuntimeError("gone"), errored=True), 2) == 1
