"""Time to first token inside vLLM: full prefill, its prefix caching, and chunks woven by kvweave.

One vLLM, the same prompts: a system message, 24 turns of varied lengths, a question; each round
edits the turns in four ways (one goes and one comes, all shuffled, one in the middle replaced, the
question and its answer become a turn behind an edit) and asks after each. Ratios are of CPU seconds of the process, which with one thread (`--threads 1`) are what the work
takes when nothing else runs; of two, one waits busily for the other. Cases are interleaved, and each has its own salt and namespace, so that none finds another's
blocks or chunks. All requests declare their turns. Between two of them nobody asks for anything, as where
somebody reads or a tool runs, and vLLM makes the canonical KV of new turns (`ahead`); what that takes is told
apart, as it is no part of a first token; in one case it prefills what was woven, too (`refine`). With `--no-ahead` requests make it themselves, and the first
ones declare nothing, or they would be woven. `embedded` is kvweave without vLLM, which stores new turns within
the request that brings them. A second vLLM, without the connector, says what it costs a plain request.

    .venv-vllm/bin/python bench/in_vllm.py
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")

import numpy as np
import torch
from common import (
    Shape,
    compare,
    machine,
    median,
    model_pair,
    parser,
    progress,
    random_ids,
    report,
    shape_of,
    table,
    took,
    turn_sizes,
)
from vllm import LLM, SamplingParams

from kvweave import Engine
from kvweave.connect.vllm.rest import rest

CONNECTOR = {
    "kv_connector": "KVWeaveConnector",
    "kv_connector_module_path": "kvweave.connect.vllm.connector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
CASES: dict[str, dict[str, Any] | None] = {
    "full": None,
    "prefix": None,
    "none": {"repair": "none"},
    "first_k 5 %": {"repair": "first_k", "share": 0.05},
    "first_k 15 %": {"repair": "first_k", "share": 0.15},
    "auto 5 %": {"repair": "auto", "share": 0.05},
    "embedded auto 5 %": None,
}
# where somebody rests, what was woven is prefilled too: told where turns follow that edit nothing
RESTED = "auto 5 % refined"
SYSTEM, QUESTION, ANSWER = 64, 32, 128
ROOM = 1024  # tokens by which a conversation may grow
Times = tuple[float, float]  # seconds of the clock, and of the process's CPUs


class Conversation:
    """Turns that are edited; each round's prompt, and where its parts stand."""

    def __init__(self, n: int, n_turns: int, vocab: int, number: int = 0) -> None:
        self.vocab, self.rng = vocab, np.random.default_rng(number)
        self._n_edits = 0
        self._seed = 1000  # of the system message, the same in all of them
        self.system = self._new(SYSTEM)
        self._seed += 100_000 * number
        self.turns = [self._new(size) for size in turn_sizes(n - SYSTEM - QUESTION, n_turns)]
        self.question = self._new(QUESTION)

    def _new(self, n: int) -> list[int]:
        self._seed += 1
        return [1 + t for t in random_ids(n, self.vocab - 2, self._seed)]

    def edit(self, kind: str) -> None:
        """Change the turns as ``kind`` says, and ask anew."""
        turns, before, self.question = self.turns, self.question, self._new(QUESTION)
        middle = len(turns) // 2
        self._n_edits += 1
        if kind == "minus 1 plus 1":
            gone = turns.pop(int(self.rng.integers(1, middle)))
            turns.append(self._new(len(gone)))
        elif kind == "grows" and self._n_edits > 1:
            turns.append([*before, *self._new(ANSWER)])
        elif kind == "grows":
            turns.pop(middle // 2)
        elif kind == "shuffled":
            self.turns = [turns[i] for i in self.rng.permutation(len(turns))]
        else:
            turns[middle] = self._new(len(turns[middle]))

    @property
    def tokens(self) -> list[int]:
        return [t for part in (self.system, *self.turns, self.question) for t in part]

    @property
    def parts(self) -> list[dict[str, list[int]]]:
        """The ranges of the turns, as a request declares them."""
        at, found = SYSTEM, []
        for turn in self.turns:
            found.append({"tokens": [at, at + len(turn)]})
            at += len(turn)
        return found


def serve(model: str, options: argparse.Namespace, *, weaves: bool) -> LLM:
    """Return a vLLM, with or without the connector."""
    more: dict[str, Any] = {}
    if weaves:
        more["worker_cls"] = "kvweave.connect.vllm.worker.KVWeaveWorker"
        ours = {"budget": "8GiB", "ahead": not options.no_ahead, "refine": True}
        more["kv_transfer_config"] = CONNECTOR | {"kv_connector_extra_config": ours}
    return LLM(
        model, skip_tokenizer_init=True, enforce_eager=True, dtype=options.dtype, block_size=32,
        max_model_len=options.context + ROOM, max_num_seqs=8, enable_prefix_caching=True, seed=0,
        max_num_batched_tokens=2048, **more,
    )  # fmt: skip


def first_token(
    llm: LLM, tokens: Sequence[int], salt: str, said: dict[str, Any] | None = None
) -> tuple[Times, dict[str, Any]]:
    """Return how long the first token took, and what the response says of its weave."""
    extra = None if said is None else {"kv_transfer_params": {"kvweave": said}}
    sampling = SamplingParams(max_tokens=1, temperature=0, detokenize=False, extra_args=extra)
    prompt: Any = {"prompt_token_ids": list(tokens), "cache_salt": salt}
    told: dict[str, Any] = {}

    def ask() -> None:
        found = llm.generate([prompt], sampling, use_tqdm=False)[0]
        told.update((found.kv_transfer_params or {}).get("kvweave", {}))

    found = took(ask, torch.device("cpu"))
    if "error" in told:
        raise ValueError(f"vLLM computed what was to be woven: {told['error']}")
    return found, told


def idle(llm: LLM) -> float:
    """Let vLLM have nothing to do until nothing is left; return the CPU seconds of it."""
    start = time.process_time()
    rest(llm)
    return time.process_time() - start


def _refines(worker: Any, on: bool) -> None:
    worker.kvweave_connector().prompts.on = on


def cases_of(kind: str) -> dict[str, dict[str, Any] | None]:
    """Return the cases of a kind of edits."""
    return CASES | ({RESTED: CASES["auto 5 %"]} if kind == "grows" else {})


def space(case: str) -> str:
    """Return the namespace of a case."""
    return case.replace(" ", "-").replace("%", "percent")


def embedded(engine: Engine, talk: Conversation, ids: dict[tuple[int, ...], str]) -> Times:
    """Return how long the first token takes in kvweave alone; new chunks are stored within."""

    def ask() -> None:
        for turn in talk.turns:
            if tuple(turn) not in ids:
                ids[tuple(turn)] = name = f"turn-{len(ids)}"
                engine.put(name, turn, replace=True)
        context = engine.context("asked")
        with context.edit():
            for turn in talk.turns:
                context.append_chunk(ids[tuple(turn)])
            context.append(talk.question)
        context.generate(1)

    found = took(ask, torch.device("cpu"))
    engine.close_context("asked")
    return found


def edited(llm: LLM, engine: Engine, options: argparse.Namespace, vocab: int) -> dict[str, Any]:
    """Time all cases behind each kind of edit, each of a conversation of its own.

    At first a case's conversation was computed as it grew: all of it stands in its prefix cache. Its first
    edit, which without `ahead` makes the canonical KV of the chunks behind it, is told apart.
    """
    kinds = options.kinds.split(",")
    cases = {kind: cases_of(kind) for kind in kinds}
    times: dict[str, dict[str, list[Times]]] = {k: {case: [] for case in cases[k]} for k in kinds}
    first: dict[str, dict[str, float]] = {kind: {} for kind in kinds}
    reports: dict[str, dict[str, Any]] = {kind: {} for kind in kinds}
    ahead: dict[str, dict[str, list[float]]] = {k: {c: [] for c in cases[k]} for k in kinds}
    n_steps = sum((2 + options.rounds) * len(each) - 1 for each in cases.values())
    with progress("edits", n_steps) as step:
        for n, kind in enumerate(kinds):
            talk = Conversation(options.context, options.turns, vocab, n)
            ids: dict[tuple[int, ...], str] = {}
            for i in range(2 + options.rounds):
                if i:
                    talk.edit(kind)
                for case, said in cases[kind].items():
                    if not i and case == "full":
                        continue
                    if case.startswith("embedded"):
                        found, told = embedded(engine, talk, ids), {}
                    else:
                        salt = f"{kind} {case}" + (f" {i}" if case == "full" else "")
                        mine = {"system": SYSTEM, "parts": talk.parts, "namespace": space(case)}
                        said = {**said, **mine} if said and (i or not options.no_ahead) else None
                        llm.collective_rpc(_refines, args=(case == RESTED,))
                        found, told = first_token(llm, talk.tokens, salt, said)
                        ahead[kind][case].append(round(idle(llm), 4))
                    if i == 1:
                        first[kind][case] = round(found[1], 4)
                    elif i:
                        times[kind][case].append(found)
                        reports[kind][case] = told
                    step(f"{kind}: {case}")
    made: dict[str, Any] = {}
    for kind in kinds:
        cpu = {case: [each[1] for each in found] for case, found in times[kind].items()}
        made[kind] = {
            "seconds": {case: median(each) for case, each in cpu.items()},
            "times": {case: [round(t, 4) for t in each] for case, each in cpu.items()},
            "first": first[kind],
            "ahead": {case: each for case, each in ahead[kind].items() if any(each)},
            "wall": {c: [round(each[0], 4) for each in found] for c, found in times[kind].items()},
            "x_full": {c: compare(cpu["full"], each) for c, each in cpu.items()},
            "x_prefix": {c: compare(cpu["prefix"], each) for c, each in cpu.items()},
            "repaired": {c: r.get("repaired") for c, r in reports[kind].items() if r},
        }
    return made


def one_plain(llm: LLM, vocab: int) -> dict[str, Any]:
    """Return seconds, hits and logprobs of plain requests over an empty cache."""
    prompts = [random_ids(n, vocab, i) for i, n in enumerate((200, 90, 310, 40, 150, 260) * 2)]
    prompts += [p + random_ids(30, vocab, 99) for p in prompts]  # these find the others' blocks
    sampling = SamplingParams(max_tokens=16, temperature=0, logprobs=5, detokenize=False)
    asked: Any = [{"prompt_token_ids": p} for p in prompts]
    llm.reset_prefix_cache()
    start = time.process_time()
    outs = llm.generate(asked, sampling, use_tqdm=False)
    took = time.process_time() - start
    said = [
        [sorted((t, p.logprob) for t, p in at.items()) for at in o.outputs[0].logprobs]
        for o in outs
    ]
    return {"s": took, "hits": [o.num_cached_tokens for o in outs], "said": said}


def plain(model: str, options: argparse.Namespace, vocab: int) -> dict[str, Any]:
    """Compare plain requests with and without the connector, in turns: one vLLM a process."""
    times: dict[bool, list[float]] = {False: [], True: []}
    same = {"said": True, "hits": True}
    command = [sys.executable, __file__, *(["--no-ahead"] if options.no_ahead else [])]
    for name in ("dtype", "context", "threads"):
        command += [f"--{name}", str(getattr(options, name))]
    servers = {}
    for weaves in (False, True):
        more = ["--plain", model, str(vocab)] + (["--weaves"] if weaves else [])
        servers[weaves] = subprocess.Popen(
            command + more, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
    try:
        for i in range(2 * options.rounds + 1):
            found = {}
            for weaves, server in servers.items():
                assert server.stdin is not None and server.stdout is not None
                print("go", file=server.stdin, flush=True)
                while not (line := server.stdout.readline()).startswith("{"):
                    assert line, "a vLLM has ended"
                found[weaves] = json.loads(line)
                if i:
                    times[weaves].append(found[weaves]["s"])
            for what in same:
                same[what] &= found[False][what] == found[True][what]
    finally:
        for server in servers.values():
            server.kill()
            server.wait()
    return {
        "bit_equal": same["said"],
        "hits_equal": same["hits"],
        "seconds": {"without": median(times[False]), "with": median(times[True])},
        "with_over_without": compare(times[True], times[False]),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse, measure, report."""
    made = parser(__doc__, context=4096, rounds=5)
    made.add_argument("--turns", type=int, default=24)
    made.add_argument("--kinds", default="minus 1 plus 1,shuffled,replaced,grows")
    made.add_argument("--no-ahead", action="store_true", help="requests make the KV of new turns")
    made.add_argument("--no-plain", action="store_true", help="leave out the second vLLM")
    made.add_argument("--quick", action="store_true", help="tiny: does it run?")
    made.add_argument("--plain", nargs=2, help=argparse.SUPPRESS)  # model and words of a child
    made.add_argument("--weaves", action="store_true", help=argparse.SUPPRESS)
    options = made.parse_args(arguments)
    torch.set_num_threads(options.threads)
    if options.plain:
        llm = serve(options.plain[0], options, weaves=options.weaves)
        for _ in sys.stdin:
            print(json.dumps(one_plain(llm, int(options.plain[1]))), flush=True)
        return
    shape = shape_of(options)
    if options.quick:
        shape = Shape(layers=2, hidden=128, heads=4, kv_heads=2, head_dim=32, ffn=128, vocab=512)
        options.context, options.turns, options.rounds = 512, 6, 1
    pair = model_pair(shape, options.dtype, "cpu", options.context + ROOM)
    with tempfile.TemporaryDirectory() as where:
        pair.plain.save_pretrained(Path(where) / "model")
        model = str(Path(where) / "model")
        found: dict[str, Any] = {}
        if not options.no_plain:
            found["plain"] = plain(model, options, shape.vocab)
        llm = serve(model, options, weaves=True)
        system = Conversation(options.context, options.turns, shape.vocab).system
        engine = Engine(pair.runner, base=system, budget="8GiB", repair="auto", share=0.05)  # type: ignore[arg-type]
        found["edits"] = edited(llm, engine, options, shape.vocab)
        engine.close()
    rows = [
        [
            kind,
            case,
            at["seconds"][case],
            at["x_full"][case]["median"],
            at["x_prefix"][case]["median"],
        ]
        for kind, at in found["edits"].items()
        for case in at["seconds"]
    ]
    result = {
        "machine": machine(torch.device("cpu")),
        "options": {k: str(v) for k, v in vars(options).items() if k not in ("out", "json")},
        **found,
    }
    title = f"first token at {options.context} tokens inside vLLM"
    report(
        result, [table(title, ["edit", "case", "s", "x full", "x prefix"], rows)], options, "vllm"
    )


if __name__ == "__main__":
    main()
