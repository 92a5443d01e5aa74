"""Rows that hold their position stay where they are: python -m pytest tests/run/test_fixed.py"""

from __future__ import annotations

from typing import Any

import numpy as np
import oracle
import pytest
import torch
from conftest import tiny
from needs import only_on_cpu
from torch import nn

from kvweave.errors import CannotMove, CannotRun, InvalidArgument
from kvweave.run.base import Work, fixed_from
from kvweave.run.model import Runner

NAMES = sorted(oracle.FIXED)
N = 40
TOLERANCE = {torch.float64: oracle.EXACT, torch.float32: 2e-5}


def ids(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 101, (n,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", NAMES)
def test_passes_are_those_of_transformers(name: str, dtype: torch.dtype) -> None:
    """Whole, in pieces, beside another context, and in scattered rows whose own were poisoned."""
    runner, tokens = tiny(name, dtype), ids(N)
    wanted = oracle.full_prefill(runner, tokens)
    rows, found = oracle.rows_of(runner, tokens)
    assert oracle.relative(found, wanted) < TOLERANCE[dtype]
    pieces, other = runner.new_rows(), runner.new_rows()
    pieces.reserve(N), other.reserve(N)
    for cut in np.split(np.arange(N), [7, 8, 30]):
        works = [
            Work(each, t.numpy()[cut], cut, cut, want=np.arange(len(cut)))
            for each, t in ((other, ids(N, 1)), (pieces, tokens))
        ]
        found = runner.forward(works)[1]
        assert oracle.relative(found, wanted[cut]) < TOLERANCE[dtype]
    slots = np.array([1, 2, 9, 20, 21, 38])
    kv = runner.new_kv(len(slots))
    for tensor in (*kv.k, *kv.v):
        tensor.fill_(torch.nan)
    rows.put(slots, kv)
    again = Work(rows, tokens.numpy()[slots], slots, slots, want=np.arange(len(slots)))
    assert oracle.relative(runner.forward([again])[0], wanted[slots]) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", NAMES)
def test_they_run_and_are_not_moved(name: str, dtype: torch.dtype) -> None:
    runner = Runner(oracle.build(*oracle.FIXED[name], dtype))
    assert runner.can_run, runner.can_run.reason
    assert "4 fixed" in runner.can_run.reason
    assert not runner.can_move
    runner.require_run()
    for use in (runner.require_move, lambda: runner.new_rows(moves=True)):
        with pytest.raises(CannotMove, match="stay where they were computed") as refused:
            use()
        assert not isinstance(refused.value, CannotRun)


@pytest.mark.parametrize("pad", [0, 1, 5])
def test_where_positions_begin_is_found(pad: int) -> None:
    kind, changes = oracle.FIXED["roberta"]
    runner = Runner(oracle.build(kind, changes | {"pad_token_id": pad}, torch.float32))
    assert fixed_from(runner.layers) == pad + 1
    assert runner.limit == 1024 - pad - 1, "the table has no more"
    far = np.array([runner.limit - 1])
    rows = runner.new_rows()
    rows.reserve(1)
    assert runner.forward([Work(rows, ids(1).numpy(), np.arange(1), far)])[0].shape[0] == 0


def test_a_limit_of_ones_own() -> None:
    kind, changes = oracle.FIXED["roberta"]
    model = oracle.build(kind, changes, torch.float32)
    assert Runner(model, max_positions=64).limit == 64
    with pytest.raises(InvalidArgument):
        Runner(model, max_positions=1025)


class Learned(nn.Module):
    """Adds a learned vector to what each token begins with."""

    def __init__(self, n: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(n, width)


def with_learned(model: Any, where: str) -> Any:
    """A rotary model with learned positions besides: those it is told, or those a cache counts."""
    model.learned = Learned(model.config.max_position_embeddings, model.config.hidden_size)
    nn.init.normal_(model.learned.table.weight)
    model.learned.to(model.dtype)
    embed = model.model.embed_tokens
    told: dict[str, Any] = {}

    def before(module: Any, args: Any, options: dict[str, Any]) -> None:
        n, cache = options["input_ids"].shape[1], options.get("past_key_values")
        counted = torch.arange(n) + (cache.get_seq_length() if cache is not None else 0)
        ids = options.get("position_ids")
        told["at"] = counted[None] if where == "counted" or ids is None else ids

    model.model.register_forward_pre_hook(before, with_kwargs=True)
    embed.register_forward_hook(lambda m, a, out: out + model.learned.table(told["at"]))
    return model


@only_on_cpu("hooks of a test")
def test_a_rotation_and_learned_positions() -> None:
    """Such keys turn by no rotation either: true positions for both, and no move."""
    model = oracle.build("llama", {}, torch.float32)
    plain = with_learned(model, "told")
    tokens = ids(N)
    plain.set_attn_implementation("eager")
    with torch.no_grad():
        wanted = plain(tokens[None], use_cache=False).logits[0]
    runner = Runner(model)
    assert runner.can_run and not runner.can_move, runner.can_run.reason
    assert oracle.relative(oracle.rows_of(runner, tokens)[1], wanted) < 2e-5


@only_on_cpu("hooks of a test")
def test_positions_that_a_model_counts_itself_are_refused() -> None:
    runner = Runner(with_learned(oracle.build("llama", {}, torch.float32), "counted"))
    assert not runner.can_run
    assert "cache says" in runner.can_run.reason


@only_on_cpu("hooks of a test")
def test_frequencies_that_depend_on_a_calls_length_are_refused_besides() -> None:
    rope = {"rope_parameters": {"rope_theta": 1e4, "rope_type": "dynamic", "factor": 2.0}}
    runner = Runner(with_learned(oracle.build("llama", rope, torch.float32), "told"))
    assert not runner.can_run and "length of a call" in runner.can_run.reason
