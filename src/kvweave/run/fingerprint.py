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

SAMPLES = 4096  # values hashed of each weight: enough to tell checkpoints apart, quick at 8 B


def fingerprint(
    model: Any, tokenizer: Any, name: str, rotations: Sequence[Rotation]
) -> ModelFingerprint:
    """Identify a model by samples of every weight, its tokenizer, dtype and rotations."""
    weights = hashlib.blake2b(digest_size=16)
    for key, value in sorted(model.state_dict().items()):
        flat = value.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // SAMPLES)].cpu().contiguous().view(torch.uint8)
        weights.update(f"{key}{tuple(value.shape)}".encode() + sample.numpy().tobytes())
    words = hashlib.blake2b(digest_size=8)
    if tokenizer is not None:
        words.update(json.dumps(sorted(tokenizer.get_vocab().items())).encode())
        words.update((tokenizer.chat_template or "").encode())
    rope = hashlib.blake2b(repr([r.key for r in rotations]).encode(), digest_size=8)
    return ModelFingerprint(
        model=f"{type(model).__name__}:{Path(name).name}",
        weights=weights.hexdigest(),
        tokenizer=words.hexdigest(),
        dtype=str(model.dtype).removeprefix("torch."),
        rope=rope.hexdigest(),
    )
