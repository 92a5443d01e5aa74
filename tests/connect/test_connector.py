"""What the connector decides, without vLLM: specs, cuts, weaves into blocks, keys of blocks."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import oracle
import pytest
import torch
from vllm_blocks import SIZE, Blocks, ids, parts_of, woven

from kvweave import Engine
from kvweave.connect.vllm.asks import PromptAsk, WeaveLoad, WeaveOffer
from kvweave.connect.vllm.host import Host
from kvweave.connect.vllm.scheduling import EXACT, Scheduling
from kvweave.connect.vllm.spare import HOLDER
from kvweave.connect.vllm.spec import PartSpec, WeaveSpec, spec_of
from kvweave.errors import ChunkNotFound, InvalidArgument, ModelMismatch
from kvweave.weave.calibration import Calibration, Curve

pytestmark = pytest.mark.usefixtures("looks")

# ---- what requests say


def said(**fields):
    return {"kvweave": fields}


def test_a_request_that_says_nothing_to_us_is_not_ours():
    assert spec_of(None) is None and spec_of({"do_remote_prefill": True}) is None
    assert spec_of(said()) == WeaveSpec(match=True)


def test_all_fields_are_read():
    parts = [{"tokens": [3, 9]}, {"chunk": "docs/a"}, {"tokens": [9, 12]}]
    given = said(system=3, parts=parts, repair="query", share=0.1, max_drift=0.5, namespace="anna")
    spec = spec_of(given, 20)
    assert spec.parts == (PartSpec(3, 9), PartSpec(chunk="docs/a"), PartSpec(9, 12))
    assert (spec.system, spec.match, spec.namespace) == (3, False, "anna")
    assert spec.options() == {"repair": "query", "share": 0.1, "max_drift": 0.5}


@pytest.mark.parametrize(
    "wrong",
    [
        7, [], "all", {"pats": []}, {"parts": {}}, {"parts": [3]}, {"parts": [{}]},
        {"parts": [{"tokens": [3]}]}, {"parts": [{"tokens": [5, 5]}]}, {"parts": [{"tokens": [9, 3]}]},
        {"parts": [{"tokens": [-1, 3]}]}, {"parts": [{"tokens": [0, 21]}]},
        {"parts": [{"tokens": [True, 3]}]}, {"parts": [{"chunk": 3}]},
        {"parts": [{"tokens": [4, 8]}, {"tokens": [7, 9]}]}, {"system": 5, "parts": [{"tokens": [4, 8]}]},
        {"parts": [{"chunk": "a", "tokens": [0, 1]}]}, {"repair": "magic"}, {"repair": 3},
        {"share": 1.5}, {"share": "all"}, {"share": float("nan")}, {"max_drift": -1},
        {"match": "yes"}, {"namespace": 3}, {"system": 21}, {"system": True},
        {"parts": [{"tokens": [0, 1]}] * 5000},
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused(wrong):
    with pytest.raises(InvalidArgument):
        spec_of({"kvweave": wrong}, 20)


# ---- the worker's side


@pytest.fixture
def host(runner):
    made = Host(runner, Blocks(len(runner.layers)), {"budget": "64MiB", "max_rows": 16})
    yield made
    made.engine.check_integrity()
    made.close()


def test_the_same_chunk_twice_is_found_where_its_first_tokens_are_others_the_first_time(host):
    host.engine.put("twice", ids(20, 3))
    tokens = (5, 5, *ids(20, 3)[2:], *ids(20, 3), 7, 8)
    parts = (PartSpec(chunk="twice"), PartSpec(chunk="twice"))
    cuts = [
        c
        for c in host.cutter.cut(PromptAsk(tokens, WeaveSpec(parts=parts)))
        if c.id and not c.is_base
    ]
    assert [(c.start, c.stop, c.offset) for c in cuts] == [(2, 20, 2), (20, 40, 0)]


def test_the_first_tokens_of_a_short_chunk_are_not_it(host):
    host.engine.put("short", (11, 12, 13, 14, 15, 16, 17, 18, 19))
    tokens = (15, 5, 15, 6, 11, 12, 13, 14, 15, 16, 17, 18, 19, 7, 8)
    ask = PromptAsk(tokens, WeaveSpec(parts=(PartSpec(chunk="short"),)))
    cut = next(c for c in host.cutter.cut(ask) if c.id and not c.is_base)
    assert (cut.start, cut.stop) == (4, 13)


def test_a_plan_is_cut_once(host, monkeypatch):
    host.engine.put("once", ids(20, 5))
    parts = (PartSpec(2, 14), PartSpec(chunk="once"))
    ask = PromptAsk((*ids(14, 6), *ids(20, 5), 7, 8), WeaveSpec(parts=parts, match=True))
    cut, made = host.cutter.cut, []
    monkeypatch.setattr(host.cutter, "cut", lambda ask: (made.append(cut(ask)), made[-1])[1])
    longer = PromptAsk((*ask.tokens, 9, 10, 11), ask.spec)
    for each, n in ((ask, 1), (longer, 2), (ask, 3)):
        job, _ = woven(host, each)
        assert job.plan is not None and len(made) == n
        spans = [(s.position, s.n_tokens) for s in job.plan.spans]
        assert spans[-1] == (34, len(each.tokens) - 34) and spans[-2] == (14, 20)


@pytest.mark.parametrize("again", [True, False])
def test_a_chunk_that_goes_between_offer_and_load(host, again):
    host.engine.put("gone", ids(20, 5))
    ask = PromptAsk((*ids(14, 6), *ids(20, 5), 7, 8), WeaveSpec(parts=(PartSpec(chunk="gone"),)))
    offer, blocks = host.find(ask), tuple(range(30))
    host.engine.files.rm("gone")
    if again:  # the same tokens, under another id
        host.engine.put("gone", ids(20, 5))
    host.load("r", WeaveLoad(ask, blocks, 0, 35, offer.digest))
    while not (over := host.step(idle=False)):
        pass
    assert (over["r"].plan is not None) == again


def test_a_full_repair_writes_the_rows_of_a_prefill_to_the_blocks(host, runner):
    tokens = ids(40, 1)
    ask = PromptAsk(tokens, WeaveSpec(parts=parts_of([12, 9, 14]), repair="full", share=1.0))
    offer = host.find(ask)
    assert (offer.covered, offer.useful, offer.error) == (35, 35, None)
    assert not len(list(host.engine.table)), "a question stores nothing"
    job, blocks = woven(host, ask, start=6)
    assert job.error is None and job.report()["drift"] == 0 and job.report()["rows"] == [6, 35]
    assert job.report()["prefilled"] == 5, "by vLLM: what stands behind the chunks"
    assert sum(span["n_tokens"] for span in job.report()["spans"]) == 40
    wanted, _ = oracle.rows_of(runner, torch.tensor([tokens]))
    for layer, written in enumerate(host.writer.slots):
        assert sorted(written) == [blocks[r // SIZE] * SIZE + r % SIZE for r in range(6, 35)]
        keys, values = wanted.read(layer)
        for row in range(6, 35):
            found = written[blocks[row // SIZE] * SIZE + row % SIZE]
            assert oracle.relative(found[0], keys[row]) < 1e-6
            assert oracle.relative(found[1], values[row]) < 1e-6


@pytest.mark.parametrize("front", [12, 16, 24, 32])
@pytest.mark.parametrize("strategy", ["none", "auto", "query", "full"])
def test_exact_rows_of_vllm_in_front_are_taken_as_they_are(host, runner, strategy, front):
    """As in a context that was computed in full before a part was put behind."""
    tokens, share = ids(70, 1), 0.2
    sizes, at = [12, 9, 14, 20], 0
    ask = PromptAsk(tokens, WeaveSpec(parts=parts_of(sizes), repair=strategy, share=share))
    blocks = tuple(range(50, 50 + -(-len(tokens) // SIZE)))
    whole, _ = oracle.rows_of(runner, torch.tensor([tokens[:front]]))
    host.writer.write(whole, blocks, 0, front)
    before = [dict(written) for written in host.writer.slots]
    job, _ = woven(host, ask, front, blocks, front)
    report = job.report()
    assert report["woven"] and report["rows"][0] == front, report
    spans = report["spans"]
    assert sum(s["n_tokens"] for s in spans if s["exact"] and s["position"] < front) == front
    assert (report["drift"] == 0) == (strategy == "full") and report["reused"] <= 55 - front
    with Engine(runner, repair=strategy, share=share) as engine:
        context = engine.context("asked")
        context.append(tokens[:front])
        context.weave()
        with context.edit():
            for i, n in enumerate(sizes):
                engine.put(f"c{i}", tokens[at : at + n])
                if at + n > front:
                    context.append_slice(f"c{i}", max(front - at, 0), n)
                at += n
            context.append(tokens[at:])
        plan, rows = context.weave(), context.session.state.rows
        assert (plan.repaired, plan.reused) == (report["repaired"], report["reused"])
        for layer, written in enumerate(host.writer.slots):
            keys, values = rows.read(layer)
            for row in range(job.load.stop):
                slot = blocks[row // SIZE] * SIZE + row % SIZE
                if row < front:
                    assert all(map(torch.equal, written[slot], before[layer][slot]))
                assert oracle.relative(written[slot][0], keys[row]) < 1e-6
                assert oracle.relative(written[slot][1], values[row]) < 1e-6


def test_rows_in_front_are_read_behind_the_step_in_which_they_may_be_computed(host, runner):
    tokens = ids(40, 1)
    ask = PromptAsk(tokens, WeaveSpec(parts=parts_of([12, 9, 14]), repair="none"))
    blocks, offer = tuple(range(50, 60)), host.find(ask)
    host.load("r", WeaveLoad(ask, blocks, 16, offer.covered, offer.digest, 16))
    assert not host.step(idle=False), "its rows are not there yet"
    whole, _ = oracle.rows_of(runner, torch.tensor([tokens[:16]]))
    host.writer.write(whole, blocks, 0, 16)
    while not (over := host.step(idle=False)):
        pass
    assert over["r"].plan is not None and over["r"].plan.spans[1].exact


def test_a_weave_that_never_began_is_given_up(host):
    ask = PromptAsk(ids(40, 1), WeaveSpec(parts=parts_of([12, 9, 14]), repair="none"))
    offer = host.find(ask)
    host.load("r", WeaveLoad(ask, tuple(range(50, 60)), 16, offer.covered, offer.digest, 16))
    host.step(idle=False)
    host.drop(["r"])
    assert host.over()["r"].plan is None
    assert not host.step(idle=True) and not host.engine.contexts


def test_without_repair_it_is_another(host, runner):
    tokens = ids(40, 1)
    ask = PromptAsk(tokens, WeaveSpec(parts=parts_of([12, 9, 14]), repair="none"))
    job, blocks = woven(host, ask)
    wanted, _ = oracle.rows_of(runner, torch.tensor([tokens]))
    last = len(runner.layers) - 1
    far = host.writer.slots[last][blocks[20 // SIZE] * SIZE + 20 % SIZE][1]
    assert oracle.relative(far, wanted.read(last)[1][20]) > 1e-3
    assert job.report()["drift"] is None and job.report()["reused"] == 23


def test_chunks_that_were_declared_are_there_the_next_time(host):
    tokens = ids(30, 2)
    spec = WeaveSpec(parts=parts_of([10, 10]), repair="none")
    woven(host, PromptAsk(tokens, spec))
    assert {record.n_tokens for record in host.engine.table} == {10}
    assert not host.engine.contexts, "the context is closed, its new text let go of"
    moved = tokens[10:20] + tokens[:10] + ids(5, 3)
    spec = WeaveSpec(match=False, parts=parts_of([10, 10]), repair="none")
    before = host.engine.runner.forward
    passes = []
    host.engine.runner.forward = lambda works: (
        passes.append(sum(w.n for w in works)),
        before(works),
    )[1]
    job, _ = woven(host, PromptAsk(moved, spec))
    host.engine.runner.forward = before
    assert job.report()["prefilled"] == 5 and not passes, "nothing of the chunks is computed"


def test_a_named_chunk_may_have_other_tokens_at_its_edges(host):
    stored = ids(20, 4)
    host.engine.put("docs/a", list(stored))
    inside = ids(7, 5) + (99, *stored[1:-2], 98, 97) + ids(6, 6)
    ask = PromptAsk(inside, WeaveSpec(parts=(PartSpec(chunk="docs/a"),), repair="none"))
    pieces = [(p.start, p.stop, p.offset) for p in host.cutter.cut(ask) if p.is_chunk]
    assert pieces == [(8, 25, 1)]
    job, _ = woven(host, ask)
    assert job.report()["reused"] == 17
    for missing, error in (("docs/a", "invalid_argument"), ("docs/b", "chunk_not_found")):
        ask = PromptAsk(ids(40, 7), WeaveSpec(parts=(PartSpec(chunk=missing),)))
        assert host.find(ask).error["code"] == error and host.find(ask).covered == 0
    with pytest.raises(ChunkNotFound):
        host.cutter.cut(ask)


def test_known_chunks_are_found_where_nothing_is_declared(host):
    stored = ids(40, 8)
    host.engine.put("docs/a", list(stored))
    host.cutter.library.sync()
    tokens = ids(9, 9) + stored + ids(11, 10)
    for match, found in ((True, [(9, 49)]), (False, [])):
        pieces = host.cutter.cut(PromptAsk(tokens, WeaveSpec(match=match)))
        assert [(p.start, p.stop) for p in pieces if p.is_chunk] == found
        assert "".join(str(list(range(p.start, p.stop))) for p in pieces).count(",") >= 50
        offer = host.find(PromptAsk(tokens, WeaveSpec(match=match)))
        assert bool(offer.covered) is match


def test_plans_have_one_digest_as_long_as_they_make_the_same_rows(host):
    tokens, parts = ids(40, 11), parts_of([12, 9, 14])
    first = host.find(PromptAsk(tokens, WeaveSpec(parts=parts, repair="none")))
    longer = host.find(PromptAsk(tokens + ids(9, 12), WeaveSpec(parts=parts, repair="none")))
    assert first.digest == longer.digest
    others = [
        PromptAsk(tokens, WeaveSpec(parts=parts, repair="query")),
        PromptAsk(tokens, WeaveSpec(parts=parts, repair="none", share=0.3)),
        PromptAsk(tokens, WeaveSpec(parts=parts_of([12, 23]), repair="none")),
        PromptAsk((*tokens[:3], 4, *tokens[4:]), WeaveSpec(parts=parts, repair="none")),
        PromptAsk(tokens, WeaveSpec(parts=parts, repair="none", namespace="anna")),
        PromptAsk(tokens, WeaveSpec(system=12, parts=parts[1:], repair="none")),
    ]
    digests = {host.find(ask).digest for ask in others} | {first.digest}
    assert len(digests) == 1 + len(others)


@pytest.mark.parametrize("kept", [True, False])
def test_what_is_woven_is_what_was_offered_or_nothing(host, kept):
    tokens, spec = ids(80, 15), WeaveSpec(match=True, repair="none")
    host.engine.put("docs/x", list(tokens[5:40]))
    host.cutter.library.sync()
    ask = PromptAsk(tokens, spec)
    offer = host.find(ask)
    host.engine.put("docs/y", list(tokens[42:78]))
    host.cutter.library.sync()
    if not kept:
        host._offered.clear()
    host.load("r", WeaveLoad(ask, tuple(range(30)), 0, offer.covered, offer.digest))
    job = host.step(idle=True)["r"]
    if kept:
        assert job.plan is not None and job.plan.reused == 35, "docs/y came too late"
    else:
        assert job.plan is None and "others now" in job.report()["failed"]


def test_what_fails_is_told_and_leaves_nothing(host):
    ask = PromptAsk(ids(40, 13), WeaveSpec(parts=parts_of([12, 9]), repair="none"))
    real = host.backend.forward

    def fails(works):
        raise RuntimeError("no such kernel")

    host.backend.forward = fails
    job, _ = woven(host, ask)
    host.backend.forward = real
    assert job.plan is None and job.report()["woven"] is False
    assert not host.writer.slots[0] and not host.engine.contexts
    job, _ = woven(host, ask)
    assert job.plan is not None, "and the next one is woven"


def test_a_weave_given_up_ends_and_leaves_nothing(host):
    ask = PromptAsk(ids(200, 14), WeaveSpec(parts=parts_of([90, 80]), repair="none"))
    host.load("r", WeaveLoad(ask, tuple(range(60)), 0, 199, host.find(ask).digest))
    assert not host.step(idle=False)
    host.drop(["r", "unknown"])
    assert host.over()["r"].plan is None and not host.step(idle=True)
    assert not host.writer.slots[0] and not host.engine.contexts


def test_the_rows_of_a_weave_are_those_of_the_next_one(host, runner):
    def full(sizes, seed):
        n = sum(sizes)
        spec = WeaveSpec(parts=parts_of(sizes), repair="full", share=1.0)
        ask = PromptAsk(ids(n + 3, seed), spec)
        job, blocks = woven(host, ask)
        assert job.error is None
        for layer, written in enumerate(host.writer.slots):
            keys, values = oracle.rows_of(runner, torch.tensor([ask.tokens]))[0].read(layer)
            for row in range(n):
                found = written[blocks[row // SIZE] * SIZE + row % SIZE]
                assert oracle.relative(found[0], keys[row]) < 1e-6
                assert oracle.relative(found[1], values[row]) < 1e-6
        return host.spare.rows

    shelf = host.engine.shelf
    first = full([30, 30], 31)
    place, n_bytes = first.layers[0].k.data_ptr(), first.n_bytes
    assert first.n == 0 and dict(shelf.charged()) == {HOLDER: n_bytes}
    again = full([25, 20], 32)
    assert again is first and again.layers[0].k.data_ptr() == place
    assert full([9, 8], 33) is first, "too many for so few are kept, and not lent"
    longer = full([60, 60], 34)
    assert longer.n_bytes > n_bytes, "what grew is kept"
    assert dict(shelf.charged()) == {HOLDER: longer.n_bytes}
    shelf.charge("somebody", shelf.room + 1)
    assert host.spare.rows is None and dict(shelf.charged()).keys() == {"somebody"}
    full([9, 8], 35)
    assert host.spare.rows is None or shelf.room >= 0
    shelf.charge("somebody", 0)


# ---- the scheduler's side


class Chain:
    """A request, and where its chain of hashes was forked."""

    def __init__(self, name, tokens, params=None, **fields):
        self.request_id, self.prompt_token_ids, self.kv_transfer_params = name, list(tokens), params
        plain = SimpleNamespace(
            mm_features=[], lora_request=None, pooling_params=None, resumable=False,
            skip_reading_prefix_cache=False, block_hashes=[], cache_salt=None,
        )  # fmt: skip
        vars(self).update({**vars(plain), **fields})
        self.forks, self.chain = [], ()


@pytest.fixture
def scheduling():
    def fork(request, forks):
        request.chain = forks
        if forks and forks[-1][1] != EXACT:
            request.forks.append(forks[-1])
        elif request.forks:
            request.forks.append((None, b""))

    return Scheduling(fork, SIZE, False)


def asked(scheduling, request, offer, n_local=0):
    """Take a request to where vLLM knows how much of it will be woven."""
    scheduling.new(request)
    assert scheduling.external(request, n_local) == (None, False)
    asks, _ = scheduling.told()
    assert list(asks) == [request.request_id]
    assert scheduling.external(request, n_local) == (None, False) and not scheduling.told()[0]
    scheduling.found(request.request_id, offer)
    return scheduling.external(request, n_local)


def test_plain_requests_are_left_alone(scheduling):
    request = Chain("p", ids(40, 1))
    scheduling.new(request)
    assert scheduling.external(request, 8) == (0, False)
    assert scheduling.told() == ({}, {}) and scheduling.finished("p") is None and not request.forks


@pytest.mark.parametrize(
    "fields",
    [
        {"mm_features": [1]}, {"lora_request": 1}, {"pooling_params": 1}, {"resumable": True},
        {"skip_reading_prefix_cache": True},
    ],
)  # fmt: skip
def test_requests_that_cannot_be_woven_are_plain(scheduling, fields):
    request = Chain("p", ids(40, 1), said(), **fields)
    scheduling.new(request)
    assert scheduling.external(request, 8) == (0, False)


def test_the_chain_forks_where_the_first_row_is_written(scheduling):
    offer = WeaveOffer(39, 35, b"plan")
    request = Chain("a", ids(40, 1), said(parts=[{"tokens": [0, 35]}]))
    assert asked(scheduling, request, offer, n_local=8) == (31, True)
    (block, key) = request.forks[-1]
    assert block == 2, "behind the local hit: those rows are vLLM's"
    scheduling.allocated(request, (5, 6, 7), 31)
    loads = scheduling.told()[1]
    assert (loads["a"].start, loads["a"].stop, loads["a"].blocks) == (8, 39, (5, 6, 7))
    scheduling.wove(
        "a",
        {
            "woven": True,
            "drift": 0.25,
            "drift_by": "audit",
            "strategy": "none",
            "approximate": {"reuse": 3},
        },
    )
    assert scheduling.finished("a")["drift"] == 0.25

    again = Chain("b", ids(40, 1), said(parts=[{"tokens": [0, 35]}]))
    assert asked(scheduling, again, offer, n_local=36) == (0, False), "all of it is there"
    assert again.forks == [(block, key)], "under the same key"
    told = scheduling.finished("b")
    assert (told["woven"], told["cached"], told["drift"]) == (False, 36, 0.25)

    turn = Chain("c", ids(40, 1) + ids(9, 2), said(parts=[{"tokens": [0, 35]}]))
    assert asked(scheduling, turn, WeaveOffer(48, 35, b"plan"), 40) == (0, False)
    assert turn.forks == [(block, key)], "a turn behind it goes on from it"
    assert scheduling.finished("c")["drift"] is None, "the bound was of another question"

    other = Chain("d", (*ids(40, 1)[:35], *ids(5, 3)), said(parts=[{"tokens": [0, 35]}]))
    asked(scheduling, other, offer, 8)
    assert other.forks[-1][1] != key, "another question has rows of its own"


def test_rows_that_depend_on_no_question_are_found_by_the_next_one(scheduling):
    offer = WeaveOffer(35, 35, b"plan", looks=False)
    first = Chain("a", ids(40, 1), said())
    assert asked(scheduling, first, offer, n_local=8) == (27, True)
    scheduling.allocated(first, (5, 6, 7), 27)
    assert scheduling.told()[1]["a"].stop == 35
    other = Chain("b", (*ids(40, 1)[:35], *ids(2, 3)), said())
    assert asked(scheduling, other, offer, n_local=32) == (0, False), "the rest is vLLM's"
    assert other.forks == first.forks
    assert scheduling.finished("b")["cached"] == 32
    evicted = Chain("c", ids(60, 1)[:35] + ids(9, 4), said())
    scheduling.new(evicted)
    scheduling.external(evicted, 0)
    scheduling.found("c", offer)
    assert evicted.forks == first.forks, "where it is looked for"
    assert scheduling.external(evicted, 28) == (7, True)


def test_chunks_shorter_than_a_block_are_woven_where_nothing_is_there(scheduling):
    offer = WeaveOffer(3, 3, b"plan", looks=False)
    assert asked(scheduling, Chain("a", ids(9, 1), said()), offer) == (3, True)


@pytest.mark.parametrize(("repair", "covered"), [("none", 35), ("first_k:2", 35), ("auto", 39)])
def test_what_looks_at_the_question_is_woven_with_it(host, repair, covered):
    ask = PromptAsk(ids(40, 1), WeaveSpec(parts=parts_of([12, 9, 14]), repair=repair))
    offer = host.find(ask)
    assert (offer.covered, offer.looks) == (covered, repair == "auto")


def test_where_blocks_were_evicted_the_fork_goes_before_what_is_written(scheduling):
    offer = WeaveOffer(39, 35, b"plan", looks=False)
    request = Chain("a", ids(40, 1), said())
    asked(scheduling, request, offer, n_local=16)
    assert scheduling.external(request, 4) == (35, True)
    assert [block for block, _ in request.forks] == [4, 1]
    assert scheduling.external(request, 12) == (27, True)
    assert request.forks[-1][0] == 1, "what was written before stands from there on"


def test_exact_rows_of_vllm_are_taken_before_ours(scheduling):
    request = Chain("a", ids(40, 1), said())
    assert asked(scheduling, request, WeaveOffer(39, 35, b"plan"), n_local=36) == (0, False)
    assert not request.forks and scheduling.finished("a")["drift"] == 0.0


def test_a_weave_that_failed_is_not_tried_again(scheduling):
    request = Chain("a", ids(40, 1), said())
    assert asked(scheduling, request, WeaveOffer(39, 35, b"plan"))[0] == 39
    scheduling.wove("a", {"woven": False, "failed": "no such kernel"})
    assert scheduling.external(request, 0) == (0, False)
    assert request.forks[-1][0] is None, "what vLLM computes stands under its own keys again"
    assert scheduling.finished("a")["failed"] == "no such kernel"


def test_rows_of_a_plan_that_was_forgotten_are_not_found_under_its_next_key(scheduling):
    offer, first = WeaveOffer(39, 35, b"plan"), Chain("a", ids(40, 1), said())
    asked(scheduling, first, offer)
    for i in range(70):  # more questions than are remembered
        asked(scheduling, Chain(f"q{i}", (*ids(40, 1)[:35], *ids(5, 100 + i)), said()), offer)
    again = Chain("b", ids(40, 1), said())
    asked(scheduling, again, offer)
    assert again.forks[-1][1] != first.forks[-1][1]


def test_rows_of_ours_are_never_called_exact_without_a_report(scheduling):
    offer = WeaveOffer(39, 35, b"plan")
    asked(scheduling, Chain("a", ids(40, 1), said()), offer)  # and it is aborted
    assert scheduling.finished("a")["drift"] is None
    assert asked(scheduling, Chain("b", ids(40, 1), said()), offer, 36) == (0, False)
    assert scheduling.finished("b")["drift"] is None


def test_a_request_that_says_it_wrongly_is_told_so(scheduling):
    request = Chain("a", ids(40, 1), said(parts=[{"tokens": [0, 80]}]))
    scheduling.new(request)
    assert scheduling.external(request, 0) == (0, False)
    assert scheduling.finished("a")["error"]["code"] == "InvalidArgument"


def test_an_offer_that_comes_too_late_is_let_go(scheduling):
    request = Chain("a", ids(40, 1), said())
    scheduling.new(request)
    scheduling.external(request, 0)
    scheduling.finished("a")
    scheduling.found("a", WeaveOffer(39, 35, b"plan"))
    scheduling.wove("a", {"woven": True})
    assert scheduling.told() == ({}, {}) and not request.forks


def wrote(scheduling, request, *spans):
    found = {"drift": None, "drift_by": "unknown", "strategy": "none", "approximate": {}}
    spans = [{"n_tokens": n, "exact": exact} for n, exact in spans]
    scheduling.wove(request.request_id, {"woven": True, "spans": spans, **found})


def test_exact_rows_stand_under_one_key_for_all_plans(scheduling):
    request = Chain("a", ids(40, 1), said())
    asked(scheduling, request, WeaveOffer(39, 35, b"plan"), n_local=4)
    (own,) = request.chain
    assert own[0] == 1
    wrote(scheduling, request, (3, True), (8, True), (9, False), (9, True))
    assert request.chain == ((1, EXACT), (2, own[1])), (
        "11 rows are two blocks, whatever comes later"
    )
    again = Chain("b", ids(40, 1), said())
    asked(scheduling, again, WeaveOffer(39, 35, b"plan"), n_local=36)
    assert again.chain == request.chain


def test_nothing_exact_of_a_weave_that_began_behind_the_fork_is_shared(scheduling):
    offer, request = WeaveOffer(39, 35, b"plan", looks=False), Chain("a", ids(40, 1), said())
    asked(scheduling, request, offer, n_local=4)
    (own,) = request.chain
    wrote(scheduling, request, (40, False))
    again = Chain("b", ids(40, 1), said())
    asked(scheduling, again, offer, n_local=12)
    wrote(scheduling, again, (40, True))
    assert again.chain == (own,), "the blocks in front stand under the plan's own key"


@pytest.mark.parametrize("n_plain", [0, 1, 2])
def test_exact_rows_are_looked_for_behind_those_of_vllm(scheduling, n_plain):
    cached = {*"abc"[:n_plain], *"ABC"[n_plain:]}
    scheduling.is_cached = lambda hash: hash in cached
    fork = scheduling.fork

    def forked(request, forks):
        fork(request, forks)
        at = next((block for block, key in forks if key == EXACT), 9)
        request.block_hashes = [*"abcdef"[:at], *"ABCDEF"[at:]]

    scheduling.fork, request = forked, Chain("a", ids(40, 1), said(), block_hashes=[*"abcdef"])
    scheduling.new(request)
    scheduling.external(request, 0)
    scheduling.found("a", WeaveOffer(39, 35, b"plan"))
    assert request.chain == ((n_plain, EXACT),) and not request.forks
    assert scheduling.external(request, 12) == (27, True)
    key = request.chain[-1][1]
    assert request.chain == ((n_plain, EXACT), (3, key))
    assert scheduling.external(request, 0) == (39, True), "they were evicted"
    assert request.chain == ((0, key),)


# ---- bounds


def calibrated(fingerprint, folder, bound=0.5):
    """Write a calibration that bounds whatever `auto` shows at 15 %; return the file."""
    curve = Curve(0.15, 0.15, (0.0,) * 6, (0.0,), (bound,), (-99.0,) * 5, (99.0,) * 5)
    file = folder / "calibration.json"
    Calibration(fingerprint, 0.95, 100, (curve,)).save(file)
    return str(file)


@pytest.mark.parametrize("mine", [True, False])
def test_a_calibration_bounds_the_drift_of_its_own_model_only(runner, tmp_path, mine):
    whose = runner.fingerprint if mine else replace(runner.fingerprint, weights="0" * 32)
    file = calibrated(whose, tmp_path)
    options = {"budget": "64MiB", "max_rows": 16}
    if not mine:
        with pytest.raises(ModelMismatch, match="weights"):
            Host(runner, Blocks(len(runner.layers)), options | {"calibration": file})
        options |= {"home": str(tmp_path)}  # where it is only looked for
    else:
        options |= {"calibration": file}
    host = Host(runner, Blocks(len(runner.layers)), options)
    spec = WeaveSpec(parts=parts_of([40, 40, 40]), repair="auto", share=0.15)
    job, _ = woven(host, PromptAsk(ids(130, 51), spec))
    assert (job.report()["drift"] is not None) == mine, job.report()
    host.close()


BOUNDED = WeaveSpec(parts=parts_of([40, 40, 40]), repair="auto", share=0.15, max_drift=0.6)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, None),
        ({"repair": "first_k"}, "fixed share"),
        ({"share": 0.2}, "not calibrated for 0.2"),
        ({"calibration": None}, "no calibration"),
    ],
)
def test_a_bound_is_kept_or_refused_before_anything_is_woven(runner, tmp_path, change, says):
    change = {"calibration": calibrated(runner.fingerprint, tmp_path)} | change
    options = {"budget": "64MiB", "max_rows": 16, "calibration": change.pop("calibration")}
    host = Host(runner, Blocks(len(runner.layers)), options)
    ask = PromptAsk(ids(130, 51), replace(BOUNDED, **change))
    if says is None:
        report = woven(host, ask)[0].report()
        assert (report["drift"], report["drift_by"]) == (0.5, "calibration")
        wider = replace(ask, spec=replace(BOUNDED, max_drift=0.4))
        assert woven(host, wider)[0].report()["drift"] == 0, "no bound is low enough: all rows"
        assert (
            host.find(replace(ask, tokens=ids(30, 3), spec=WeaveSpec(max_drift=0.6))).error is None
        )
    else:
        offer = host.find(ask)
        assert says in offer.error["message"] and offer.error["hint"] and not offer.covered
    host.close()


@pytest.mark.parametrize("recipe", ["0@3@1", "0@0@1", "2@0@2"])
def test_what_a_calibration_chose_is_how_requests_are_woven(runner, tmp_path, recipe):
    file = tmp_path / "calibration.json"
    Calibration(runner.fingerprint, 0.0, 0, (), recipes=((0.15, recipe),)).save(file)
    spec = WeaveSpec(parts=parts_of([40, 40, 40]), repair="auto", share=0.15)
    found = []
    for repair, given in [("auto", str(file)), (f"auto:{recipe}", None), ("auto", None)]:
        host = Host(runner, Blocks(len(runner.layers)), {"budget": "64MiB", "calibration": given})
        job, _ = woven(host, PromptAsk(ids(130, 51), replace(spec, repair=repair)))
        report, slots = job.report(), host.writer.slots
        assert report["woven"] and report["drift"] is None
        found.append(
            (report["repaired"], torch.cat([slots[-1][at][1] for at in sorted(slots[-1])]))
        )
        if given is not None:  # nothing was bounded
            offer = host.find(PromptAsk(ids(130, 51), replace(spec, max_drift=0.6)))
            assert "no calibration" in offer.error["message"] and not offer.covered
        host.close()
    (n, mine), (n_asked, asked), (_, usual) = found
    assert n == n_asked and torch.allclose(mine, asked, atol=1e-5)  # two hosts: not bit by bit
    assert not torch.allclose(mine, usual, atol=1e-4)


@pytest.mark.parametrize("start", [0, 36, 44])
def test_a_bound_is_of_rows_that_are_all_ours(runner, tmp_path, start):
    options = {"budget": "64MiB", "calibration": calibrated(runner.fingerprint, tmp_path)}
    host = Host(runner, Blocks(len(runner.layers)), options)
    exact, ours = start <= 40, {"drift": 0.5, "drift_by": "calibration"}  # the first chunk is exact
    free = PromptAsk(ids(130, 51), replace(BOUNDED, max_drift=None))
    report = woven(host, free, start)[0].report()
    assert {key: report[key] for key in ours} == (ours if exact else dict.fromkeys(ours))
    report = woven(host, replace(free, spec=BOUNDED), start)[0].report()
    assert (report["woven"], report.get("drift")) == ((True, 0.5) if exact else (False, None))
    assert exact or "44 tokens in front" in report["failed"]
    host.close()


BOUNDED_OFFER = WeaveOffer(39, 35, b"plan", bounded=True)


def bounded(scheduling, request, drift, n_local=0, offer=BOUNDED_OFFER):
    """Have a request woven, and told a bound."""
    asked(scheduling, request, offer, n_local=n_local)
    told = {"drift": drift, "drift_by": "calibration", "strategy": "auto", "approximate": {}}
    scheduling.wove(request.request_id, {"woven": True, **told})


def test_a_bound_is_of_one_question(scheduling):
    first = Chain("a", ids(40, 1), said())
    bounded(scheduling, first, 0.25)
    again = Chain("b", ids(40, 1), said())
    assert asked(scheduling, again, BOUNDED_OFFER, 36) == (0, False)
    assert scheduling.finished("b")["drift"] == 0.25
    turn = Chain("c", ids(40, 1) + ids(9, 2), said())
    assert asked(scheduling, turn, replace(BOUNDED_OFFER, covered=48)) == (48, True)
    assert turn.chain[-1][1] != first.chain[-1][1], "it is woven anew, under a key of its own"


def test_a_bound_that_was_not_reported_is_found_anew(scheduling):
    asked(scheduling, Chain("a", ids(40, 1), said()), BOUNDED_OFFER)  # and it is aborted
    assert asked(scheduling, Chain("b", ids(40, 1), said()), BOUNDED_OFFER, 36) == (None, False)
    assert scheduling.external(Chain("b", ids(40, 1), said()), 0) == (39, True)


@pytest.mark.parametrize("drift", [0.25, 0.0, None])
@pytest.mark.parametrize(("looks", "is_bounded"), [(True, True), (True, False), (False, False)])
def test_what_is_said_of_a_weave_is_of_one(scheduling, drift, is_bounded, looks):
    offer = WeaveOffer(39, 35, b"plan", looks=looks, bounded=is_bounded)
    first = Chain("a", ids(40, 1), said())
    bounded(scheduling, first, drift, n_local=8, offer=offer)
    evicted = Chain("b", ids(40, 1), said())
    anew = bool(is_bounded or drift) or (looks and drift is None)
    assert asked(scheduling, evicted, offer, 20) == ((None, False) if anew else (19, True))
    assert (evicted.chain[-1:] != first.chain[-1:]) == anew
    assert scheduling.external(evicted, 8) == (31, True)


def test_rows_of_a_weave_are_not_in_front_of_one_that_repairs_all(host, scheduling, runner):
    """A turn behind the same chunks may have all of them repaired, where the turn before had not."""
    spec = WeaveSpec(parts=parts_of([10, 9, 11]), repair="auto", share=0.1)
    tokens = ids(80, 51)
    short, long = PromptAsk(tokens[:40], spec), PromptAsk(tokens, spec)
    requests = [Chain(str(len(ask.tokens)), ask.tokens, said()) for ask in (short, long)]
    assert asked(scheduling, requests[0], host.find(short)) == (39, True)
    report = woven(host, short)[0].report()
    assert report["drift"] is None and report["exact"] < 24
    scheduling.wove("40", report)
    assert woven(host, long)[0].report()["drift"] == 0
    assert asked(scheduling, requests[1], host.find(long), 24) == (None, False)
    assert scheduling.external(requests[1], 0) == (79, True)
    assert requests[1].chain[-1] != requests[0].chain[-1]


@pytest.mark.parametrize("drifts", [(0.25, 0.0), (0.0, 0.25), (None, 0.25), (0.25, None)])
def test_of_two_weaves_under_one_key_the_worse_bound_is_told(scheduling, drifts):
    requests = [Chain(name, ids(40, 1), said()) for name in "ab"]
    for request in requests:
        asked(scheduling, request, WeaveOffer(39, 35, b"plan"))
    for request, drift in zip(requests, drifts, strict=True):
        told = {"drift": drift, "drift_by": "calibration", "strategy": "auto", "approximate": {}}
        scheduling.wove(request.request_id, {"woven": True, **told})
    assert (
        asked(scheduling, Chain("c", ids(40, 1), said()), WeaveOffer(39, 35, b"plan"), 36)[0] == 0
    )
    assert scheduling.finished("c")["drift"] == (None if None in drifts else 0.25)


def test_a_request_that_was_preempted_is_told_the_worse_of_its_weaves(scheduling):
    for name, later, drift in (("a", 0.0, 0.25), ("b", 0.5, 0.5), ("c", None, None)):
        bounded(scheduling, Chain(name, ids(40, 1), said()), 0.25)
        told = {"drift": later, "drift_by": "calibration", "strategy": "auto", "approximate": {}}
        scheduling.wove(name, {"woven": True, **told})
        assert scheduling.finished(name)["drift"] == drift
    bounded(scheduling, Chain("d", ids(40, 1), said()), 0.25)
    scheduling.wove("d", {"woven": False, "failed": "no room"})
    told = scheduling.finished("d")
    assert told["drift"] == 0.25 and "failed" not in told, "a part was answered over those rows"


def test_a_request_that_was_preempted_is_told_how_often_it_was_woven(scheduling):
    """Its first tokens may be of other rows than those that its counts are of."""
    told = {"woven": True, "drift": None, "drift_by": None, "strategy": "auto", "approximate": {}}
    for n_weaves in (1, 2, 3):
        request = Chain(f"a{n_weaves}", ids(40, n_weaves), said())
        offer = WeaveOffer(39, 35, f"plan {n_weaves}".encode())
        assert asked(scheduling, request, offer, 16) == (23, True)
        for start in (16, 8, 0)[:n_weaves]:
            assert start == 16 or scheduling.external(request, start) == (39 - start, True)
            scheduling.wove(request.request_id, told | {"rows": [start, 39]})
        scheduling.external(request, 36)  # preempted once more, and found by vLLM
        found = scheduling.finished(request.request_id)
        assert found["local"] == found["rows"][0] == start
        assert found.get("weaves", 1) == n_weaves


def test_a_name_that_goes_for_a_new_one_is_of_no_chunk_that_is_about_to_be_woven(host):
    a, b = ids(12, 1), ids(9, 2)
    woven(host, PromptAsk((*a, *b, 7), WeaveSpec(parts=parts_of([12, 9]), repair="none")))
    name, host.names.most = host.engine.files.ls()[0].name, 2
    tokens, parts = (*ids(6, 9), *a, 7), (PartSpec(chunk=name),)
    job, _ = woven(host, PromptAsk(tokens, WeaveSpec(system=6, parts=parts, repair="none")))
    assert job.plan is not None, job.error
