"""Models that vLLM has no code for are run by transformers' inside it: they are woven like any other.

Needs vLLM: `make setup-vllm`, then `make test-vllm`.
"""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="no vLLM here: make setup-vllm, then make test-vllm")

import random

import torch
from transformers import (
    AutoModelForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
)
from vllm_requests import CLOSE, Case, core, off, run, saved, vllm_of

from kvweave.connect.vllm import look
from kvweave.errors import CannotMove
from kvweave.run.model import Runner

COMMON = {
    "vocab_size": 300, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 3,
    "num_attention_heads": 4, "max_position_embeddings": 1024, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
pytestmark = pytest.mark.usefixtures("looks")  # at contexts that it would rather repair whole


def neox():
    rope = {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.25}
    return GPTNeoXForCausalLM(GPTNeoXConfig(**COMMON, rope_parameters=rope))


def olmo2():
    return Olmo2ForCausalLM(Olmo2Config(**COMMON, num_key_value_heads=2))


@pytest.mark.parametrize("build", [neox, olmo2])
def test_it_is_woven_as_the_embedded_engine_does(build, tmp_path):
    torch.manual_seed(0)
    checkpoint, rng = saved(build(), tmp_path / "model"), random.Random(4)
    plain = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    embedded, cases = Runner(plain), []
    for strategy in (None, ("none", 0.0), ("full", 1.0), ("query", 0.1), ("auto", 0.1)):
        sizes = enumerate((50, 40, 60, 20))
        parts = [(i < 3, [rng.randrange(3, 300) for _ in range(n)]) for i, n in sizes]
        tokens = [t for _, part in parts for t in part]
        case, exact = Case(tokens, parts, strategy), Case(tokens).expected(plain, embedded)[0]
        cases.append((case, exact, *case.expected(plain, embedded)))
    # from here on the classes of transformers' models are changed, for good
    llm = vllm_of(checkpoint)
    try:
        model = core(llm).model_executor.driver_worker.worker.model_runner.get_model()
        assert type(model).__name__ == "TransformersForCausalLM"
        for case, exact, expected, mine in cases:
            output = run(llm, [case])[0]
            told = (output.kv_transfer_params or {}).get("kvweave")
            assert off(output, expected) < CLOSE, f"{case.strategy}: {told}"
            if mine:
                assert told["woven"]
                assert all(told[n] == mine[n] for n in ("exact", "repaired", "reused"))
                assert off(output, exact) > 20 * CLOSE, "it can see what it looks for"
    finally:
        llm.llm_engine.engine_core.shutdown()


@pytest.mark.parametrize(
    "change", [{"rope_type": "dynamic"}, {"attention_scaling": 1.2}, {"another": True}]
)
def test_what_does_not_turn_evenly_is_refused(change):
    def rotary():
        made = torch.nn.Module()
        made.inv_freq, made.attention_scaling, made.rope_type = torch.ones(8), 1.0, "default"
        return made

    modules = {"a": rotary(), "a.again": (first := rotary())}
    modules["a"] = first
    assert look._of_transformers(modules).width == 16 and look._of_transformers({}) is look.STATIC
    for name, value in change.items():
        if name == "another":
            modules["b"] = rotary()
        else:
            setattr(first, name, value)
    with pytest.raises(CannotMove, match="scales what it turns, or not all layers alike"):
        look._of_transformers(modules)
