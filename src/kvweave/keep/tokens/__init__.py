"""Token policies: one file each, found by name here."""

from __future__ import annotations

from kvweave.keep.tokens.base import TokenPolicy
from kvweave.keep.tokens.diffkv import DiffKV
from kvweave.keep.tokens.expected_attention import ExpectedAttention
from kvweave.keep.tokens.flexicache import FlexiCache
from kvweave.keep.tokens.full import AllRows
from kvweave.keep.tokens.h2o import H2O
from kvweave.keep.tokens.keydiff import KeyDiff
from kvweave.keep.tokens.knorm import KNorm
from kvweave.keep.tokens.kvzip import KVzip
from kvweave.keep.tokens.lazy import Lazy
from kvweave.keep.tokens.milestone import MilestoneRows
from kvweave.keep.tokens.random import RandomRows
from kvweave.keep.tokens.rkv import RKV
from kvweave.keep.tokens.snapkv import SnapKV
from kvweave.keep.tokens.streaming import Streaming
from kvweave.keep.tokens.tova import TOVA
from kvweave.keep.tokens.triattention import TriAttention
from kvweave.keep.tokens.ttkv import TTKV

_KINDS: tuple[type[TokenPolicy], ...] = (
    DiffKV, ExpectedAttention, FlexiCache, AllRows, H2O, KeyDiff, KNorm, KVzip, Lazy, MilestoneRows, RandomRows, RKV, SnapKV,
    Streaming, TOVA, TriAttention, TTKV,
)  # fmt: skip
POLICIES: dict[str, type[TokenPolicy]] = {kind.name: kind for kind in _KINDS}
