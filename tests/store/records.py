"""Records to a tier and back, for tests."""

from __future__ import annotations

from kvweave.store.codec import parse
from kvweave.store.kv import KV
from kvweave.store.record.layout import Head, encode
from kvweave.store.record.transfer import Expected, digest_of, key_of, read_heads
from kvweave.store.tier.base import Get, Outcome, Put, Tier

MODEL = "ab" * 16
CHUNK = "0c" * 16


def about(kv: KV, chunk: str = CHUNK) -> Expected:
    shapes = Head.parse(b"".join(encode(kv.rows(0, 1), parse("raw"), MODEL, chunk))).shapes
    return Expected(chunk, kv.n_tokens, shapes, kv.k[0].dtype)


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
        wanted = Expected(digest_of(key), head.n_tokens, head.shapes, head.dtype)
    found = read_heads(tier, [(key, wanted)], model, None)[0]
    if isinstance(found, Outcome):
        return found
    span = found.layers(0, found.n_layers)
    data = memoryview(bytearray(span.n_bytes))
    (outcome,) = tier.get([span.get(key, data)])
    return found.decode(data) if outcome.ok else outcome
