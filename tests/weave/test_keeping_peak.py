"""The memory that is really there while a policy decodes is its budget and a page, at most.

What is there is found without asking the engine: storages of all tensors that can be reached from the rows,
whole ones, however little of them is used, and besides all that the process has and had not before. What may be
there is reckoned from what docs/keep.md says of a specification, in plain numbers.

pytest tests/weave/test_keeping_peak.py -m "slow or not slow"
"""

from __future__ import annotations

import gc
import math
import os
import random
from dataclasses import dataclass
from functools import cache

import numpy as np
import oracle
import pytest
import torch
from run.backend import ids

from kvweave import Engine
from kvweave.errors import CannotMove, InvalidArgument
from kvweave.keep.tokens import POLICIES
from kvweave.run import bags, written
from kvweave.run.base import LayerInfo
from kvweave.run.model import Runner
from kvweave.run.rotary import Rotation
from kvweave.weave.answer import request_from
from kvweave.weave.context import Context

QUICK = ("llama", "gemma3", "deepseek_v3_latent")
MORE = (
    "gpt_oss_sinks", "mistral", "qwen3", "phi", "gpt_neox", "gemma2", "smollm3_nope", "olmo3", "llama4_chunked",
    "deepseek_v2_latent", "gemma4_shared",
)  # fmt: skip
BITS = {"int8": (8, 8), "k8v4": (8, 4), "int4": (4, 4), "k4v2": (4, 2)}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
DRAWS = int(os.environ.get("KVWEAVE_DRAWS", "24"))  # of each model, with -m slow
LOOSE = 1 << 14  # bytes of a request itself: logits, ids, what is sampled


@cache
def runner(name: str, dtype: str) -> Runner:
    kind, changes = oracle.MODELS[name]
    changes = changes | {"max_position_embeddings": 4096}
    return Runner(oracle.build(kind, changes, DTYPES[dtype]), name=name)


# ---- what is there


def storages(*roots: object) -> dict[int, int]:
    """Return the bytes of each storage that can be reached, by its address; not those of the model."""
    found, seen, todo = {}, set(), list(roots)
    while todo:
        one = todo.pop()
        if id(one) in seen or isinstance(one, type | LayerInfo | Rotation | torch.nn.Module):
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            whole = one.untyped_storage()
            found[whole.data_ptr()] = whole.nbytes()
        elif not isinstance(one, np.ndarray | torch.device | torch.dtype):
            module = type(one).__module__
            if module.startswith("kvweave") or isinstance(one, list | tuple | dict | set):
                todo += gc.get_referents(one)
    found.pop(0, None)
    return found


def everything() -> dict[int, int]:
    """Return the bytes of each storage of the process, but of what threads write over and over again."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    found = {}
    for each in tensors:
        if each.layout is torch.strided and each.device.type != "meta":
            whole = each.untyped_storage()
            found[whole.data_ptr()] = whole.nbytes()
    again = storages(vars(bags._mine), vars(written._mine))
    return {at: n for at, n in found.items() if at and at not in again}


# ---- what may be there


@dataclass(frozen=True)
class Draw:
    """A specification, in parts."""

    policy: str
    budget: str
    every: int
    more: tuple[tuple[str, str], ...]  # forms and budgets
    heads: str
    layers: str
    options: tuple[str, ...]

    def __str__(self) -> str:
        more = [f"{form}={size}" for form, size in self.more]
        own = [f"every={self.every}", f"heads={self.heads}", f"layers={self.layers}"]
        return ",".join([f"{self.policy}:{self.budget}", *own, *more, *self.options])


def row(info: LayerInfo, itemsize: int, form: str = "", moves: bool = False) -> int:
    """Return the bytes of one row of one layer; of rows that close up with unrotated keys."""
    shape = info.shape
    sides = ((shape.k_heads, shape.k_dim), (shape.v_heads, shape.v_dim))
    if form == "below":
        return 0
    if not form:
        return sum(heads * dim for heads, dim in (*sides, *sides[:1][:moves])) * itemsize
    (heads, dim), (v_heads, v_dim) = sides
    bits, v_bits = BITS[form]
    key = math.ceil(dim * bits / 8) + 4 * grids(dim, bits)
    key += math.ceil(dim * 8 / 256) if bits == 8 else 0  # what stands behind tiles of 256 rows
    each, wide = v_dim // grids(v_dim, v_bits), 4 if v_bits == 8 else 2
    value = wide * (math.ceil(each * v_bits / 8 / wide) + 2)
    return heads * key + v_heads * grids(v_dim, v_bits) * value


def grids(dim: int, bits: int) -> int:
    """Return how many grids a row has."""
    size = 64 if bits == 8 else 32
    return dim // size if dim and dim % size == 0 else 1


def rows_of(size: str, n: int, row_bytes: int) -> float:
    """Return how many of ``n`` rows a budget is."""
    if size == "rest":
        return math.inf
    if size.endswith("KiB"):
        return int(size[:-3]) * 1024 // max(1, row_bytes)
    return float(size) * n if float(size) < 1 else float(size)


def allowed(draw: Draw, infos: list[LayerInfo], itemsize: int, n: int) -> int:
    """Return the bytes of the budget among ``n`` tokens, and of a page of rows."""
    forms = dict(draw.more)
    if not forms and draw.policy in ("flexicache", "ttkv"):
        forms = {"flexicache": {"below": "rest"}, "ttkv": {"int8": "rest"}}[draw.policy]
    moves, several = draw.policy == "streaming", len(infos)
    of = {form: sum(row(i, itemsize, form, moves) for i in infos) for form in ("", *forms)}
    of["below"] = of[""]
    total = 0.0
    for i, info in enumerate(infos):
        raw, left, at = row(info, itemsize, "", moves), n, 0.0
        window = info.mask.window or info.mask.chunk
        if window is not None and not moves:
            total += raw * min(n, window)
            continue
        factor = 1.5 - i / (several - 1) if draw.layers == "pyramid" and several > 1 else 1.0
        for form, size in (("", draw.budget), *forms.items()):
            rows = rows_of(size, n, of[form])
            before, at = at, at + rows
            upto = n if math.isinf(at) else math.ceil(max(1.0, round(at + 1e-9)) * factor)
            some = min(left, max(0, upto - math.floor(before * factor)))
            if draw.policy == "diffkv":  # none as it was computed but sinks and the newest
                safe = min(some, 68)
                total += safe * raw + (some - safe) * row(info, itemsize, "k8v4")
            else:
                total += some * row(info, itemsize, form, moves)
            left -= some
    return math.ceil(total + draw.every * of[""])


# ---- what is drawn


def drawn(rng: random.Random) -> Draw:
    policy = rng.choice([*POLICIES])
    every = rng.choice([1, 2, 5, 8, 16])
    kind, more = rng.random(), []
    if kind < 0.5:
        budget = str(rng.choice([0.05, 0.1, 0.3, 0.5, 0.77]))
    else:
        budget = str(rng.randrange(8, 64)) if kind < 0.8 else f"{rng.randrange(24, 80)}KiB"
    if policy not in ("streaming", "diffkv") and rng.random() < 0.4:
        names = [name for name in (*BITS, "below") if rng.random() < 0.5][:2]
        sizes = [rng.choice(["0.1", "0.2", "7", "20"]) for _ in names]
        if sizes and rng.random() < 0.5:
            sizes[-1] = "rest"
        more = list(zip(names, sizes, strict=True))
    plain = policy == "streaming"
    heads = "uniform" if plain else rng.choice(["uniform", "uniform", "ada"])
    layers = "uniform" if plain else rng.choice(["uniform", "uniform", "pyramid"])
    options = []
    if policy == "flexicache":
        options = [
            f"page={rng.choice([1, 4, 16])}", f"overlap={rng.choice([0.2, 0.7, 1.0])}", "recent=8",
        ]  # fmt: skip
    return Draw(policy, budget, every, tuple(more), heads, layers, tuple(options))


def parts(context: Context, engine: Engine, rng: random.Random, n: int) -> None:
    """Append ``n`` tokens in pieces, some of them chunks."""
    left = n
    while left > 0:
        some = min(left, rng.randrange(10, 60))
        tokens = ids(some, rng.randrange(1000)).tolist()
        if rng.random() < 0.4:
            name = f"x{rng.randrange(10**9)}"
            engine.put(name, tokens)
            context.append_chunk(name)
        else:
            context.append(tokens)
        left -= some


def decode(engine: Engine, contexts: list[Context], draw: Draw, rng: random.Random) -> None:
    """Answer in all of them at once, and look behind each step."""
    infos, size = engine.runner.layers, engine.runner.dtype.itemsize
    turns = [
        each.begin(*request_from(rng.randrange(3, 40), {"ignore_eos": True})) for each in contexts
    ]
    while not all(turn.done for turn in turns):
        engine.loop.step()
        for context, turn in zip(contexts, turns, strict=True):
            state, out = context.session.state, turn.take()[1]
            if not out and not turn.done and state.rows.n == 0:
                continue
            if not turn.done and not turn._weaving.request.out:
                continue  # the prompt is on its way
            n = max(1, int(state.keeper.numbers(state.rows.n)[-1]) + 1)
            there = sum(storages(state.rows).values())
            most = allowed(draw, infos, size, n)
            assert there <= most, f"{draw}: {there} bytes of {most} at {n} tokens"
            assert there <= state.rows.n_bytes
    for turn in turns:
        turn.finish()


def known(context: Context) -> int:
    """Return the bytes of a context's rows, and of what its policy has counted."""
    state = context.session.state
    return sum(storages(state.rows, state.keeper.watch).values())


def one(draw: Draw, model: Runner, rng: random.Random, whole: bool) -> bool:
    """Run a case; tell whether there was anything to run. ``whole``: look through the process too."""
    with Engine(model, base="", repair="none", denoise="never") as engine:
        try:
            context = engine.context("c", keep=str(draw))
        except (InvalidArgument, CannotMove):
            return False
        for _ in range(rng.choice([1, 1, 2])):
            parts(context, engine, rng, rng.randrange(20, 200))
            contexts = [context]
            if rng.random() < 0.3:
                contexts.append(engine.fork(context, "d"))
                contexts[1].append(ids(5).tolist())
            decode(engine, contexts, draw, rng)
            for twin in contexts[1:]:
                engine.close_context(twin.name)
        engine.check_integrity()
        if whole:
            before, mine = sum(everything().values()), known(context)
            context.close()
            gone = before - sum(everything().values())
            assert abs(gone - mine) <= LOOSE, f"{draw}: {gone} bytes went, {mine} were known of"
    return True


FOUND = (
    Draw("flexicache", "0.3", 8, (), "uniform", "uniform", ("page=4", "overlap=1.0", "recent=8")),
    Draw("flexicache", "40", 5, (), "ada", "pyramid", ("page=4", "overlap=0.7", "recent=8")),
    Draw("streaming", "40KiB", 8, (), "uniform", "uniform", ()),
)  # what was over it once


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_what_is_there_is_the_budget_and_a_page(name: str) -> None:
    rng, model = random.Random(name), runner(name, "float32")
    cases = [*FOUND, *(drawn(rng) for _ in range(max(1, min(4, DRAWS // 4))))]
    found = [one(draw, model, rng, i == min(5, len(cases) - 1)) for i, draw in enumerate(cases)]
    assert sum(found) > len(cases) // 2


@pytest.mark.slow
@pytest.mark.parametrize("name", [*QUICK, *MORE])
@pytest.mark.sampled
def test_what_is_there_is_the_budget_and_a_page_whatever_is_drawn(name: str) -> None:
    rng = random.Random(name + "1")
    model = runner(name, rng.choice([*DTYPES]))
    assert sum(one(drawn(rng), model, rng, i % 8 == 0) for i in range(DRAWS)) > DRAWS // 3
