"""Random requests inside a real vLLM, against models that know nothing of it.

Plain requests are compared with transformers' own prefill; woven ones with the embedded engine, of
which a full repair is a prefill again. Needs vLLM: `make setup-vllm`, then `make test-vllm`.
"""

from __future__ import annotations

import os

import pytest

pytest.importorskip("vllm", reason="no vLLM here: make setup-vllm, then make test-vllm")

import asyncio
import random
from types import SimpleNamespace

import torch
from transformers import AutoModelForCausalLM
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm_requests import CLOSE, STRATEGIES, Case, checkpoint_at, core, off, run, vllm_of

from kvweave import Engine
from kvweave.connect.vllm import ahead, plugin, refine
from kvweave.connect.vllm.ahead import ChunksAhead
from kvweave.connect.vllm.connector import KVWeaveConnector
from kvweave.connect.vllm.rest import rest
from kvweave.errors import InvalidArgument
from kvweave.run.model import Runner
from kvweave.weave.calibration import Calibration

N = int(os.environ.get("KVWEAVE_VLLM_REQUESTS", "150"))
SEED = int(os.environ.get("KVWEAVE_SEED", "1"))
pytestmark = pytest.mark.usefixtures("looks")  # at contexts that it would rather repair whole


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return checkpoint_at(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(checkpoint):
    made = vllm_of(checkpoint)
    yield made
    made.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="module")
def plain(checkpoint):
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)


@pytest.fixture(scope="module")
def embedded(plain):
    return Runner(plain)


def host(llm):
    return core(llm).model_executor.driver_worker.worker.kvweave_connector().host


def n_free(llm):
    return core(llm).scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


@pytest.mark.parametrize("goes_ahead", [False, True])
def test_random_requests_poison_nothing_and_leave_nothing(
    llm, plain, embedded, goes_ahead, monkeypatch
):
    """Also where canonical KV is made between steps, while others run, new chunks are text, and prompts
    are prefilled between requests."""
    rng, ours = random.Random(SEED + 1000 * goes_ahead), host(llm)  # chunks of its own
    if goes_ahead:
        monkeypatch.setattr(ahead, "QUIET_SECONDS", -1.0)
        monkeypatch.setattr(
            ours, "ahead", ChunksAhead(ours.cutter, ours.tasks, ours._keep, ours.lockstep)
        )
        prompts = core(llm).model_executor.driver_worker.worker.kvweave_connector().prompts
        monkeypatch.setattr(prompts, "on", True)
    n_ahead = rested = 0

    def between():
        nonlocal n_ahead
        if goes_ahead and rng.random() < 0.3:
            n_ahead += len(ours.ahead._waiting)
            ours.go_ahead()
            n_ahead -= len(ours.ahead._waiting)

    pool = [[rng.randrange(3, 300) for _ in range(rng.randrange(5, 90))] for _ in range(10)]
    recent, done, free, preempted = [], 0, n_free(llm), []
    scheduler = core(llm).scheduler
    preempt = scheduler._preempt_request
    scheduler._preempt_request = lambda *of, **how: (preempted.append(1), preempt(*of, **how))[1]
    woven = differ = compared = behind = 0
    while done < N:
        cases = []
        for _ in range(rng.choice([1, 1, 2, 4, 6])):
            if recent and rng.random() < 0.35:  # the same again, plain, or with a turn behind it
                old = rng.choice(recent)
                parts = list(old.parts) or [(True, old.tokens[:-2]), (False, old.tokens[-2:])]
                strategy = rng.choice([old.strategy, old.strategy, None, rng.choice(STRATEGIES)])
                if len(parts) > 2 and rng.random() < 0.3:
                    parts[len(parts) // 2] = (True, rng.choice(pool))
                if rng.random() < 0.5 and len(old.tokens) < 330:
                    parts.append(
                        (False, [rng.randrange(3, 300) for _ in range(rng.randrange(1, 40))])
                    )
            else:
                strategy = rng.choice([None, *STRATEGIES])
                parts = [(rng.random() < 0.8, rng.choice(pool)) for _ in range(rng.randrange(1, 5))]
                parts.append((False, [rng.randrange(3, 300) for _ in range(rng.randrange(2, 30))]))
            tokens = [t for _, part in parts for t in part]
            n_new = max(1, min(rng.choice([1, 1, 3, 70, 140]), 505 - len(tokens)))
            cases.append(Case(tokens, parts, strategy, n_new))
        recent = (recent + cases)[-12:]
        abort = [(i, rng.randrange(8)) for i in range(len(cases)) if rng.random() < 0.15]
        outputs = run(llm, cases, abort, between)
        for i, output in outputs.items():
            case, told = cases[i], (output.kv_transfer_params or {}).get("kvweave")
            if goes_ahead and told and told["woven"]:
                case = case.told(told["spans"])
            expected, mine = case.expected(plain, embedded)
            found = off(output, expected)
            note = f"{case.strategy} of {len(case.tokens)} tokens, {told}, seed {SEED} at {done}"
            if case.strategy is None:
                assert found < CLOSE, f"a plain request is off by {found}: {note}"
            elif told.get("drift") == 0:
                exact = Case(case.tokens).expected(plain, embedded)[0]
                assert off(output, exact) < CLOSE, f"said to be exact: {note}"
            elif told["woven"]:
                if not mine:  # a full repair: right also where a plan is too modest to say so
                    assert found < CLOSE, f"a full repair is off by {found}: {note}"
                    woven += 1
                    continue
                # a text that is known as a chunk is placed, which the embedded engine does not know;
                # an answer may have been preempted and woven again
                front = told["local"]
                if front:
                    expected, mine = case.expected(plain, embedded, front)
                    found = off(output, expected)
                same = all(told[key] == mine[key] for key in ("exact", "repaired", "reused"))
                if same and front <= told["exact"] and "weaves" not in told:
                    assert found < CLOSE, f"the embedded engine differs by {found}: {note}"
                    compared, behind = compared + 1, behind + bool(front)
                exact = Case(case.tokens).expected(plain, embedded)[0]
                differ += off(output, exact) > 20 * CLOSE
            woven += bool(told and told["woven"])
        done += len(cases)
        if len(outputs) < len(cases):
            run(llm, [Case([5, 6, 7])])  # what was aborted is let go of in the next step
        if goes_ahead and rng.random() < 0.5:
            rested += rest(llm, rng.choice([0.05, 5.0]))  # not always to the end
        assert n_free(llm) == free, "blocks did not come back"
        assert not host(llm)._jobs and not host(llm).engine.contexts
        assert not core(llm).scheduler.connector.scheduling._requests
    assert not goes_ahead or (rest(llm, 60.0) and not prompts._waiting), "it ends"
    host(llm).engine.check_integrity()
    found = f"{done} requests, {woven} woven, {compared} compared, {differ} approximate"
    found += f", {rested} rests"
    found += (
        f", {n_ahead} chunks ahead, {len(preempted)} preempted, {behind} behind rows of vLLM's own"
    )
    assert bool(n_ahead) == bool(rested) == goes_ahead
    assert preempted and min(woven, 4 * compared, 4 * differ) > N / 10, (
        f"it can see what it looks for: {found}"
    )
    print(found)


def prompt_of(seed, sizes=(70, 60, 50, 20)):
    rng = random.Random(seed)
    parts = [
        (i < len(sizes) - 1, [rng.randrange(3, 300) for _ in range(n)]) for i, n in enumerate(sizes)
    ]
    return [t for _, part in parts for t in part], parts


def answered(llm, case):
    output = run(llm, [case])[0]
    return output, (output.kv_transfer_params or {}).get("kvweave")


def test_the_same_plan_and_a_turn_behind_it_find_its_blocks(llm, plain, embedded):
    tokens, parts = prompt_of(100)
    first, told = answered(llm, Case(tokens, parts, ("none", 0.0)))
    assert told["woven"] and told["drift"] is None and told["rows"] == [0, 180]
    again, told = answered(llm, Case(tokens, parts, ("none", 0.0)))
    assert not told["woven"] and told["cached"] == 192 and told["drift"] is None
    assert told["approximate"] == {"reuse": 110}
    wanted = {t: p.logprob for t, p in first.outputs[0].logprobs[0].items() if p.rank <= 5}
    found = again.outputs[0].logprobs[0]
    assert max(abs(found[t].logprob - x) for t, x in wanted.items()) < CLOSE
    behind = [*parts, (False, prompt_of(101)[0][:40])]
    _, told = answered(llm, Case([t for _, p in behind for t in p], behind, ("none", 0.0)))
    assert not told["woven"] and told["cached"] == 192
    output, told = answered(llm, Case(tokens))
    assert told is None and not output.num_cached_tokens
    assert off(output, Case(tokens).expected(plain, embedded)[0]) < CLOSE


@pytest.mark.parametrize("strategy", [("none", 0.0), ("first_k", 0.1), ("auto", 0.1)])
def test_a_conversation_that_grows_behind_an_edit_is_woven_once(
    llm, plain, embedded, strategy, monkeypatch
):
    """As in the embedded engine: what comes behind is computed over the rows that are there, of which a
    strategy that looks at the question repairs some more."""
    ours, rng = host(llm), random.Random(f"{SEED} {strategy}")
    monkeypatch.setattr(ahead, "QUIET_SECONDS", -1.0)
    made = ChunksAhead(ours.cutter, ours.tasks, ours._keep, ours.lockstep)
    monkeypatch.setattr(ours, "ahead", made)

    def new(n):
        return [rng.randrange(3, 300) for _ in range(n)]

    def asked(turns, n_new):
        """Ask with all turns declared, and let there be time behind it."""
        parts = [*((True, turn) for turn in turns), (False, end)]
        case = Case([t for _, part in parts for t in part], parts, strategy, n_new)
        output, told = answered(llm, case)
        while ours.go_ahead() == ahead.MORE:
            pass
        return case, output, told

    end, turns = new(3), [new(70), new(60), new(50), new(40)]
    assert asked(turns, 1)[2] == {"woven": False, "drift": 0.0, "drift_by": "exact", "local": 0}
    turns = [*turns[1:], new(30)]
    case, output, told = asked(turns, 5)
    assert told["woven"] and told["prefilled"] >= 33, "the last turn is new text"
    with Engine(embedded, repair=strategy[0], share=strategy[1], max_rows=64) as engine:
        context = engine.context("grows")
        with context.edit():
            for i, turn in enumerate(turns[:-1]):
                engine.put(f"c{i}", turn)
                context.append_chunk(f"c{i}")
            context.append([*turns[-1], *end])
        assert context.weave().repaired == told["repaired"]
        n = len(case.tokens)
        for i in range(3):
            turns = [*turns, [*end, *output.outputs[0].token_ids, *new(25 + i)]]
            case, output, told = asked(turns, 5)
            if strategy[0] == "auto":
                assert told["woven"] and told["repaired"]
                continue
            assert not told["woven"] and told["cached"] >= n // 32 * 32, told
            context.append(case.tokens[n:])
            n = len(case.tokens)
            choice = context.generate(1, ignore_eos=True, logprobs=10).choices[0]
            context.drop(
                len(context.parts) - 1
            )  # the answer: that of vLLM stands in the next prompt
            wanted = torch.full((300,), float("nan"))
            for token, logprob in [(choice.token, choice.logprob), *choice.top]:
                wanted[token] = logprob
            assert off(output, wanted) < CLOSE


@pytest.mark.parametrize("strategy", [("none", 0.0), ("first_k", 0.1), ("auto", 0.1)])
def test_behind_a_rest_a_conversation_is_as_one_that_was_never_edited(
    llm, plain, strategy, monkeypatch
):
    """What was woven has been prefilled by then: all that is computed is the new turn, over exact rows."""
    ours, rng = host(llm), random.Random(f"{SEED} rest {strategy}")
    prompts = core(llm).model_executor.driver_worker.worker.kvweave_connector().prompts
    made = ChunksAhead(ours.cutter, ours.tasks, ours._keep, ours.lockstep)
    monkeypatch.setattr(ahead, "QUIET_SECONDS", 0.001)
    # as with the server's `match`: what is prefilled must not be woven in its turn
    monkeypatch.setattr(core(llm).scheduler.connector.scheduling, "matches", True)
    monkeypatch.setattr(ours, "ahead", made)
    free, end = n_free(llm), [5, 6, 7]

    def new(n):
        return [rng.randrange(3, 300) for _ in range(n)]

    def asked(turns):
        """Ask with all turns declared, and let there be time behind it."""
        parts = [*((True, turn) for turn in turns), (False, end)]
        case = Case([t for _, part in parts for t in part], parts, strategy)
        output, told = answered(llm, case)
        waits = len(prompts._waiting)
        assert rest(llm, 60) and not prompts._waiting and n_free(llm) == free
        if told["drift"] == 0:
            assert off(output, Case(case.tokens).expected(plain, None)[0]) < CLOSE
        return case, told, waits

    turns = [new(50), new(60), new(40)]
    assert asked(turns)[1:] == (
        {"woven": False, "drift": 0.0, "drift_by": "exact", "local": 0},
        0,
    )
    assert asked([turns[2], turns[0]])[1]["woven"] and not prompts.on
    monkeypatch.setattr(prompts, "on", True)
    turns = [turns[1], turns[0], turns[2]]
    case, told, waits = asked(turns)
    assert told["woven"] and told["reused"] and waits == 1
    again = asked(turns)[1]
    assert (again["woven"], again["drift"], again["local"]) == (False, 0, 128), "of 153 tokens"
    for n in (20, 30, 25):
        known = len(case.tokens) // 32 * 32
        turns = [*turns, [*end, *new(n)]]
        case, told, waits = asked(turns)
        assert told == {"woven": False, "drift": 0.0, "drift_by": "exact", "local": known}
        assert not waits, "it is exact already"
    case, told, waits = asked([*turns[:1], *turns[2:]])
    assert told["woven"] and told["local"] == 32 and waits == 1, "of 60 tokens in front"


def test_what_is_prefilled_behind_a_weave_is_not_woven_where_every_request_is(
    llm, plain, monkeypatch
):
    """Its pieces say nothing to us: else they were woven for ever."""
    ours = host(llm)
    front, chunk, back = (prompt_of(160 + n, (n,))[0] for n in (40, 120, 30))
    prompts = core(llm).model_executor.driver_worker.worker.kvweave_connector().prompts
    monkeypatch.setattr(prompts, "on", True)
    monkeypatch.setattr(prompts, "_rows", 128)
    monkeypatch.setattr(
        refine, "SLICE_SECONDS", 1e9
    )  # pieces of many blocks, in which chunks stand
    monkeypatch.setattr(ahead, "QUIET_SECONDS", 0.001)
    monkeypatch.setattr(core(llm).scheduler.connector.scheduling, "matches", True)
    ours.engine.put("matched", chunk)
    ours.cutter.library.sync()
    case = Case([*front, *chunk, *back])
    _, told = answered(llm, case)
    assert told["woven"] and told["reused"] and len(prompts._waiting) == 1
    assert rest(llm, 10.0), "it ends"
    output, told = answered(llm, case)
    assert (told["woven"], told["drift"], told["local"]) == (False, 0, 160), told
    assert off(output, case.expected(plain, None)[0]) < CLOSE


def test_who_asks_comes_before_what_is_prefilled_while_nobody_does():
    asked = []

    async def generate(*of, **how):
        asked.append((of, how))
        yield None

    asyncio.run(plugin._prefilled(SimpleNamespace(generate=generate), [5, 6], "salt"))
    (((prompt, sampling, _), how),) = asked
    assert prompt == {"prompt_token_ids": [5, 6], "cache_salt": "salt"}
    assert sampling.max_tokens == 1 and how["priority"] > 0


def test_where_vllm_caches_no_prefixes_nothing_is_prefilled_for_it(llm, monkeypatch):
    ours = core(llm).scheduler.connector
    config, caches = ours._vllm_config, ours._kv_cache_config
    options = {"refine": True}
    monkeypatch.setattr(config.kv_transfer_config, "kv_connector_extra_config", options)
    assert KVWeaveConnector(config, KVConnectorRole.SCHEDULER, caches).prompts.on
    monkeypatch.setattr(config.cache_config, "enable_prefix_caching", False)
    with pytest.raises(InvalidArgument, match="refine"):
        KVWeaveConnector(config, KVConnectorRole.SCHEDULER, caches)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_vllm_has_exactly_is_not_woven(llm, plain, embedded, strategy):
    seed = 130 + STRATEGIES.index(strategy)
    tokens, parts = prompt_of(seed, (70, 60, 50, 45, 20))
    answered(llm, Case(tokens))
    parts[2] = (True, prompt_of(seed + 50)[0][:50])
    case = Case([t for _, part in parts for t in part], parts, strategy)
    output, told = answered(llm, case)
    assert told["woven"] and told["local"] == 128 and told["exact"] == 128, told
    expected, mine = case.expected(plain, embedded, 128)
    assert off(output, expected) < CLOSE
    assert strategy[0] == "full" or told["repaired"] == mine["repaired"]


def test_a_turn_behind_that_is_repaired_whole_is_not_over_rows_that_were_not(llm, plain, embedded):
    tokens, parts = prompt_of(105, (66, 9, 14, 16, 5))
    _, told = answered(llm, Case(tokens, parts, ("auto", 0.1)))
    assert told["woven"] and told["drift"] is None
    turn = prompt_of(106)[0][:46]
    parts = [*parts[:-1], (False, [*parts[-1][1], *turn])]
    output, told = answered(llm, Case([*tokens, *turn], parts, ("auto", 0.1)))
    exact = Case([*tokens, *turn]).expected(plain, embedded)[0]
    assert told["woven"] and told["drift"] == 0 and off(output, exact) < CLOSE, told


def test_a_weave_that_fails_is_computed_by_vllm(llm, plain, embedded, monkeypatch):
    tokens, parts = prompt_of(110)

    def fails(works):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(host(llm).backend, "forward", fails)
    output, told = answered(llm, Case(tokens, parts, ("none", 0.0)))
    assert not told["woven"] and "no such kernel" in told["failed"]
    assert off(output, Case(tokens).expected(plain, embedded)[0]) < CLOSE
    monkeypatch.undo()
    output, told = answered(llm, Case(tokens, parts, ("none", 0.0)))
    assert not told["woven"] or told["drift"] is None


def test_what_is_not_there_is_told_and_the_answer_is_exact(llm, plain, embedded):
    tokens, _ = prompt_of(120)
    case = Case(tokens)
    case.strategy, case.parts = ("none", 0.0), ()
    case = type("Named", (Case,), {"said": {"parts": [{"chunk": "no/such"}]}})(tokens)
    output, told = answered(llm, case)
    assert told["error"]["code"] == "chunk_not_found" and not told["woven"]
    assert off(output, Case(tokens).expected(plain, embedded)[0]) < CLOSE


@pytest.mark.parametrize("recipe", ["0@3@1", "0@0@1"])
def test_auto_weaves_as_a_calibration_of_the_model_chose(llm, plain, embedded, monkeypatch, recipe):
    tokens, parts = prompt_of(125)
    known = Calibration(host(llm).backend.fingerprint, 0.0, 0, (), recipes=((0.1, recipe),))
    monkeypatch.setattr(host(llm).engine.weaver, "calibration", known)
    output, told = answered(llm, Case(tokens, parts, ("auto", 0.1)))
    expected, mine = Case(tokens, parts, (f"auto:{recipe}", 0.1)).expected(plain, embedded)
    assert told["woven"] and told["drift"] is None
    assert [told[key] for key in ("exact", "repaired")] == [mine["exact"], mine["repaired"]]
    usual = Case(tokens, parts, ("auto", 0.1)).expected(plain, embedded)[0]
    assert off(output, expected) < CLOSE < off(output, usual)
    core(llm).scheduler.reset_prefix_cache()  # of the next recipe nobody is to find these


def test_others_decode_while_a_long_prompt_is_woven(llm):
    tokens, parts = prompt_of(130, (90, 90, 90, 60, 20))
    engine = llm.llm_engine
    engine.add_request("talk", {"prompt_token_ids": tokens[:30]}, Case(tokens, n_new=60).sampling)
    while not (steps := engine.step()) or not steps[0].outputs[0].token_ids:
        pass
    engine.add_request(
        "long", {"prompt_token_ids": tokens}, Case(tokens, parts, ("full", 1.0)).sampling
    )
    talked = 0
    while engine.has_unfinished_requests():
        found = {o.request_id: o for o in engine.step()}
        if "long" in found:
            break
        talked += "talk" in found
    engine.abort_request(["talk"])
    run(llm, [Case([5, 6, 7])])
    assert talked >= 8, (
        "64 rows a step of 350, and chunks before: each step had a token of the other"
    )


def test_requests_that_are_woven_share_the_blocks_of_an_exact_prefix(llm, plain, embedded):
    core(llm).scheduler.reset_prefix_cache()
    engine, manager = llm.llm_engine, core(llm).scheduler.kv_cache_manager
    front, _ = prompt_of(140, (130,))
    cases = []
    for seed in (141, 142):
        back, parts = prompt_of(seed, (50, 40, 20))
        parts = [(True, front), *parts]
        cases.append(Case([*front, *back], parts, ("none", 0.0), n_new=60))
    free, blocks, outputs = n_free(llm), {}, {}
    for name, case in zip("ab", cases, strict=True):
        engine.add_request(name, {"prompt_token_ids": case.tokens}, case.sampling)
        while name not in blocks:
            for output in engine.step():
                blocks[output.request_id] = manager.get_block_ids(output.request_id)[0]
    assert blocks["a"][:4] == blocks["b"][:4] and not {*blocks["a"][4:]} & {*blocks["b"][4:]}
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step() if output.finished}
    told = {name: o.kv_transfer_params["kvweave"] for name, o in outputs.items()}
    assert [told[name]["rows"] for name in "ab"] == [[0, 220], [128, 220]]
    for name, case in zip("ab", cases, strict=True):
        expected, mine = case.expected(plain, embedded)
        assert told[name]["exact"] == mine["exact"] and off(outputs[name], expected) < CLOSE
        exact = Case(case.tokens).expected(plain, embedded)[0]
        assert off(outputs[name], exact) > 20 * CLOSE, "it can see what it looks for"
    output, report = answered(llm, Case([*front, 5, 6, 7]))
    assert report is None and not output.num_cached_tokens, "a plain request finds none of them"
    assert off(output, Case([*front, 5, 6, 7]).expected(plain, embedded)[0]) < CLOSE
    again, report = answered(llm, cases[0])
    assert report["cached"] == 192 + 32 and not report["woven"]
    assert again.outputs[0].token_ids == outputs["a"].outputs[0].token_ids
    assert n_free(llm) == free
