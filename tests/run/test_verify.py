"""What is wrong is found at load, whatever dtype runs: python -m pytest tests/run/test_verify.py"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from torch import Tensor

from kvweave.run.base import ALL, Mask, Work
from kvweave.run.model import ATTENTION, Runner
from kvweave.run.verify import difference
from kvweave.run.widen import widened

HALF = [torch.bfloat16, torch.float16]
DTYPES = [torch.float64, torch.float32, *HALF]
BEYOND = 40  # tokens: more than four windows or chunks


def build(name: str, dtype: torch.dtype, **changes: object) -> Any:
    kind, own = oracle.MODELS.get(name) or oracle.REFUSED[name][:2]
    return oracle.build(kind, own | changes, dtype)


@pytest.mark.parametrize("name", sorted(oracle.MODELS))
@pytest.mark.sampled
def test_what_is_right_is_accepted_in_half_precision(name: str) -> None:
    """What rounds most is still compared to 1e-3: in float32."""
    runner = Runner(build(name, torch.bfloat16))
    assert runner.can_move, runner.can_move.reason


@pytest.mark.parametrize("name", sorted(oracle.REFUSED))
def test_what_is_refused_is_refused_in_half_precision(name: str) -> None:
    runner = Runner(build(name, torch.bfloat16))
    assert not runner.can_move
    assert oracle.REFUSED[name][2] in runner.can_move.reason


def scaled(layer: int, factor: float, dtype: torch.dtype) -> Any:
    """A llama of which one layer scales attention otherwise where positions are not all zero."""
    model = build("llama", dtype)
    attention = model.model.layers[layer].self_attn
    plain = attention.scaling

    def hook(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        turned = bool(kwargs["position_embeddings"][1].abs().max() > 0)
        module.scaling = plain * factor if turned else plain

    attention.register_forward_pre_hook(hook, with_kwargs=True)
    return model


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layer", range(4))
@pytest.mark.sampled
def test_one_layer_of_another_scale_is_refused(layer: int, dtype: torch.dtype) -> None:
    runner = Runner(scaled(layer, 1.5, dtype))
    assert not runner.can_move
    where = f"the keys of layer {layer + 1}" if layer < 3 else "its logits"
    assert "differs" in runner.can_move.reason
    assert where in runner.can_move.reason
    assert Runner(scaled(layer, 1.0, dtype)).can_move, "the hook alone changes nothing"


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_hundredth_is_enough(dtype: torch.dtype) -> None:
    assert not Runner(scaled(2, 1.02, dtype)).can_move


def changed(size: int | None, by: int | None) -> int | None:
    return None if size is None or by is None else size + by


MASKED: dict[str, tuple[str, dict[str, object]]] = {
    "window": ("gemma3", {}),
    "large window": ("mistral", {"sliding_window": 700}),
    "very large window": ("olmo3", {"sliding_window": 5000, "max_position_embeddings": 16384}),
    "window of phimoe": ("phimoe", {}),
    "chunks": ("llama4_chunked", {}),
    "large chunks": ("llama4_chunked", {"attention_chunk_size": 300}),
}


@pytest.mark.parametrize("name", MASKED)
def test_every_layers_mask_is_told_from_its_neighbours(name: str) -> None:
    """Off by one or forgotten, in one layer: verification is beyond every window and chunk."""
    runner = Runner(build(MASKED[name][0], torch.float32, **MASKED[name][1]))
    assert runner.can_move, runner.can_move.reason
    right = list(runner.layers)
    assert difference(runner, runner.model, ATTENTION) is None
    for i, layer in enumerate(right):
        if layer.mask == ALL:
            continue
        for by in (-1, 1, None):
            wrong = Mask(changed(layer.mask.window, by), changed(layer.mask.chunk, by))
            runner.layers[i] = replace(layer, mask=wrong)
            found = difference(runner, runner.model, ATTENTION)
            assert found is not None, f"{wrong} in layer {i}, where it is {layer.mask}"
            assert "differs" in found
        runner.layers[i] = layer


class Faulty(Runner):
    """A runner with one fault in what it does with works."""

    fault = ""

    def forward(self, works: Sequence[Work]) -> list[Tensor]:
        logits = super().forward(works)
        if self.fault == "contexts mixed" and len(works) > 1:
            return [found[: len(logits[-1])] for found in reversed(logits)]
        if self.fault == "far rows wrong":
            for work, found in zip(works, logits, strict=True):
                found[torch.from_numpy(work.positions[work.want] > 1000)] *= 1.01
        if self.fault == "reads behind":  # what 0 * nan does to attention over too many slots
            for work, found in zip(works, logits, strict=True):
                if not work.rows.read(0)[0].isfinite().all():
                    found.fill_(torch.nan)
        if self.fault == "scattered rows wrong":
            for work, found in zip(works, logits, strict=True):
                found[torch.from_numpy(np.diff(work.slots, prepend=-1) > 1)] *= 1.01
        if self.fault == "rows not written":
            for work in works:
                if work.n < work.rows.n:
                    kv = self.new_kv(1)
                    for tensor in (*kv.k, *kv.v):
                        tensor.fill_(1.0)
                    work.rows.put(work.slots[-1:], kv)
        return logits


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("", ""),
        ("contexts mixed", "fails"),
        ("far rows wrong", "at position 10"),
        ("reads behind", "computed again"),
        ("scattered rows wrong", "computed again"),
        ("rows not written", "computed again"),
    ],
)
def test_faults_of_a_pass_are_found(fault: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Faulty, "fault", fault)
    runner = Faulty(build("llama", torch.float32))
    assert bool(runner.can_move) == (fault == "")
    assert text in runner.can_move.reason


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("phimoe", {}),
        ("llama4_chunked", {}),
        # scales queries by their position, which it counts itself
        ("llama4_chunked", {"attn_temperature_tuning": True, "floor_scale": 5, "attn_scale": 0.3}),
    ],
)
def test_masks_beyond_their_borders_are_those_of_transformers(
    name: str, changes: dict[str, object], dtype: torch.dtype
) -> None:
    """Whole and in scattered rows, against the model's own forward over the same tokens."""
    model = build(name, dtype, **changes)
    model.set_attn_implementation("eager")
    tokens = torch.randint(3, 101, (BEYOND,), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        wanted = model(tokens[None].to(oracle.DEVICE)).logits[0]
    runner = Runner(model)
    assert runner.can_move, runner.can_move.reason
    rows, found = oracle.rows_of(runner, tokens)
    close = {torch.float64: 2e-6, torch.float32: 2e-5}[dtype]
    assert oracle.relative(found, wanted) < close
    slots = np.array([0, 1, 6, 7, 8, 9, 15, 16, 17, 30, 39])
    kv = runner.new_kv(len(slots))
    for tensor in (*kv.k, *kv.v):
        tensor.fill_(torch.nan)
    rows.put(slots, kv)
    work = Work(rows, tokens.numpy()[slots], slots, slots, want=np.arange(len(slots)))
    (again,) = runner.forward([work])
    assert oracle.relative(again, wanted[slots]) < close


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", ["llama", "gemma2", "phimoe", "llama4_chunked", "granite"])
def test_widened_is_the_model_in_float32(name: str, dtype: torch.dtype) -> None:
    model = build(name, dtype)
    model.set_attn_implementation("eager")
    tokens = torch.arange(3, 30, device=oracle.DEVICE)[None]
    with torch.no_grad():
        rough = model(tokens).logits
        with widened(dtype):
            found = model(tokens).logits
        wanted = model.float()(tokens).logits
    assert found.dtype == torch.float32
    assert oracle.relative(found, wanted) < 1e-6
    assert oracle.relative(rough.float(), wanted) > 1e-3, "half precision does round"


def test_widened_takes_one_weight_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many experts one, of an embedding the rows that are looked up."""
    model = build("qwen3_moe", torch.bfloat16, num_experts=8, vocab_size=5000)
    model.set_attn_implementation("eager")
    sizes = []
    plain = torch.Tensor.float

    def counted(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return plain(tensor)

    monkeypatch.setattr(torch.Tensor, "float", counted)
    with torch.no_grad(), widened(torch.bfloat16):
        model.model(torch.arange(3, 12, device=oracle.DEVICE)[None])
    one = [p[0].numel() if p.dim() == 3 else p.numel() for p in model.model.layers.parameters()]
    assert max(sizes) <= max(one) < model.lm_head.weight.numel()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_widened_multiplies_in_full(dtype: torch.dtype) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with widened(dtype):
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


def test_widened_writes_where_it_is_told_to() -> None:
    half = torch.zeros(4, dtype=torch.bfloat16)
    with widened(torch.bfloat16):
        half[1:3] = 1.5
        half.add_(1)
        made = torch.zeros(2, dtype=torch.bfloat16)
        assert half.dtype == made.dtype == torch.float32 == half.to(torch.bfloat16).dtype
        assert (half + 1).dtype == half.bfloat16().dtype == torch.float32
        assert torch.cat([half, made]).dtype == torch.float32
    assert half.dtype == torch.bfloat16
    assert half.tolist() == [1, 2.5, 2.5, 1]
    assert made.dtype == torch.float32
