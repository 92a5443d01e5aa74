"""KV to a tier and back, as records; what goes wrong on the way is a result, not an error."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import torch
import xxhash

from kvweave.errors import FormatTooNew, StoreError
from kvweave.store.codec import CodecSpec
from kvweave.store.kv import LayerShape
from kvweave.store.pages import buffer
from kvweave.store.record.layout import Head
from kvweave.store.tier.base import DONE, PAGE, Get, Outcome, Tier

FIRST = 4 * PAGE  # bytes read at first: the head of 2,000 tokens and 32 layers
GENERATIONS = 3  # names tried for a record, where others of its chunk are doomed or spoilt
LOSS, WHOLE = "-l", ("raw", "raw-zstd")
MARK = ".doomed"  # behind the key of what the collector is about to remove
_DIGEST = re.compile(r"[0-9a-f]{32,128}")


class Expected(NamedTuple):
    """What the record of a chunk must be of."""

    digest: str  # of the chunk, hex
    n_tokens: int
    shapes: tuple[LayerShape, ...]
    dtype: torch.dtype
    n_rows: int | None = None  # of each head of a thinned chunk; None: one a token

    @property
    def rows(self) -> int:
        """Rows of each head."""
        return self.n_tokens if self.n_rows is None else self.n_rows

    @property
    def n_bytes(self) -> int:
        """Bytes of the rows in memory."""
        return self.rows * self.dtype.itemsize * sum(s.width for s in self.shapes)


def key_of(digest: str, choice: CodecSpec, lossy: bool, generation: int = 0) -> str:
    """Return a record's key: its chunk, its codec, and whether its rows are still what was computed: `-l` where
    something was lost, twice where that was before this codec, and the codec's name does not say so.

    Equal key, equal meaning: whoever creates it first, the others can use it.
    """
    name = choice.spec.replace("+", "-")
    if re.fullmatch(r"[a-z0-9-]{1,24}", name) is None:
        name = f"x{xxhash.xxh3_64_hexdigest(choice.spec.encode())}"
    behind = f".{generation}" if generation else ""
    n_lost = 2 if lossy and name not in WHOLE else int(lossy or choice.lossy)
    return f"{digest}.{name}{LOSS * n_lost}{behind}"


def digest_of(key: str) -> str:
    """Return the chunk's digest in a record's key; "" where it is no such key."""
    digest, _, rest = key.partition(".")
    return digest if rest and not key.endswith(MARK) and _DIGEST.fullmatch(digest) else ""


def codec_of(key: str) -> str:
    """Return what a record's key says of its codec."""
    return key.split(".")[1].removesuffix(LOSS).removesuffix(LOSS)


def losses(key: str) -> int:
    """Return what a record's key says its rows have lost: 0 nothing, 1 what its codec does, 2 nobody knows what."""
    name = key.split(".")[1]
    found = name.endswith(LOSS) + name.endswith(2 * LOSS)
    return 2 if found and codec_of(key) in WHOLE else found


def is_lossy(key: str) -> bool:
    """Tell what a record's key says of its rows."""
    return losses(key) > 0


def fault(head: Head, key: str, model: str, wanted: Expected) -> str:
    """Return why a record is not the one that is wanted, or ""."""
    if head.model != model:
        return f"it is of the model {head.model[:12]}, not {model[:12]}"
    if head.chunk != wanted.digest:
        return (
            f"it is of the chunk {head.chunk[:12] or 'it does not say'}, not {wanted.digest[:12]}"
        )
    if (head.n_tokens, head.shapes) != (wanted.n_tokens, wanted.shapes):
        return f"it has {head.n_tokens} tokens, or other layers, not {wanted.n_tokens}"
    if head.n_rows != wanted.n_rows:
        return f"it has {head.n_rows or 'all'} rows of a head, not {wanted.n_rows or 'all'}"
    if head.dtype != wanted.dtype or head.lossy != is_lossy(key):
        return f"its rows are {head.dtype}, or not as exact as its key says"
    return ""


def read_heads(
    tier: Tier, wants: Sequence[tuple[str, Expected]], model: str, deadline: float | None
) -> list[Head | Outcome]:
    """Read what records hold, verified, in one request for all (two where heads are long, or records
    shorter than a first read)."""
    left = dict.fromkeys(range(len(wants)), FIRST)  # which, and the bytes to read of it
    found: list[Head | Outcome] = [Outcome("wrong", "its head does not end")] * len(wants)
    for _ in range(3):
        asked, left = left, {}
        gets = [Get(wants[i][0], 0, [buffer(n)]) for i, n in asked.items()]
        outcomes = tier.get(gets, deadline=deadline) if gets else []
        for (i, n), get, outcome in zip(asked.items(), gets, outcomes, strict=True):
            said: Head | Outcome | int = outcome
            if outcome.state == "wrong" and n == FIRST:  # perhaps it is shorter
                said = PAGE
            elif outcome.ok:
                said = _parse(get.into[0], *wants[i], model)
            if isinstance(said, int):
                left[i] = said
            else:
                found[i] = said
    return found


def _parse(data: memoryview, key: str, wanted: Expected, model: str) -> Head | Outcome | int:
    """Return what ``data`` begins with; the bytes of the head where that goes on behind it."""
    try:
        n = Head.needs(data, key)
        if n > len(data):
            return n
        head = Head.parse(data, key)
    except FormatTooNew as error:
        return Outcome("failed", str(error))
    except StoreError as error:
        return Outcome("wrong", str(error))
    why = fault(head, key, model, wanted)
    return Outcome("wrong", f"{key}: {why}") if why else head


def verify(tier: Tier, key: str, head: Head, deadline: float | None) -> Outcome:
    """Read a whole record and compare every checksum."""
    for layer in range(head.n_layers):
        span = head.layers(layer, layer + 1)
        if span.n_bytes:
            outcome = tier.get([span.get(key, buffer(span.n_bytes))], deadline=deadline)[0]
            if not outcome.ok:
                return outcome
    return DONE
