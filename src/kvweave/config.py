"""The settings of an engine, in one place."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from kvweave.errors import InvalidArgument
from kvweave.verbs import checked

BaseMode = Literal["any", "own"]
UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def n_bytes(size: int | str) -> int:
    """Return bytes of ``512``, ``"512MiB"`` or ``"2 GB"``. Raises InvalidArgument."""
    if isinstance(size, int) and size > 0:
        return size
    match = re.fullmatch(r"\s*([\d.]+)\s*([a-zA-Z]+)\s*", str(size))
    if match is None or match[2].lower() not in UNITS or not re.fullmatch(r"\d+\.?\d*", match[1]):
        raise InvalidArgument("budget", f"{size!r} is no size", "write 2GiB or 500MB")
    found = float(match[1]) * UNITS[match[2].lower()]
    if found == float("inf"):
        raise InvalidArgument("budget", f"{size!r} is no size", "write 2GiB or 500MB")
    return int(found)


def check_bases(bases: object) -> None:
    """Raise InvalidArgument unless ``bases`` is a `BaseMode`."""
    if bases not in get_args(BaseMode):
        raise InvalidArgument("bases", f"{bases!r}", f"one of {', '.join(get_args(BaseMode))}")


@checked
@dataclass(frozen=True, slots=True)
class Config:
    """Defaults of every context; each field with its unit and the reason for its value."""

    budget: int | str = "2GiB"  # KV memory: canonical rows and the rows of contexts
    repair: str = "auto"  # best by the fidelity suite (docs/LOG.md); the others are for study
    share: float = 0.05  # part of the reused rows to repair, 0..1
    max_drift: float | None = None  # nats: over this predicted bound `auto` repairs more
    calibration: str | None = None  # file; None: calibration.json of the home or the checkpoint
    rows: Literal["raw", "int8", "fp8"] = "raw"  # how the rows of contexts rest in memory
    keep: str | None = None  # which rows of contexts stay, as "snapkv:0.3"; None: all
    policy: str = "declared"  # which chunk to let go of
    tiers: tuple[str, ...] | None = (
        None  # see kvweave.store.spec; None: a disk where there is a home
    )
    index: str | None = None  # postgresql://... that engines share; None: index.sqlite of the home
    load_seconds: float = 10.0  # a load that takes longer is given up, and the chunk computed
    bases: BaseMode = "any"  # KV of chunks computed after another base is placed, or not: "own"
    denoise: Literal["after", "never"] = "after"  # canonical KV of new turns: after the answer
    refine: Literal["all", "chats", "never"] = "never"  # rows a server makes exact while none asks
    audit: float = 0.0  # part of the computing time for audits; those of an engine: `Engine.audit`
    max_batch: int = 16  # contexts that decode together
    max_rows: int = 512  # rows of one model pass; bounds the mask to max_rows x context

    def __post_init__(self) -> None:
        n_bytes(self.budget)
        for name in ("share", "audit"):
            if not 0 <= getattr(self, name) <= 1:
                raise InvalidArgument(name, f"{getattr(self, name)} is not between 0 and 1")
        for name in ("max_batch", "max_rows", "load_seconds"):
            if getattr(self, name) <= 0:
                raise InvalidArgument(name, f"{getattr(self, name)} is not above 0")
        if self.rows not in ("raw", "int8", "fp8"):
            raise InvalidArgument(
                "rows", f"rows in memory are no {self.rows!r}", "raw, int8 or fp8"
            )
        check_bases(self.bases)
        if self.denoise not in ("after", "never"):
            raise InvalidArgument("denoise", f"{self.denoise!r} is neither 'after' nor 'never'")
        if self.refine not in ("all", "chats", "never"):
            raise InvalidArgument("refine", f"{self.refine!r}", "all, chats or never")
