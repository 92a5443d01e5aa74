"""What makes a chunk that chunk: its id, name, kind, tier, model fingerprint and digest."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from hashlib import blake2b
from typing import Annotated, Literal, NewType, get_args

import numpy as np

from kvweave.errors import FormatTooNew, InvalidArgument, InvalidName, ModelMismatch

ChunkId = NewType("ChunkId", int)
Kind = Literal["system", "user", "assistant", "tool", "document", "memory", "thinking", "summary"]
TierName = Literal["gpu", "ram", "disk", "remote", "none"]
"""Where KV rests; ``none``: only the tokens are kept and KV is recomputed on demand."""

KINDS: tuple[Kind, ...] = get_args(Kind)
TIERS: tuple[TierName, ...] = get_args(TierName)

DIGEST_BYTES = 16
MAX_NAME = 200
MAX_NAMESPACE = 64

_PUNCTUATION = "._@+:=~ -"
_GLOB_CHARACTERS = "*?[]{}"
# The common case in one match: ASCII parts, none of them "." or "..".
_ASCII_NAME = re.compile(r"(?:(?!\.{1,2}(?:/|\Z))[A-Za-z0-9._@+:=~ -]+(?:/(?!\Z)|\Z))+\Z")


def normal_name(name: str) -> str:
    """Return ``name`` in the one Unicode form (NFC) names are kept and looked up in."""
    return name if name.isascii() else unicodedata.normalize("NFC", name)


def check_name(name: str) -> str:
    """Return the normal form of a valid name; raise InvalidName otherwise."""
    if not isinstance(name, str):
        raise InvalidName(str(name), "a name is text")
    name = normal_name(name)
    if not (len(name) <= MAX_NAME and _ASCII_NAME.match(name)):
        reason = _why_invalid(name)
        if reason:
            raise InvalidName(name, reason)
    return name


def check_namespace(namespace: str) -> str:
    """Return the normal form of a valid namespace ("" is one); raise InvalidArgument otherwise."""
    if namespace == "":
        return ""
    if not isinstance(namespace, str):
        raise InvalidArgument("namespace", "a namespace is text")
    namespace = normal_name(namespace)
    reason = "it is one part, without '/'" if "/" in namespace else _why_invalid(namespace)
    if len(namespace) > MAX_NAMESPACE:
        reason = f"it has {len(namespace)} characters, {MAX_NAMESPACE} is the most"
    if reason:
        raise InvalidArgument("namespace", f"{namespace!r}: {reason}", "a word such as team-a")
    return namespace


Namespace = Annotated[str, check_namespace]  # as an argument: in its normal form


def check_kind(kind: str) -> Kind:
    """Return ``kind`` if it is one of KINDS; raise InvalidArgument otherwise."""
    for known in KINDS:
        if kind == known:
            return known
    raise InvalidArgument("kind", f"{kind!r} is none of {', '.join(KINDS)}")


def check_tier(tier: str) -> TierName:
    """Return ``tier`` if it is one of TIERS; raise InvalidArgument otherwise."""
    for known in TIERS:
        if tier == known:
            return known
    raise InvalidArgument("tier", f"{tier!r} is none of {', '.join(TIERS)}")


def check_n_bytes(n_bytes: int) -> None:
    """Raise InvalidArgument when ``n_bytes`` is negative."""
    if n_bytes < 0:
        raise InvalidArgument("n_bytes", f"{n_bytes} is negative")


def _why_invalid(name: str) -> str:
    """Return what is wrong with a name, or "" when nothing is."""
    if not name:
        return "it is empty"
    if len(name) > MAX_NAME:
        return f"it has {len(name)} characters, {MAX_NAME} is the most"
    if name[0] == "#":
        return "a leading '#' marks a chunk id"
    for part in name.split("/"):
        if not part:
            return "it has an empty part (a leading, trailing or double '/')"
        if part in (".", ".."):
            return f"the part {part!r} is not allowed"
        for character in part:
            if not _allowed(character):
                return _why_character(character)
    return ""


def _allowed(character: str) -> bool:
    # L, N, M: letters, digits, and the marks that many scripts cannot be written without.
    return character in _PUNCTUATION or unicodedata.category(character)[0] in "LNM"


def _why_character(character: str) -> str:
    if character in _GLOB_CHARACTERS:
        return f"{character!r} is a glob character"
    return f"the character {character!r} is not allowed"


OLDER = (
    "an older kvweave made it, whose fingerprints were others also of the same model: `kvweave cat NAME` "
    "reads its texts, to be put again into another home"
)

NO_TOKEN = 2**32 - 1
"""Stands for each row of a chunk whose rows no token made: a vector that was learned, say."""


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Return token ids as uint32 little-endian; raise InvalidArgument for anything else."""
    ids = np.asarray(tokens)
    if ids.size == 0:
        return b""
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InvalidArgument("tokens", f"wanted one row of ids, got {ids.dtype} {ids.shape}")
    if ids.min() < 0 or ids.max() > 0xFFFFFFFF:
        raise InvalidArgument("tokens", "an id is outside 0..2**32-1")
    return ids.astype("<u4").tobytes()


@dataclass(frozen=True, slots=True)
class ModelFingerprint:
    """What KV depends on besides tokens; KV never crosses fingerprints."""

    model: str
    weights: str
    tokenizer: str
    dtype: str
    rope: str
    adapter: str = ""
    config: str = ""

    def digest(self) -> bytes:
        """Return 16 bytes that differ when any field differs."""
        told = self.to_dict()
        if not self.config:  # made before configs were told
            del told["config"]
        text = json.dumps(list(told.values())).encode()
        return blake2b(text, digest_size=DIGEST_BYTES, person=b"kvweave-model").digest()

    def require(self, other: ModelFingerprint) -> None:
        """Do nothing when ``other`` is equal; raise ModelMismatch for the first field that is not."""
        for field in fields(self):
            wanted, found = getattr(self, field.name), getattr(other, field.name)
            if wanted != found:
                error = ModelMismatch(field.name, wanted, found)
                if self.config and not other.config:
                    error.hint = OLDER
                raise error

    def to_dict(self) -> dict[str, str]:
        """Return the fields, JSON-ready."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, str]) -> ModelFingerprint:
        """Return the fingerprint ``to_dict`` was called on; raise InvalidArgument on other keys,
        FormatTooNew where there are more."""
        names = {field.name for field in fields(cls)}
        if more := sorted({*data} - names) if names < {*data} else ():
            raise FormatTooNew("the model's fingerprint", 2, 1, f"the field {', '.join(more)}")
        wrong = sorted(names.symmetric_difference(data) - {"adapter", "config"})
        if wrong:
            raise InvalidArgument("fingerprint", f"missing or unknown: {', '.join(wrong)}")
        return cls(**data)


def chunk_digest(
    fingerprint: ModelFingerprint, base: bytes, tokens: Sequence[int], namespace: str = ""
) -> bytes:
    """Return 16 bytes naming the canonical KV of ``tokens`` after ``base`` (b"" for none).

    Equal digests mean equal namespace, fingerprint, base and tokens; fields are length-prefixed so
    that no two different inputs are hashed as the same bytes.
    """
    state = blake2b(digest_size=DIGEST_BYTES, person=b"kvweave-chunk")
    for part in (namespace.encode(), fingerprint.digest(), base):
        state.update(len(part).to_bytes(4, "little"))
        state.update(part)
    state.update(token_bytes(tokens))
    return state.digest()
