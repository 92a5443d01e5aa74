"""What vLLM's `LLM` has done while nobody asks, where no server looks after it."""

from __future__ import annotations

import time
from typing import Any

from vllm import SamplingParams
from vllm.inputs import TokensPrompt

from kvweave.connect.vllm.ahead import DONE, LATER, QUIET_SECONDS
from kvweave.connect.vllm.content import PARAMS
from kvweave.connect.vllm.spec import KEY


def rest(llm: Any, seconds: float = float("inf")) -> bool:
    """Make what requests may need, for so many ``seconds`` or until nothing is left: canonical KV of chunks
    that they named (``ahead``), and exact rows of prompts that were answered over approximate ones
    (``refine``). Return whether nothing is left that there is room for."""
    until, took = time.perf_counter() + seconds, 0.0
    while time.perf_counter() < until:
        said = llm.collective_rpc("kvweave_ahead")[0]
        if said == DONE:
            said = llm.collective_rpc("kvweave_refine", args=(took,))[0]
        took = 0.0
        if said == DONE:
            return True
        if said == LATER:
            time.sleep(QUIET_SECONDS)
        elif not isinstance(said, int):
            start = time.perf_counter()
            llm.generate(*prefill(*said), use_tqdm=False)
            took = time.perf_counter() - start
    return False


def prefill(tokens: list[int], salt: str | None) -> tuple[TokensPrompt, SamplingParams]:
    """Return a request by which vLLM has the rows of these tokens, woven by nobody, and the least that it
    may be asked for."""
    prompt = TokensPrompt(prompt_token_ids=tokens)
    if salt is not None:
        prompt["cache_salt"] = salt
    said = {PARAMS: {KEY: {"match": False}}}
    return prompt, SamplingParams(max_tokens=1, temperature=0, detokenize=False, extra_args=said)
