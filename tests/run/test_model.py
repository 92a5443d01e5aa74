"""The model seam against transformers itself: python -m pytest tests/run/test_model.py"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import oracle
import pytest
import torch
from conftest import tiny

from kvweave.errors import (
    CannotRun,
    ContextTooLong,
    InvalidArgument,
    ModelMismatch,
    ModelUnusable,
)
from kvweave.run.base import Ints, Rows, Work
from kvweave.run.batch import Batch
from kvweave.run.model import Runner
from kvweave.store.kv import KV

NAMES = sorted(oracle.MODELS)
EXACT = oracle.EXACT  # float64 on both sides; angles are float32 on both sides


def ids(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 101, (n,), generator=torch.Generator().manual_seed(seed))


def work(rows: Rows, tokens: torch.Tensor, slots: Ints, **more: object) -> Work:
    """A work of some slots of a context whose positions are its slots; all logits are wanted."""
    more = {"want": np.arange(len(slots))} | more
    return Work(rows, tokens.numpy()[slots], slots, slots, **more)  # type: ignore[arg-type]


def poison(runner: Runner, rows: Rows, slots: Ints) -> None:
    """Fill rows with NaN: whoever sees one becomes one."""
    kv = runner.new_kv(len(slots))
    rows.put(slots, KV(*([t.fill_(torch.nan) for t in ts] for ts in (kv.k, kv.v))))


def assert_rows(found: Rows, wanted: Rows, n_layers: int) -> None:
    for layer in range(n_layers):
        for new, old in zip(found.read(layer), wanted.read(layer), strict=True):
            assert oracle.relative(new, old) < EXACT


@pytest.mark.parametrize("name", NAMES)
def test_prefill_equals_transformers(name: str) -> None:
    runner = tiny(name)
    assert runner.can_move, runner.can_move.reason
    _, logits = oracle.rows_of(runner, ids(30))
    assert oracle.relative(logits, oracle.full_prefill(runner, ids(30))) < oracle.bound(name)


@pytest.mark.parametrize("name", NAMES)
def test_scattered_recompute_equals_prefill(name: str) -> None:
    """Poisoned rows, recomputed in any blocks, give the rows and logits of a prefill."""
    runner = tiny(name)
    tokens = ids(30)
    wanted, logits = oracle.rows_of(runner, tokens)
    rows = wanted.clone()
    todo = np.array([0, 3, 4, 5, 11, 12, 20, 28, 29])
    poison(runner, rows, todo)
    for slots in (todo[:4], todo[4:]):
        (found,) = runner.forward([work(rows, tokens, slots)])
        assert oracle.relative(found, logits[slots]) < EXACT
    assert_rows(rows, wanted, len(runner.layers))


@pytest.mark.parametrize("name", NAMES)
def test_what_no_row_sees_is_not_read(name: str) -> None:
    """Rows behind the last computed one, and those that every window has passed, may be anything."""
    runner = tiny(name)
    tokens = ids(60)
    true, _ = oracle.rows_of(runner, tokens)
    slots = np.array([41, 42, 45])
    rows = true.clone()
    windows = [layer.mask.window for layer in runner.layers]
    oldest = 0 if None in windows else 42 - max(w for w in windows if w is not None)
    unseen = np.setdiff1d(np.arange(60), np.arange(oldest, 46))
    poison(runner, rows, np.union1d(unseen, slots))
    (found,) = runner.forward([work(rows, tokens, slots)])
    assert oracle.relative(found, oracle.full_prefill(runner, tokens)[slots]) < 2e-6
    for layer in range(len(runner.layers)):
        for new, old in zip(rows.read(layer, slots), true.read(layer, slots), strict=True):
            assert oracle.relative(new, old) < EXACT
    if name == "mistral":
        assert oldest > 0, "no model that slides in every layer"


@pytest.mark.parametrize("name", NAMES)
def test_moved_chunk_equals_recomputed_alone(name: str) -> None:
    """Rows computed at 0.. and placed at 200.. are those computed at 200.., in every layer."""
    runner = tiny(name)
    tokens = ids(9)
    kv = runner.new_kv(9)
    start = runner.new_rows()
    start.reserve(9)
    runner.forward([work(start, tokens, np.arange(9), raw=kv)])
    there = np.arange(200, 209)
    wanted, _ = oracle.rows_of(runner, tokens, torch.from_numpy(there))
    placed = runner.new_rows()
    placed.reserve(9)
    placed.place([(0, [kv])], there)
    # a norm behind the rotation has scores depend on where a pair stands, not only how far apart
    relative = all(info.rotation.ratio is None for info in runner.layers)
    for layer in range(len(kv.k) if relative else 1):
        # angles are float32 products: relative positions agree to ~1e-5 at 200
        for mine, theirs in zip(placed.read(layer), wanted.read(layer), strict=True):
            assert oracle.relative(mine, theirs) < 3e-5
    near = oracle.relative(placed.read(0)[0], wanted.read(0)[0])
    assert near < (EXACT if relative else oracle.SINGLE), (
        "layer 0 sees no context: it is turned by the same angles"
    )


def test_repaired_row_does_not_see_its_future(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask aligned to the bottom right, right for a contiguous suffix, fails this case."""
    runner = tiny("llama")
    tokens = ids(12)
    _, wanted = oracle.rows_of(runner, tokens)
    rows, _ = oracle.rows_of(runner, tokens)
    slots = np.array([2, 5, 11])
    (found,) = runner.forward([work(rows, tokens, slots)])
    assert oracle.relative(found, wanted[slots]) < EXACT
    if runner.pooled:
        return  # intervals, no mask that could be wrong

    def bottom_right(*_: object) -> torch.Tensor:
        hidden = torch.full((3, 12), -torch.inf, dtype=torch.float64, device=oracle.DEVICE)
        return hidden.triu(12 - 3 + 1)

    monkeypatch.setattr(Batch, "bias", bottom_right)
    wrong, _ = oracle.rows_of(runner, tokens)
    (leaked,) = runner.forward([work(wrong, tokens, slots)])
    assert oracle.relative(leaked[0], wanted[2]) > 1e-2, "the case does not tell the masks apart"
    assert oracle.relative(leaked[2], wanted[11]) > 1e-3


@pytest.mark.parametrize("name", ["llama", "gemma3", "gemma2", "mistral", "cohere2"])
def test_many_scattered_rows_are_cut_into_pieces_that_change_nothing(name: str) -> None:
    runner = tiny(name)
    tokens = ids(400)
    wanted, logits = oracle.rows_of(runner, tokens)
    rows = wanted.clone()
    slots = np.sort(np.random.default_rng(1).permutation(400)[:200])
    poison(runner, rows, slots)
    todo = work(rows, tokens, slots)
    (part,) = Batch([todo], runner.layers, runner.device).parts
    pieces = part.cut(runner.layers[0].mask, (0, 0))
    assert len(pieces) > 1 and [p.first for p in pieces[1:]] == [p.last for p in pieces[:-1]]
    (found,) = runner.forward([todo])
    assert oracle.relative(found, logits[slots]) < EXACT
    assert oracle.relative(logits, oracle.full_prefill(runner, tokens)) < EXACT
    assert_rows(rows, wanted, len(runner.layers))


@pytest.mark.parametrize("name", ["llama", "gemma3", "gemma2"])
def test_packed_contexts_do_not_see_each_other(name: str) -> None:
    runner = tiny(name)
    works, wants = [], []
    for tokens in (ids(13, 1), ids(20, 2)):
        rows = runner.new_rows()
        rows.reserve(tokens.numel())
        works.append(work(rows, tokens, np.arange(len(tokens)), want=np.array([len(tokens) - 1])))
        wants.append(oracle.rows_of(runner, tokens)[1][-1:])
    for found, wanted in zip(runner.forward(works), wants, strict=True):
        assert oracle.relative(found, wanted) < EXACT


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
@pytest.mark.parametrize("long", [False, True])
def test_length_dependent_rope_is_pinned(kind: str, long: bool) -> None:
    """Within the original length the short frequencies hold; asked for more, the long ones do."""
    rope: dict[str, object] = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    if kind == "longrope":
        rope |= {"original_max_position_embeddings": 64} | {
            "short_factor": [1.0] * 8,
            "long_factor": [2.0 + i for i in range(8)],
        }
    changes = {"rope_parameters": rope, "max_position_embeddings": 64 if kind == "dynamic" else 256}
    model = oracle.build("llama", changes)
    runner = Runner(model, max_positions=256 if long else None)
    assert runner.can_move, runner.can_move.reason
    assert runner.limit == (256 if long else 64)
    tokens = ids(31)
    _, found = oracle.rows_of(runner, tokens)
    pinned = torch.cat([torch.arange(31), torch.tensor([runner.limit - 1])])
    model.set_attn_implementation("eager")
    with torch.no_grad(), oracle.Float64():
        wanted = model(
            torch.cat([tokens, tokens[:1]])[None].to(oracle.DEVICE),
            position_ids=pinned[None].to(oracle.DEVICE),
            attention_mask=torch.ones(1, 32, dtype=torch.int64, device=oracle.DEVICE),
        ).logits[0, :31]
    model.set_attn_implementation("kvweave")
    assert oracle.relative(found, wanted) < (oracle.EXACT if kind == "dynamic" else oracle.SINGLE)


@pytest.mark.parametrize("name", sorted(oracle.REFUSED))
def test_what_cannot_run_is_refused_with_the_reason(name: str) -> None:
    kind, changes, word = oracle.REFUSED[name]
    runner = Runner(oracle.build(kind, changes, torch.float32))
    assert not runner.can_run and not runner.can_move
    assert word in runner.can_run.reason and word in runner.can_move.reason
    for require in (runner.require_run, runner.require_move):
        with pytest.raises(CannotRun, match=word):
            require()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_lower_precision_loads_and_stays_near(dtype: torch.dtype) -> None:
    runner = tiny("llama", dtype)
    assert runner.can_move, runner.can_move.reason
    _, logits = oracle.rows_of(runner, ids(30))
    wanted = oracle.full_prefill(runner, ids(30))
    assert oracle.relative(logits.float(), wanted.float()) < {torch.float32: 1e-5}.get(dtype, 5e-2)


def test_positions_over_the_limit_are_refused(runner: Runner) -> None:
    rows = runner.new_rows()
    rows.reserve(1)
    far = np.array([runner.limit])
    with pytest.raises(ContextTooLong) as error:
        runner.forward([Work(rows, ids(1).numpy(), np.arange(1), far, want=np.arange(1))])
    assert (error.value.n, error.value.limit) == (1025, 1024)
    assert rows.n == 0


def test_limits_and_dtypes_that_make_no_sense_are_refused(bundled: Path) -> None:
    model = oracle.build("llama", {})
    for limit in (0, -3, 1025):
        with pytest.raises(InvalidArgument, match="1024"):
            Runner(model, max_positions=limit)
    assert Runner(model, max_positions=100).limit == 100
    with pytest.raises(InvalidArgument, match="bfloat16"):
        Runner.load(str(bundled), dtype="float3")


def test_fingerprint_tells_weights_apart(runner: Runner) -> None:
    other = oracle.build("llama", {})
    assert Runner(other, name="llama").fingerprint == runner.fingerprint
    other.lm_head.weight.data[0, 0] += 1
    with pytest.raises(ModelMismatch) as error:
        runner.fingerprint.require(Runner(other, name="llama").fingerprint)
    assert error.value.field == "weights"


@pytest.fixture
def saved(tmp_path: Path, bundled: Path) -> Path:
    """A small real checkpoint directory."""
    model = oracle.build("qwen3", {"vocab_size": 2048}, torch.float32)
    model.save_pretrained(tmp_path / "model")
    for file in bundled.glob("tokenizer*"):
        shutil.copy(file, tmp_path / "model")
    return tmp_path / "model"


def test_a_saved_checkpoint_loads(saved: Path) -> None:
    runner = Runner.load(str(saved))
    assert runner.can_move and runner.tokenizer is not None
    assert runner.dtype == torch.float32


def test_broken_checkpoints_say_what_is_wrong(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelUnusable):
        Runner.load(str(tmp_path / "nothing-here"))
    weights = saved / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelUnusable):
        Runner.load(str(saved))
    weights.write_bytes(whole)
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(
        json.dumps(config | {"num_hidden_layers": 5, "layer_types": ["full_attention"] * 5})
    )
    with pytest.raises(ModelUnusable, match="missing keys"):
        Runner.load(str(saved))
    (saved / "config.json").write_text("{")
    with pytest.raises(ModelUnusable):
        Runner.load(str(saved))
