"""Say which model KV belongs to."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kvweave.chunk.identity import ModelFingerprint
from kvweave.run.rotary import Rotation

SAMPLES = 4096  # values hashed of each weight besides the sums of all: sums do not see an order
BLOCK, BLOCKS = 512, 1 << 14  # of 8 bytes in a sum; sums at a time
# what says nothing of what a model computes; what it says besides is left out where it is the default,
# so that another version of transformers, which knows more fields, does not make another model
COSMETIC = frozenset(
    "transformers_version dtype torch_dtype use_cache architectures id2label label2id attn_implementation "
    "output_attentions output_hidden_states return_dict problem_type bos_token_id eos_token_id "
    "pad_token_id base_model_name_or_path inference_mode revision task_type".split()
)


def fingerprint(
    model: Any, tokenizer: Any, name: str, rotations: Sequence[Rotation]
) -> ModelFingerprint:
    """Identify a model by all weights, its config, tokenizer, dtype and rotations; reads each weight."""
    words = hashlib.blake2b(digest_size=8)
    if tokenizer is not None:
        words.update(json.dumps(sorted(tokenizer.get_vocab().items())).encode())
        words.update((tokenizer.chat_template or "").encode())
    # where positions begin may be told by the id of padding, which says nothing else
    keys = [(r.key, r.fixed) if r.fixed else r.key for r in rotations]
    rope = hashlib.blake2b(repr(keys).encode(), digest_size=8)
    return ModelFingerprint(
        model=f"{type(model).__name__}:{Path(name).name}",
        weights=_weights(model),
        tokenizer=words.hexdigest(),
        dtype=str(model.dtype).removeprefix("torch."),
        rope=rope.hexdigest(),
        config=_config(model),
    )


def _weights(model: Any) -> str:
    """Return a digest of all weights, the same on every machine: of whole numbers, which add up to the
    same in any order."""
    found = hashlib.blake2b(digest_size=16)
    known: dict[tuple[object, ...], bytes] = {}  # of tied ones
    for key, value in sorted(model.state_dict().items()):
        place = (value.data_ptr(), value.shape, value.stride(), value.dtype)
        if not value.numel() or place not in known:
            known[place] = _digest(value.detach().reshape(-1))
        found.update(f"{key}{tuple(value.shape)}".encode() + known[place])
    return found.hexdigest()


def _digest(flat: torch.Tensor) -> bytes:
    """Return a digest of a weight's bits."""
    found = hashlib.blake2b(digest_size=16)
    sample = flat[:: max(1, flat.numel() // SAMPLES)].cpu().contiguous().view(torch.uint8)
    found.update(sample.numpy().tobytes())
    bits = flat.contiguous().view(torch.uint8)
    for some in torch.split(bits, 8 * BLOCK * BLOCKS):
        whole = len(some) // (8 * BLOCK) * 8 * BLOCK
        aligned = some[:whole] if some.data_ptr() % 8 == 0 else some[:whole].clone()
        sums = aligned.view(torch.int64).view(-1, BLOCK).sum(1)
        found.update(sums.cpu().numpy().tobytes() + some[whole:].cpu().numpy().tobytes())
    return found.digest()


def _config(model: Any) -> str:
    """Return a digest of what configs say of the computation: the model's, and those of adapters."""
    adapters = getattr(model, "peft_config", None)
    told = {
        "model": _unusual(model.config),
        "adapters": _said({n: a.to_dict() for n, a in adapters.items()}) if adapters else {},
    }
    text = json.dumps(told, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _unusual(config: Any) -> dict[str, Any]:
    """Return what a config says that the defaults of its class do not."""
    told = _said(config.to_dict())
    try:
        usual = _said(type(config)().to_dict())
    except Exception:  # of a class that has no defaults
        usual = {}
    same = {key for key, value in usual.items() if key in told and told[key] == value}
    return {key: value for key, value in told.items() if key == "model_type" or key not in same}


def _said(value: Any) -> Any:
    if isinstance(value, dict):
        items = sorted((str(key), each) for key, each in value.items())
        return {k: _said(v) for k, v in items if k not in COSMETIC and not k.startswith("_")}
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    return [_said(each) for each in value] if isinstance(value, list | tuple) else value
