"""Bounds of the drift inside a real vLLM: calibrated on one text, held against transformers' prefill of another."""

from __future__ import annotations

import os
import subprocess
import sys
from math import comb
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="no vLLM here: make setup-vllm, then make test-vllm")

import random
import sysconfig

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm import LLM, SamplingParams
from vllm_requests import CONNECTOR

import kvweave
from kvweave import Engine
from kvweave.connect.vllm import offline
from kvweave.errors import InvalidArgument, ModelMismatch, ModelUnusable
from kvweave.weave.calibration import Calibration

ROOT = Path(kvweave.__file__).parents[2]
NAME = os.environ.get("KVWEAVE_VLLM_MODEL", "llama-prose")  # or qwen3-bytes
PROSE = ROOT / "bench" / "models" / "weights" / NAME
N = int(os.environ.get("KVWEAVE_VLLM_BOUNDS", "60"))
SEED = int(os.environ.get("KVWEAVE_SEED", "1"))
BOS, REPLY = 1, 16
ROUNDING = 2e-6  # nats: of two kernels that are both exact
pytestmark = [
    pytest.mark.skipif(not PROSE.exists(), reason="only a checkout has the models"),
    pytest.mark.usefixtures("looks"),  # at contexts that it would rather repair whole
]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """Calibrate on this project's own pages, as a user would."""
    made = tmp_path_factory.mktemp("made") / "in-vllm.json"
    texts = [str(path) for path in sorted((ROOT / "docs").glob("*.md"))]
    command = [
        sys.executable, "-m", "kvweave.cli", "calibrate", "--model", str(PROSE), "--text", *texts,
        "--n", "120", "--vllm", '{"dtype": "float32", "max_model_len": 1024}', "--out", str(made),
    ]  # fmt: skip
    found = subprocess.run(command, capture_output=True, text=True, timeout=1500)
    assert found.returncode == 0, found.stderr[-3000:]
    assert "held out" in found.stdout and "auto without options" in found.stdout, found.stdout
    return made


@pytest.fixture(scope="module")
def llm(file):
    options = CONNECTOR["kv_connector_extra_config"] | {"calibration": str(file)}
    made = LLM(
        str(PROSE), enforce_eager=True, dtype="float32", block_size=32, max_model_len=1024,
        max_num_seqs=4, max_logprobs=-1, num_gpu_blocks_override=60,
        worker_cls="kvweave.connect.vllm.worker.KVWeaveWorker",
        kv_transfer_config=CONNECTOR | {"kv_connector_extra_config": options},
    )  # fmt: skip
    yield made
    made.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="module")
def plain():
    return AutoModelForCausalLM.from_pretrained(PROSE, dtype=torch.float32)


@pytest.fixture(scope="module")
def documents():
    """Tokens of another text than what it was calibrated on: programs."""
    tokenizer = AutoTokenizer.from_pretrained(PROSE)
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    files = random.Random(SEED).sample([f for f in files if f.stat().st_size > 6000], 30)
    return [tokenizer(f.read_text(errors="replace")[:20000]).input_ids[1:] for f in files]


def prompt_of(rng, documents):
    """Return a prompt of chunks and a question, and where chunks stand: paragraphs of a document
    of which one is gone, or of any documents."""
    document = rng.choice(documents)
    at = rng.randrange(len(document) - 512)
    chunks = [document[at + i : at + i + 64] for i in range(0, 448, 64)]
    question = document[at + 448 : at + 464]
    if rng.random() < 0.5:
        chunks.pop(rng.randrange(1, 7))
    else:
        chunks = []
        for _ in range(rng.randrange(2, 7)):
            other, n = rng.choice(documents), rng.randrange(20, 100)
            at = rng.randrange(len(other) - n)
            chunks.append(other[at : at + n])
    tokens, parts = [BOS], []
    for chunk in chunks:
        parts.append({"tokens": [len(tokens), len(tokens) + len(chunk)]})
        tokens = tokens + chunk
    return tokens + question, parts


def answered(llm, tokens, said, n_new=REPLY):
    params = None if said is None else {"kv_transfer_params": {"kvweave": said}}
    sampling = SamplingParams(
        max_tokens=n_new, temperature=0, logprobs=-1, detokenize=False, ignore_eos=True,
        extra_args=params,
    )  # fmt: skip
    [output] = llm.generate({"prompt_token_ids": tokens}, sampling, use_tqdm=False)
    return output, (output.kv_transfer_params or {}).get("kvweave")


def drift_of(output, plain):
    """Return the mean KL over an answer of a full prefill's predictions to those it was drawn from."""
    tokens, said = output.prompt_token_ids, output.outputs[0]
    with torch.inference_mode():
        logits = plain(torch.tensor([[*tokens, *said.token_ids[:-1]]])).logits[0]
    right = logits[len(tokens) - 1 :].double().log_softmax(-1)
    mine = torch.full_like(right, float("nan"))
    for row, each in zip(mine, said.logprobs, strict=True):
        for token, p in each.items():
            row[token] = p.logprob
    assert not mine.isnan().any()
    return float((right.exp() * (right - mine.log_softmax(-1))).sum(-1).mean())


def most_misses(n):
    """Return how many of ``n`` bounds may fail, each with one chance in twenty, but once in 1,000."""
    total = 0.0
    for k in range(n + 1):
        total += comb(n, k) * 0.05**k * 0.95 ** (n - k)
        if total > 0.999:
            return k
    return n


def test_random_answers_stay_under_their_bounds(llm, plain, documents):
    rng, found, kinds, recent = random.Random(SEED), [], [], []
    for i in range(N):
        tokens, parts = prompt_of(rng, documents)
        said = {"parts": parts, "repair": "auto", "share": rng.choice([0.05, 0.15, 0.3])}
        if rng.random() < 0.5:
            said["max_drift"] = rng.choice([0.005, 0.02, 0.1])
        kind = rng.choice(["new", "new", "new", "plain", "again", "turn"])
        if kind == "plain":  # vLLM has exact rows in front
            answered(llm, tokens[: rng.randrange(40, len(tokens))], None, 1)
        elif recent and kind != "new":
            old, tokens, said = rng.choice(recent)
            if kind == "turn":  # the conversation goes on
                tokens = [*tokens, *old.outputs[0].token_ids, *rng.choice(documents)[:9]]
        output, told = answered(llm, tokens, said)
        recent = [*recent, (output, tokens, said)][-4:]
        kl, most = drift_of(output, plain), said.get("max_drift")
        note = f"{kind}, {said}, {told}: {kl}, seed {SEED} at {i}"
        assert kl > -ROUNDING and (most is None or "error" not in told), note
        if told.get("drift") is None:
            assert most is None or ("failed" in told and kl < ROUNDING), note
            kinds.append((kind, "failed" if "failed" in told else "unknown"))
            continue
        assert most is None or told["drift"] <= most, note
        assert told["drift"] > 0 or kl < ROUNDING, f"said to be exact: {note}"
        if told["drift"]:
            assert told["drift_by"] == "calibration", note
            if kind != "again":  # the same answer is no further sample of the promise
                found.append((kl, told["drift"]))
            kinds.append((kind, "woven" if told["woven"] else "found"))
    under = lambda part: sum(kl <= part * bound + ROUNDING for kl, bound in found)  # noqa: E731
    told = f"{len(found)} of {N} bounded, {under(1)} under, {under(0.1)} under a tenth, {sorted(set(kinds))}"
    assert len(found) > N / 3, told
    assert len(found) - under(1) <= most_misses(len(found)), told
    assert len(found) - under(0.1) > most_misses(len(found)), (
        f"it can see what it looks for: {told}"
    )
    assert {("again", "found"), ("turn", "unknown"), ("plain", "woven")} <= set(kinds), told
    print(told)


def test_a_calibration_is_of_the_model_as_vllm_has_it(file):
    made = Calibration.load(file)
    assert made.source == "text" and made.starts() == [0.05, 0.15, 0.3]
    assert [share for share, _ in made.recipes] == made.starts()
    assert len({recipe for _, recipe in made.recipes}) == 1, "bounds go on from share to share"
    with pytest.raises(ModelMismatch, match="weights"):
        Engine(PROSE, calibration=str(file), dtype="float32")


@pytest.mark.parametrize(
    ("free", "options", "taken"),
    [
        (10, {}, {"gpu_memory_utilization": 0.5}),
        (16, {}, {"gpu_memory_utilization": 0.8}),
        (10, {"gpu_memory_utilization": 0.7}, {}),
        (10, {"kv_cache_memory_bytes": 7}, {}),
    ],
)
def test_vllm_takes_no_more_memory_than_is_free(monkeypatch, free, options, taken):
    node = SimpleNamespace(total_memory=16, available_memory=free)
    monkeypatch.setattr("vllm.utils.cpu_resource_utils.get_memory_node_info", lambda _: node)
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    assert offline._room(options) == taken
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    assert offline._room(options) == {}


def test_several_workers_are_refused_before_anything_is_loaded():
    with (
        pytest.raises(InvalidArgument, match="heads"),
        offline.loaded(str(PROSE), {"tensor_parallel_size": 2}),
    ):
        pass
    with pytest.raises(ModelUnusable) as failed, offline.loaded("/nowhere", {"dtype": "float32"}):
        pass
    assert "--vllm" in failed.value.hint and "vLLM says" in failed.value.message
