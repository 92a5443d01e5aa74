"""Seconds to the first token of the request that brings an edit, where the server knew of it before.

An agent's loop of calls over ``/v1/messages`` of a real server, with ``clear_tool_uses`` declared. A prompt
of about ``most`` tokens is answered by a call; then there is time to rest, as while a tool runs; then its
result comes, and the rule clears old ones. In each round all ways take their turn, each in a namespace
of its own: `unedited` declares no rule, `asked` has the edit made when it is asked for, `ahead` before
that, and `missed` declares the rule, so that the edit is made ahead, and takes it back.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
import transformers
from common import SEED, Pair, took
from starlette.testclient import TestClient

from kvweave import Engine, Runner
from kvweave.demo.vocabulary import FILLER
from kvweave.run import loop
from kvweave.run.sample import Choice, Sampler, sample
from kvweave.serve.app import create_app
from kvweave.serve.options import Options

WAYS = ("unedited", "asked", "ahead", "missed")
USES, KEEP = 5, 3
RULE = {
    "type": "clear_tool_uses_20250919",
    "trigger": {"type": "tool_uses", "value": USES},
    "keep": {"type": "tool_uses", "value": KEEP},
}
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
    "{% for c in m.get('tool_calls', []) %}{{ '\n<tool_call>\n' }}{{ c['function'] | tojson }}"
    "{{ '\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}{# tools #}"
)
BUNDLED = Path(__file__).resolve().parents[2] / "src" / "kvweave" / "demo" / "model"


def words_and_marks() -> Any:
    """Return the bundled model's tokenizer with the marks of `TEMPLATE`."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(BUNDLED)
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    tokenizer.chat_template, tokenizer.eos_token = TEMPLATE, "<|im_end|>"
    return tokenizer


class AheadEvents:
    """Measures rounds on one server."""

    ways: Sequence[str] = WAYS
    words = FILLER

    def __init__(self, pair: Pair, most: int) -> None:
        tokenizer = words_and_marks()
        assert len(tokenizer) <= pair.shape.vocab
        self.end = tokenizer.convert_tokens_to_ids("<|im_end|>")
        pair.plain.generation_config.eos_token_id = self.end
        self.runner = Runner(pair.plain, tokenizer, name="random")
        self.tokenizer, self.device = tokenizer, pair.device
        self.n_words = max(16, (most - 150) // (USES + 1))
        self._forced: deque[int] = deque()

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Serve, and have answers begin with what is forced."""
        engine = Engine(self.runner, budget="64GiB", refine="chats")  # repair: the default
        keys = {f"key-of-{way}": way for way in self.ways}
        app = create_app(engine, Options(keys=keys, tool_parser="hermes", any_model=True))
        self.state = app.state.kvweave
        with mock.patch.object(loop, "sample", self._sample), engine:
            with TestClient(app, "http://localhost") as self.client:
                yield

    def of(self, number: int) -> dict[str, Any]:
        """Return seconds of the clock and of CPUs by way, and what each answer says of its tokens."""
        found: dict[str, Any] = {}
        for at in range(len(WAYS)):
            way = WAYS[(number + at) % len(WAYS)]
            found[way] = self._way(way, random.Random(SEED + number))
        first = {way: found[way] for way in WAYS}
        return {
            "seconds": {way: round(one["seconds"], 4) for way, one in first.items()},
            "cpu": {way: round(one["cpu"], 4) for way, one in first.items()},
            "rest": {way: round(one["rest"], 4) for way, one in first.items()},
            "kv": {way: one["kv"] for way, one in first.items()},
            "cleared": {way: one["cleared"] for way, one in first.items()},
        }

    def _way(self, way: str, words: random.Random) -> dict[str, Any]:
        system = " ".join(words.choice(FILLER) for _ in range(64))
        messages: list[dict[str, Any]] = [{"role": "user", "content": "look at all of it ."}]
        for i in range(USES - 1):
            call = {"type": "tool_use", "id": f"u{i}", "name": "look", "input": {"at": str(i)}}
            messages.append({"role": "assistant", "content": [call]})
            messages.append(self._result(call, words))
        self.state.anticipating.enabled = way in ("ahead", "missed")
        edits = [RULE] if way != "unedited" else []
        # two calls, so that the rule holds from the next request on
        first = self._ask(way, messages, system, edits, calls=2)
        messages.append({"role": "assistant", "content": first["content"]})
        calls = [block for block in first["content"] if block["type"] == "tool_use"]
        results = [self._result(call, words)["content"][0] for call in calls]
        messages.append({"role": "user", "content": results})
        rest, _ = took(self._rest, self.device)
        edits = edits if way != "missed" else []
        answers: list[dict[str, Any]] = []
        clock, cpu = took(
            lambda: answers.append(self._ask(way, messages, system, edits)), self.device
        )
        self._rest()
        applied = (answers[0].get("context_management") or {}).get("applied_edits") or []
        return {
            "seconds": clock, "cpu": cpu, "rest": rest, "kv": answers[0]["usage"]["kv"],
            "cleared": sum(edit["cleared_tool_uses"] for edit in applied),
        }  # fmt: skip

    def _result(self, call: dict[str, Any], words: random.Random) -> dict[str, Any]:
        text = " ".join(words.choice(FILLER) for _ in range(self.n_words))
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": text}
        return {"role": "user", "content": [result]}

    def _ask(
        self, way: str, messages: Sequence[Any], system: str, edits: Sequence[Any], calls: int = 0
    ) -> dict[str, Any]:
        one = '<tool_call>\n{"name": "look", "arguments": {"at": "so"}}\n</tool_call>'
        if calls:
            self.force([one] * calls)
        body = {
            "model": "random", "messages": messages, "system": system, "temperature": 0,
            "max_tokens": 200 if calls else 1, "context_management": {"edits": edits},
            "tools": [{"name": "look", "input_schema": {"type": "object"}}],
        }  # fmt: skip
        reply = self.client.post("/v1/messages", json=body, headers={"x-api-key": f"key-of-{way}"})
        made: dict[str, Any] = reply.raise_for_status().json()
        assert made["stop_reason"] == ("tool_use" if calls else "max_tokens")
        return made

    def force(self, calls: Sequence[str]) -> None:
        """Have the next answer be these calls."""
        ids = self.tokenizer.encode("\n".join(calls), add_special_tokens=False)
        self._forced = deque([*ids, self.end])

    def _rest(self) -> None:
        """Wait until there is nothing left to do while nobody asks."""
        driver = self.state.driver
        while driver.stats()["later"] or driver.stats()["active"] or driver.audits.is_due():
            time.sleep(0.002)

    def _sample(self, logits: torch.Tensor, samplers: list[Sampler]) -> list[Choice | Exception]:
        if self._forced:
            return [Choice(self._forced.popleft(), 0.0, ())]
        return sample(logits, samplers)


def measured(pair: Pair, most: int, n: int, step: Callable[[str], None]) -> dict[str, Any]:
    """Return ``n`` rounds, and the medians of the ratios in each."""
    bench, found = AheadEvents(pair, most), []
    with bench.serving():
        whole, bench.n_words = bench.n_words, 16
        bench.of(n)  # warms up
        bench.n_words = whole
        for number in range(n):
            found.append(bench.of(number))
            step(f"round {number}")
    assert all(e["cleared"]["ahead"] == e["cleared"]["asked"] > 0 for e in found)
    return {"context": most, "events": found} | {
        f"{unit}_of_unedited": {
            way: [round(f(e[unit][way] / e[unit]["unedited"] for e in found), 4) for f in (median, min, max)]
            for way in WAYS[1:]
        }
        for unit in ("seconds", "cpu")
    }  # fmt: skip
