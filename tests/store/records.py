"""Records to a tier and back, for tests."""

from __future__ import annotations

import numpy as np
import torch

from kvweave.store.codec import parse
from kvweave.store.kv import KV, LayerShape
from kvweave.store.record.encode import encode
from kvweave.store.record.layout import Head
from kvweave.store.record.transfer import Expected, digest_of, key_of, read_heads
from kvweave.store.tier.base import Get, Outcome, Put, Tier

MODEL = "ab" * 16
CHUNK = "0c" * 16


def about(kv: KV, chunk: str = CHUNK) -> Expected:
    shapes = tuple(LayerShape(*k.shape[1:], *v.shape[1:]) for k, v in zip(kv.k, kv.v, strict=True))
    n_rows = None if kv.kept is None else kv.kept.shape[2]
    return Expected(chunk, kv.n_tokens, shapes, kv.k[0].dtype, n_rows)


def thinned(span: int, n_rows: int, layers: int = 3, heads: int = 2, *, seed: int = 0) -> KV:
    """Return ``n_rows`` rows a head, or fewer: as many as chance wants, padding behind them, of other
    tokens in each head and layer."""
    chance = np.random.default_rng(seed)
    kept = np.full((layers, heads, n_rows), -1)
    for i, head in enumerate(kept.reshape(layers * heads, n_rows)):
        n = n_rows if i == 1 else int(chance.integers(0, n_rows + 1))
        head[:n] = np.sort(chance.permutation(span)[:n])
    rows = chance.standard_normal((2, layers, n_rows, heads, 4), np.float32)
    return KV(*([torch.from_numpy(t) for t in each] for each in rows), False, kept, span)


def store(tier: Tier, kv: KV, spec: str = "raw", *, chunk: str = CHUNK, model: str = MODEL) -> str:
    """Put a record and return its key."""
    key = key_of(chunk, parse(spec), kv.lossy)
    (outcome,) = tier.put([Put(key, encode(kv, parse(spec), model, chunk))])
    assert outcome.ok, outcome
    return key


def load(tier: Tier, key: str, wanted: Expected | None = None, model: str = MODEL) -> KV | Outcome:
    """Read a whole record; without ``wanted`` whatever chunk it says that it is."""
    if wanted is None:
        data = memoryview(bytearray(tier.look([key])[0]))  # type: ignore[arg-type]
        (outcome,) = tier.get([Get(key, 0, [data])])
        assert outcome.ok, outcome
        head = Head.parse(data)
        about = digest_of(key), head.n_tokens, head.shapes, head.dtype, head.n_rows
        wanted = Expected(*about)
    found = read_heads(tier, [(key, wanted)], model, None)[0]
    if isinstance(found, Outcome):
        return found
    span = found.layers(0, found.n_layers)
    data = memoryview(bytearray(span.n_bytes))
    (outcome,) = tier.get([span.get(key, data)])
    return found.decode(data) if outcome.ok else outcome
