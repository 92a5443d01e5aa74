"""KV to a tier and back, as records; what goes wrong on the way is a result, not an error."""

from __future__ import annotations

import mmap
from typing import NamedTuple

from kvweave.errors import InvalidArgument, ModelMismatch, StoreError
from kvweave.store.codec import CodecSpec
from kvweave.store.kv import KV
from kvweave.store.record.layout import ByteRange, Head, encode
from kvweave.store.tier.base import DONE, PAGE, Get, Outcome, Put, Tier

FIRST = 4 * PAGE  # bytes read at first: the head of 2,000 tokens and 32 layers


class Loaded(NamedTuple):
    """KV, or why there is none; the head too, if it could be read."""

    kv: KV | None
    outcome: Outcome = DONE
    head: Head | None = None


def buffer(n: int) -> memoryview:
    """Return ``n`` bytes that begin at a page, as direct reads want them."""
    return memoryview(mmap.mmap(-1, max(n, 1)))[:n]


def store_kv(
    tier: Tier, key: str, kv: KV, choice: CodecSpec, model: str, *, durable: bool = False
) -> Outcome:
    """Put KV under ``key``, coded as ``choice`` says; ``model`` is the fingerprint's hex digest.

    ``kv`` must not change until this returns. Raises as `encode`.
    """
    return tier.put([Put(key, encode(kv, choice, model))], durable=durable)[0]


def load_head(
    tier: Tier, key: str, model: str, *, deadline: float | None = None
) -> tuple[Head | None, Outcome]:
    """Read what a record holds, verified. Raises ModelMismatch."""
    size = tier.size(key)
    if size is None:
        return None, Outcome("missing", key)
    n = min(size, FIRST)
    try:
        while True:
            data = buffer(n)
            outcome = tier.get([Get(key, 0, [data])], deadline=deadline)[0]
            if not outcome.ok:
                return None, outcome
            if n >= Head.needs(data, key):
                break
            n = Head.needs(data, key)
        head = Head.parse(data, key)
    except StoreError as error:
        return None, Outcome("wrong", str(error))
    if head.model != model:
        raise ModelMismatch("fingerprint", model, head.model)
    return head, DONE


def load_kv(
    tier: Tier,
    key: str,
    model: str,
    *,
    layers: tuple[int, int] | None = None,
    tokens: tuple[int, int] | None = None,
    head: Head | None = None,
    deadline: float | None = None,
) -> Loaded:
    """Read KV back: all of it, or layers and tokens ``[start, stop)``; only what is needed is read.

    Pass the ``head`` of an earlier load to save a request. There is no KV when the record is
    missing, late or wrong. Raises ModelMismatch, InvalidArgument for what it does not have.
    """
    if head is None:
        head, outcome = load_head(tier, key, model, deadline=deadline)
        if head is None:
            return Loaded(None, outcome)
    elif head.model != model:
        raise ModelMismatch("fingerprint", model, head.model)
    first, last = _within("layers", layers, head.n_layers)
    start, stop = _within("tokens", tokens, head.n_tokens)
    if (start, stop) == (0, head.n_tokens):
        spans = [head.layers(first, last)]
    else:
        spans = [s for layer in range(first, last) for s in head.tokens(start, stop, layer)]
    buffers = _buffers(spans)
    gets = [span.get(key, data) for span, data in zip(spans, buffers, strict=True)]
    for outcome in tier.get(gets, deadline=deadline):
        if not outcome.ok:
            return Loaded(None, outcome, head)
    try:
        if len(spans) == 1:
            return Loaded(head.decode(buffers[0], first, last), DONE, head)
        kv = KV([], [], head.lossy)
        for i, layer in enumerate(range(first, last)):
            k, v = head.decode_tokens(start, stop, layer, (buffers[2 * i], buffers[2 * i + 1]))
            kv.k.append(k)
            kv.v.append(v)
    except StoreError as error:
        return Loaded(None, Outcome("wrong", f"{key}: {error}"), head)
    return Loaded(kv, DONE, head)


def _buffers(spans: list[ByteRange]) -> list[memoryview]:
    """Return memory for every span, each from a page on."""
    sizes = [-(-span.n_bytes // PAGE) * PAGE for span in spans]
    whole = buffer(sum(sizes))
    begins = [sum(sizes[:i]) for i in range(len(sizes))]
    return [whole[b : b + span.n_bytes] for b, span in zip(begins, spans, strict=True)]


def _within(what: str, span: tuple[int, int] | None, n: int) -> tuple[int, int]:
    start, stop = (0, n) if span is None else span
    if not 0 <= start <= stop <= n or (span is not None and start == stop):
        raise InvalidArgument(what, f"[{start}, {stop}) of {n}")
    return start, stop
