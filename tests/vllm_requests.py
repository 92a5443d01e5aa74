"""Requests of a real vLLM in this process, and what models that know nothing of it say; for tests that have vLLM."""

from __future__ import annotations

import os
from itertools import accumulate

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several workers on one node of memory
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from vllm import LLM, SamplingParams

from kvweave import Engine

BLOCKS = 18  # of 32 tokens: few enough that requests are preempted, and blocks evicted
CLOSE = 2e-4
STRATEGIES = [
    ("none", 0.0), ("full", 1.0), ("first_k", 0.1), ("query", 0.1), ("auto", 0.1), ("auto:0@3@1", 0.1),
    ("auto:2@0@1", 0.1),
]  # fmt: skip
CONNECTOR = {
    "kv_connector": "KVWeaveConnector",
    "kv_connector_module_path": "kvweave.connect.vllm.connector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"max_rows": 64, "budget": "64MiB"},
}


def checkpoint_at(where):
    """Save a tiny model; return where."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=300, hidden_size=128, intermediate_size=128, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=1024,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return saved(Qwen3ForCausalLM(config), where)


def saved(model, where):
    """Save a model with weights that tell rows apart; return where."""
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.08)
    model.save_pretrained(where)
    return str(where)


def vllm_of(checkpoint, ahead=False, refine=False, **more):
    """Return a vLLM with few blocks, which weaves."""
    options = CONNECTOR["kv_connector_extra_config"] | {"ahead": ahead, "refine": refine}
    transfer = CONNECTOR | {"kv_connector_extra_config": options}
    return LLM(
        checkpoint, skip_tokenizer_init=True, enforce_eager=True, dtype="float32", block_size=32,
        max_model_len=512, max_num_seqs=4, max_num_batched_tokens=128, enable_prefix_caching=True,
        num_gpu_blocks_override=BLOCKS, worker_cls="kvweave.connect.vllm.worker.KVWeaveWorker",
        kv_transfer_config=transfer, **more,
    )  # fmt: skip


def core(llm):
    return llm.llm_engine.engine_core.engine_core


class Case:
    """One request, and what it should predict."""

    def __init__(self, tokens, parts=(), strategy=None, n_new=1):
        self.tokens, self.parts, self.strategy, self.n_new = tokens, parts, strategy, n_new

    @property
    def said(self):
        if self.strategy is None:
            return None
        at, found = 0, []
        for is_chunk, tokens in self.parts:
            found += [{"tokens": [at, at + len(tokens)]}] if is_chunk else []
            at += len(tokens)
        repair, share = self.strategy
        return {"parts": found, "repair": repair, "share": share}

    def told(self, spans):
        """Return it with those parts as text that a weave says were."""
        new = {s["position"] for s in spans if s["part"] == "new"}
        ends = list(accumulate(len(tokens) for _, tokens in self.parts))
        starts = [end - len(tokens) for end, (_, tokens) in zip(ends, self.parts, strict=True)]
        parts = [
            (is_chunk and at not in new, tokens)
            for at, (is_chunk, tokens) in zip(starts, self.parts, strict=True)
        ]
        return Case(self.tokens, parts, self.strategy, self.n_new)

    @property
    def sampling(self):
        extra = None if self.said is None else {"kv_transfer_params": {"kvweave": self.said}}
        return SamplingParams(
            max_tokens=self.n_new, temperature=0, logprobs=5, detokenize=False, ignore_eos=True,
            extra_args=extra,
        )  # fmt: skip

    def expected(self, plain, embedded, front=0):
        """Log-probabilities [vocab] of the next token, and the plan of the embedded engine's weave, whose
        first ``front`` rows were computed before."""
        if self.strategy is None or self.strategy[0] == "full":
            with torch.inference_mode():
                logits = plain(torch.tensor([self.tokens])).logits[0, -1]
            return logits.log_softmax(-1), {}
        repair, share = self.strategy
        with Engine(embedded, repair=repair, share=share, max_rows=64) as engine:
            context, at = engine.context("asked"), 0
            if front:
                context.append(self.tokens[:front])
                context.weave()
            with context.edit():
                for i, (is_chunk, tokens) in enumerate(self.parts):
                    gone = min(len(tokens), max(0, front - at))
                    at += len(tokens)
                    if is_chunk:
                        engine.put(f"c{i}", tokens)
                    if is_chunk and gone < len(tokens):
                        context.append_slice(f"c{i}", gone, len(tokens))
                    elif gone < len(tokens):
                        context.append(tokens[gone:])
            answer = context.generate(1, ignore_eos=True, logprobs=10)
        found = torch.full((300,), float("nan"))
        choice = answer.choices[0]
        for token, logprob in [(choice.token, choice.logprob), *choice.top]:
            found[token] = logprob
        return found, answer.plan.to_dict()


def off(output, expected):
    """The largest difference of the first token's likeliest log-probabilities."""
    found = output.outputs[0].logprobs[0]
    return max(abs(p.logprob - float(expected[t])) for t, p in found.items() if p.rank <= 5)


def run(llm, cases, abort=(), between=lambda: None):
    """Run requests together; return their outputs by number. Some are aborted after some steps;
    ``between`` is called behind each step."""
    engine, outputs = llm.llm_engine, {}
    for i, case in enumerate(cases):
        prompt = {"prompt_token_ids": case.tokens}
        engine.add_request(str(i), prompt, case.sampling)
    aborts, step = dict(abort), 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                outputs[int(output.request_id)] = output
        gone = [i for i, at in aborts.items() if at == step and i not in outputs]
        if gone:
            engine.abort_request([str(i) for i in gone])
        step += 1
        between()
    return outputs
