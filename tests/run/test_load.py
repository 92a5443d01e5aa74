"""Checkpoints, and the caller's own model: python -m pytest tests/run/test_load.py"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch

from kvweave import Engine
from kvweave.errors import InvalidArgument, ModelUnusable
from kvweave.run import load as loading
from kvweave.run.load import SETTINGS, choose_dtype, has_bf16_units, twin
from kvweave.run.model import Runner

# of nothing, transformers makes a tokenizer of three to seven tokens for some, and fails for others
WORDLESS = ["llama", "mistral", "qwen3", "phi", "gpt_neox", "gemma", "olmo2", "cohere_interleaved"]
TOKENS = torch.arange(3, 33)[None]


def storages(model: Any) -> set[int]:
    tensors = [*model.parameters(), *model.buffers()]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(TOKENS.to(oracle.DEVICE)).logits
    return found


@pytest.mark.sampled
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "phimoe", "ministral3_far", "olmo2", "gpt2"])
def test_the_callers_model_is_never_changed(name: str, attention: str) -> None:
    """By one runner or two, accepted or refused, and while a runner computes."""
    runs = oracle.MODELS | oracle.FIXED
    kind, changes = runs.get(name) or oracle.REFUSED[name][:2]
    model = oracle.build(kind, changes, torch.float32)
    model.set_attn_implementation(attention)
    before, config = logits(model), model.config.to_dict()
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    model.train()
    one, two = Runner(model), Runner(model, max_positions=64)
    assert bool(one.can_run) == (name in runs)
    if one.can_run:
        oracle.rows_of(one, TOKENS[0])
        oracle.rows_of(two, TOKENS[0])
        assert torch.equal(*(oracle.rows_of(each, TOKENS[0])[1] for each in (one, two)))
    assert all(module.training for module in model.modules())
    assert not any(module.training for module in one.model.modules())
    assert torch.equal(logits(model.eval()), before)
    assert model.config.to_dict() == config
    assert model.config._attn_implementation == attention
    assert hooks == sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_moe"])
def test_a_twin_takes_no_memory_for_weights(name: str) -> None:
    model = oracle.build(*oracle.MODELS[name], torch.float32)
    own = Runner(model).model
    mine, theirs = dict(own.named_parameters()), dict(model.named_parameters())
    assert mine.keys() == theirs.keys()
    assert all(mine[key] is theirs[key] for key in mine)
    extra = storages(own) - storages(model)
    sizes = {t.untyped_storage().data_ptr(): t.nbytes for t in own.buffers()}
    assert sum(sizes[pointer] for pointer in extra) < 2000, "only the frequencies"


def test_training_goes_on_in_a_twin() -> None:
    """Weights are shared, so what an optimiser does to them is seen by the runner."""
    model = oracle.build("llama", {}, torch.float32)
    runner = Runner(model)
    _, before = oracle.rows_of(runner, TOKENS[0])
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    assert oracle.relative(oracle.rows_of(runner, TOKENS[0])[1], 2 * before) < 1e-6


def test_tied_weights_stay_tied() -> None:
    own = twin(oracle.build("gemma", {}, torch.float32), "gemma")
    assert own.lm_head.weight is own.model.embed_tokens.weight


def test_a_model_that_cannot_be_copied_says_so() -> None:
    model = oracle.build("llama", {}, torch.float32)
    model.model.layers[0].mine = (each for each in ())
    with pytest.raises(ModelUnusable, match="generator"):
        Runner(model)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint directory in bfloat16, without a tokenizer."""
    oracle.build("qwen3", {}, torch.bfloat16).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.sampled
@pytest.mark.parametrize("name", WORDLESS)
def test_a_checkpoint_without_tokenizer_works_with_token_ids(name: str, tmp_path: Path) -> None:
    """Whatever transformers makes of nothing for this kind of model: an error, or a few tokens."""
    oracle.build(*oracle.MODELS[name], torch.float32).save_pretrained(tmp_path)
    said = {}
    for case in (None, {}, {"tokenizer_class": "LlamaTokenizer"}):
        if case is not None:
            (tmp_path / SETTINGS).write_text(json.dumps(case))
        runner = Runner.load(str(tmp_path), device="cpu")
        assert runner.tokenizer is None
        with Engine(runner, repair="none") as engine:
            engine.put("a", range(5, 12))
            context = engine.context("c")
            context.append([9, 10])
            context.append_chunk("a")
            said[str(case)] = context.generate(3, ignore_eos=True).tokens
    assert [len(tokens) for tokens in said.values()] == [3, 3, 3]
    assert len(set(said.values())) == 1


def test_text_for_a_model_without_tokenizer_is_refused_with_a_hint(saved: Path) -> None:
    with Engine(str(saved), repair="none") as engine:
        engine.put("a", [5, 6, 7])
        context = engine.context("c")
        context.append([9, 10])
        before = context.tokens
        verbs: list[Callable[[], object]] = [
            lambda: engine.put("b", "text"),
            lambda: engine.context("d", system="text"),
            lambda: engine.compose("text {a}"),
            lambda: context.append("text"),
            lambda: context.message("user", "text"),
            lambda: context.ask("text"),
        ]
        for verb in verbs:
            with pytest.raises(InvalidArgument, match=r"without a tokenizer.*\(pass token ids\)"):
                verb()
        with pytest.raises(InvalidArgument, match=r"without a tokenizer.*\(use stop_tokens\)"):
            context.generate(2, stop="text")
        assert context.tokens == before and list(engine.contexts) == ["c"]
        assert [entry.name for entry in engine.files.ls()] == ["a"]
        assert len(context.generate(2, ignore_eos=True).tokens) == 2
        engine.check_integrity()


def test_a_tokenizer_that_needs_no_file_is_one(saved: Path) -> None:
    (saved / SETTINGS).write_text(json.dumps({"tokenizer_class": "ByT5Tokenizer"}))
    found = Runner.load(str(saved)).tokenizer
    assert found.decode(found.encode("a\u00e9", add_special_tokens=False)) == "a\u00e9"


def test_a_broken_tokenizer_is_not_a_missing_one(saved: Path, bundled: Path) -> None:
    for file in bundled.glob("tokenizer*"):
        shutil.copy(file, saved)
    assert Runner.load(str(saved)).tokenizer is not None
    (saved / "tokenizer.json").write_text("{")
    with pytest.raises(ModelUnusable):
        Runner.load(str(saved))


@pytest.mark.parametrize(
    ("wanted", "stored", "device", "units", "chosen"),
    [
        ("auto", torch.bfloat16, "cpu", True, torch.bfloat16),
        ("auto", torch.bfloat16, "cpu", False, torch.float32),
        ("auto", torch.float32, "cpu", True, torch.float32),
        ("auto", torch.float32, "cpu", False, torch.float32),
        ("auto", torch.float16, "cpu", True, torch.float32),
        ("auto", None, "cpu", True, torch.float32),
        ("auto", torch.bfloat16, "cuda:1", False, "auto"),
        ("auto", torch.float32, "cuda", True, "auto"),
        ("float16", torch.bfloat16, "cpu", True, torch.float16),
        ("bfloat16", torch.float32, "cpu", False, torch.bfloat16),
        ("float64", torch.bfloat16, "cuda", True, torch.float64),
    ],
)
def test_the_dtype_is_chosen(
    wanted: str, stored: torch.dtype | None, device: str, units: bool, chosen: object
) -> None:
    assert choose_dtype(wanted, stored, device, units)[0] == chosen


def test_the_choice_says_why() -> None:
    assert "units" in choose_dtype("auto", torch.bfloat16, "cpu", True)[1]
    assert "no units" in choose_dtype("auto", torch.bfloat16, "cpu", False)[1]
    assert "float16" in choose_dtype("auto", torch.float16, "cpu", True)[1]
    assert "asked" in choose_dtype("float32", torch.bfloat16, "cpu", True)[1]


@pytest.mark.parametrize(
    ("text", "units"),
    [
        ("flags\t\t: fpu sse2 avx2 avx512f avx512_bf16 fma", True),
        ("flags\t\t: fpu avx512f amx_bf16 amx_tile", True),
        ("Features\t: fp asimd bf16 i8mm", True),
        ("flags\t\t: fpu sse2 avx2 fma avx512f avx512_vnni", False),
        ("", False),
    ],
)
def test_units_are_read_off_the_cpu(text: str, units: bool, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{text}\n")
    assert has_bf16_units(tmp_path / "cpuinfo") == units
    assert not has_bf16_units(tmp_path / "nothing")


@pytest.mark.parametrize("units", [True, False])
def test_a_checkpoint_runs_in_the_chosen_dtype(
    saved: Path, units: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "has_bf16_units", lambda: units)
    best = torch.bfloat16 if units else torch.float32
    assert Runner.load(str(saved), device="cpu").dtype == best
    assert Runner.load(str(saved), device="cpu", dtype="float16").dtype == torch.float16
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    assert Runner.load(str(saved), device="cpu").dtype == torch.float32
    with pytest.raises(InvalidArgument, match="bfloat16"):
        Runner.load(str(saved), dtype="float3")
