"""What is learned of models by looking: python -m pytest tests/run/test_probe.py"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import oracle
import pytest
import torch

from kvweave.run.base import ALL, Mask
from kvweave.run.looking import Refused
from kvweave.run.model import Runner
from kvweave.run.probe import learn

Kwargs = dict[str, Any]
CHUNKS = Mask(chunk=8)


def hooked(change: Callable[[Kwargs], None], layer: int = 1) -> Any:
    """A llama whose attention ``layer`` gets other keyword arguments."""
    model = oracle.build("llama", {}, torch.float32)

    def hook(module: object, args: Any, kwargs: Kwargs) -> Any:
        change(kwargs)
        return args, kwargs

    model.model.layers[layer].self_attn.register_forward_pre_hook(hook, with_kwargs=True)
    return model


@pytest.mark.parametrize(
    ("name", "masks", "widths"),
    [
        ("llama", [ALL] * 4, [16] * 4),
        ("mistral", [Mask(window=7)] * 4, [16] * 4),
        ("phimoe", [Mask(window=7)] * 4, [16] * 4),
        ("gemma3", [Mask(window=7)] * 5 + [ALL], [16] * 6),
        ("llama4_chunked", [CHUNKS] * 3 + [ALL], [16] * 3 + [0]),
        ("smollm3_nope", [ALL] * 4, [16, 16, 0, 16]),
        ("phi3_partial", [ALL] * 4, [8] * 4),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.sampled
def test_layers_are_learned(
    name: str, masks: list[Mask], widths: list[int], dtype: torch.dtype
) -> None:
    layers = learn(oracle.build(*oracle.MODELS[name], dtype), 1024)
    assert [layer.mask for layer in layers] == masks
    assert [layer.rotation.width for layer in layers] == widths
    exact = learn(oracle.build(*oracle.MODELS[name]), 1024)
    for mine, theirs in zip(layers, exact, strict=True):
        assert (mine.rotation.key, mine.shape) == (theirs.rotation.key, theirs.shape)


def test_summary_counts_each_kind() -> None:
    for name, text in (
        ("llama4_chunked", "3 rotary, 1 position-free, 0 sliding, 3 chunked layers"),
        ("phimoe", "4 rotary, 0 position-free, 4 sliding layers"),
    ):
        assert Runner(oracle.build(*oracle.MODELS[name])).can_move.reason == text


def test_a_window_out_of_reach_is_none() -> None:
    model = oracle.build("mistral", {"sliding_window": 100})
    assert [layer.mask for layer in learn(model, 100)] == [ALL] * 4
    assert [layer.mask for layer in learn(model, 101)] == [Mask(window=100)] * 4


def set_option(name: str, value: object) -> Callable[[Kwargs], None]:
    return lambda kwargs: kwargs.update({name: value})


def boom(error: BaseException) -> Callable[[Kwargs], None]:
    def change(kwargs: Kwargs) -> None:
        raise error

    return change


def bend(kwargs: Kwargs) -> None:
    if kwargs["attention_mask"] is not None:
        mask = kwargs["attention_mask"]
        kwargs["attention_mask"] = mask + torch.arange(2.0, device=mask.device)


REFUSED: dict[str, tuple[Callable[[Kwargs], None], str]] = {
    "no mask": (set_option("attention_mask", None), "layer 1 is handed no mask"),
    "other mask": (bend, "layer 1 changes the mask"),
    "crash": (boom(ValueError("no such expert")), "itself fails: ValueError: no such expert"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_their_cause(name: str) -> None:
    change, text = REFUSED[name]
    runner = Runner(hooked(change))
    assert not runner.can_move
    assert text in runner.can_move.reason


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (set_option("temperature_of_mine", torch.ones(1)), "'temperature_of_mine'"),
        (set_option("position_bias", torch.ones(1)), "layer 1 has position biases"),
    ],
)
def test_unknown_options_are_left_to_attention_of_the_model(
    change: Callable[[Kwargs], None], text: str
) -> None:
    with pytest.raises(Refused, match=text):
        learn(hooked(change), 64)
    runner = Runner(hooked(change))
    assert runner.can_move and all(layer.handed is not None for layer in runner.layers)


def test_options_that_say_nothing_are_let_pass() -> None:
    def change(kwargs: Kwargs) -> None:
        kwargs |= {"mine": None, "output_router_logits": True, "sliding_window": 5}

    assert Runner(hooked(change)).can_move


def test_what_is_not_causal_is_refused() -> None:
    model = oracle.build("llama", {"is_causal": False}, torch.float32)
    with pytest.raises(Refused, match="after its own position"):
        learn(model, 64)


@pytest.mark.parametrize(
    ("kind", "changes", "text"),
    [
        ("openai-gpt", {}, "attention interface"),
    ],
)
def test_models_that_rows_cannot_say(kind: str, changes: Kwargs, text: str) -> None:
    runner = Runner(oracle.build(kind, changes, torch.float32))
    assert not runner.can_move
    assert text in runner.can_move.reason


@pytest.mark.parametrize("after", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        MemoryError(),
    ],
    ids=str,
)
def test_errors_of_the_machine_come_through(error: Exception, after: int) -> None:
    """Whether the model is probed or verified: they do not say that it cannot move."""
    calls = []

    def change(kwargs: Kwargs) -> None:
        calls.append(1)
        if len(calls) > after:
            raise error

    with pytest.raises(type(error)) as raised:
        Runner(hooked(change))
    assert raised.value is error


@pytest.mark.parametrize("flat", ["key", "query"])
def test_a_norm_behind_the_rotation_of_keys_or_of_queries_alone(flat: str) -> None:
    """Weights that are all the same leave a rotation what it was; those of the other do not."""
    model = oracle.build(*oracle.MODELS["hunyuan"])
    getattr(model.model.layers[1].self_attn, f"{flat}_layernorm").weight.data.fill_(0.7)
    runner = Runner(model)
    assert runner.can_move, runner.can_move.reason
    info = runner.layers[1]
    assert info.query is not None
    assert (info.rotation.ratio is None, info.query.ratio is None) == (flat == "key", flat != "key")
    tokens = torch.arange(40) * 7 % 97 + 3
    found = oracle.rows_of(runner, tokens)[1]
    assert oracle.relative(found, oracle.full_prefill(runner, tokens)) < oracle.bound("hunyuan")
