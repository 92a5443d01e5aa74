"""Two tensor-parallel workers of a real vLLM weave what one engine with all heads does."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("vllm", reason="no vLLM here: make setup-vllm, then make test-vllm")

import json
import random
import time

import torch
from transformers import AutoModelForCausalLM
from vllm_requests import CLOSE, Case, checkpoint_at, core, off, run, vllm_of

from kvweave.connect.vllm.ahead import MORE, QUIET_SECONDS
from kvweave.connect.vllm.rest import prefill
from kvweave.run.model import Runner

STRATEGIES = [
    ("none", 0.0), ("full", 1.0), ("first_k", 0.1), ("query", 0.1), ("rollout", 0.1), ("auto", 0.1),
    ("auto:0@3@1", 0.1), ("auto:2@0@1", 0.1),
]  # fmt: skip
pytestmark = pytest.mark.usefixtures("looks")  # at contexts that it would rather repair whole


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return checkpoint_at(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def pair(checkpoint):
    made = vllm_of(
        checkpoint, True, True, tensor_parallel_size=2, distributed_executor_backend="mp"
    )
    yield made
    made.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="module")
def plain(checkpoint):
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)


@pytest.fixture(scope="module")
def embedded(plain):
    return Runner(plain)


def verb(pair, method, path, body=b""):
    """Ask both workers; return what each says."""
    said = (method, path, [("content-type", "application/json")], body)
    begun = pair.collective_rpc("kvweave_begin", args=said)
    replies = [reply for _, reply in begun]
    while None in replies:
        assert replies == [None, None], "one is further than the other"
        replies = pair.collective_rpc("kvweave_go_on", args=(begun[0][0],))
    return [(status, json.loads(content or b"{}")) for status, _, content in replies]


def stored(pair):
    """Return the chunks that both have."""
    (status, first), (_, second) = verb(pair, "GET", "/v1/chunks?limit=1000")
    told = [[(e["id"], e["name"], e["tier"]) for e in listed["data"]] for listed in (first, second)]
    assert status == 200 and told[0] == told[1]
    return told[0]


def ahead(pair):
    """Have both make KV for a slice; return what they say."""
    first, second = pair.collective_rpc("kvweave_ahead")
    assert first == second, "one is further than the other"
    return first


def refine(pair):
    """Have vLLM prefill some of what was woven; return how many pieces it took."""
    for n in range(4):
        time.sleep(2 * QUIET_SECONDS)
        first, second = pair.collective_rpc("kvweave_refine", args=(0.0,))
        assert first == second, "one would have another prompt prefilled"
        if isinstance(first, int):
            return n
        pair.generate(*prefill(*first), use_tqdm=False)
    return 4


def test_two_workers_weave_what_one_engine_does(pair, plain, embedded):
    """Also where canonical KV is made between requests, or would be between their steps, and prompts are
    prefilled between them."""
    rng = random.Random(int(os.environ.get("KVWEAVE_SEED", "1")))
    n_ahead = n_refined = 0
    pool = [[rng.randrange(3, 300) for _ in range(rng.randrange(20, 90))] for _ in range(6)]
    woven, compared, differ, asked = 0, 0, 0, [None, *STRATEGIES]
    for i in range(int(os.environ.get("KVWEAVE_VLLM_PAIRS", "12"))):
        cases = []
        for _ in range(rng.choice([1, 2, 3])):
            strategy = asked[(i + len(cases)) % len(asked)]
            parts = [(rng.random() < 0.8, rng.choice(pool)) for _ in range(rng.randrange(2, 5))]
            parts.append((False, [rng.randrange(3, 300) for _ in range(rng.randrange(2, 30))]))
            tokens = [t for _, part in parts for t in part]
            cases.append(
                Case(tokens, parts, strategy, min(rng.choice([1, 3, 40]), 505 - len(tokens)))
            )
        abort = [(0, rng.randrange(6))] if rng.random() < 0.2 else []
        outputs = run(pair, cases, abort, lambda: rng.random() < 0.3 and ahead(pair))
        if rng.random() < 0.7:
            time.sleep(2 * QUIET_SECONDS)
            before = len(stored(pair))
            while ahead(pair) == MORE:
                pass
            n_ahead += len(stored(pair)) - before
            n_refined += refine(pair)
        for number, output in outputs.items():
            case, told = cases[number], (output.kv_transfer_params or {}).get("kvweave")
            if told and told["woven"]:
                case = case.told(told["spans"])
            expected, mine = case.expected(plain, embedded)
            exact = Case(case.tokens).expected(plain, embedded)[0]
            note = f"{case.strategy} of {len(case.tokens)} tokens: {told}"
            if case.strategy is None or told.get("drift") == 0:
                assert off(output, exact) < CLOSE, note
                continue
            assert told["woven"] or "cached" in told, note
            woven += told["woven"]
            if not told["woven"] or not mine:
                continue
            same = all(told[key] == mine[key] for key in ("exact", "repaired", "reused"))
            if same and told["local"] <= told["exact"] and "weaves" not in told:
                assert off(output, expected) < CLOSE, note
                compared += 1
            differ += off(output, exact) > 20 * CLOSE
    assert min(woven, compared, differ) >= 3 and n_ahead, (woven, compared, differ)
    assert n_refined
    assert len(stored(pair)) >= 4
    assert not core(pair).scheduler.connector.scheduling._requests


def test_verbs_are_done_by_both_workers(pair):
    body = json.dumps({"tokens": list(range(5, 300))}).encode()
    (status, put), other = verb(pair, "PUT", "/v1/chunks/docs/a", body)
    assert status in (200, 201) and other[0] == status and other[1]["id"] == put["id"]
    case = type("Named", (Case,), {"said": {"parts": [{"chunk": "docs/a"}], "repair": "none"}})
    output = run(pair, [case([7, 8, 9, *range(5, 300), 4])])[0]
    told = output.kv_transfer_params["kvweave"]
    assert told["woven"] and told["reused"] == 295
    assert [status for status, _ in verb(pair, "DELETE", "/v1/chunks/docs/a")] == [200, 200]


def test_a_strategy_that_compares_rows_is_refused_with_the_reason(pair, plain, embedded):
    tokens = list(range(5, 200))
    parts = [(True, tokens[:90]), (True, tokens[90:170]), (False, tokens[170:])]
    output = run(pair, [Case(tokens, parts, ("deviation", 0.1))])[0]
    told = output.kv_transfer_params["kvweave"]
    assert "heads of its own" in told["error"]["message"] and not told["woven"]
    assert off(output, Case(tokens).expected(plain, embedded)[0]) < CLOSE
