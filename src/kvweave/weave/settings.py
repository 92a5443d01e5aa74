"""How one context is woven."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import get_args

from kvweave.chunk.identity import Namespace
from kvweave.config import BaseMode, Config, check_bases
from kvweave.errors import InvalidArgument, check_options
from kvweave.keep.tokens.spec import Keep
from kvweave.verbs import checked
from kvweave.weave.calibration import check_nats
from kvweave.weave.parts import Mode, Positions
from kvweave.weave.repair import Strategy, strategy


@checked
@dataclass(frozen=True, slots=True)
class Settings:
    """How a context is woven; raises InvalidArgument for what makes no sense."""

    repair: str | Strategy = "none"
    share: float = 0.0  # of the reused rows, 0..1
    prune: Mode = "forget"  # what `drop` does to survivors by default
    positions: Positions = "compact"
    namespace: Namespace = ""
    max_drift: float | None = None  # nats: over this predicted bound `auto` repairs more
    keep: str | None = None  # which rows stay, and how many: see `kvweave.keep.tokens.spec`
    bases: BaseMode = "any"  # KV of another base is placed, approximately; "own": computed anew
    denoise: bool = True  # compute canonical KV of new turns after each answer

    def __post_init__(self) -> None:
        strategy(self.repair)
        check_share(self.share)
        check_bases(self.bases)
        for name, kind in (("prune", Mode), ("positions", Positions)):
            value = getattr(self, name)
            if value not in get_args(kind):
                raise InvalidArgument(name, f"{value!r}", f"one of {', '.join(get_args(kind))}")
        if self.max_drift is not None:
            check_nats(self.max_drift)
        if self.keep is not None:
            self._check_keep(Keep.parse(self.keep))

    def _check_keep(self, keep: Keep) -> None:
        if self.prune == "evict":
            reason = "evict keeps the KV of every row, a token policy lets go of it"
            raise InvalidArgument("keep", reason, 'use prune="forget"')
        if self.max_drift is not None:
            reason = "no bound of the drift is known of rows that are not all there"
            raise InvalidArgument("keep", reason, "leave out max_drift; audits find a bound")
        if self.positions == "keep" and keep.policy.moves:
            raise InvalidArgument("keep", f"{keep} closes up", 'use positions="compact"')


def settings_from(config: Config, options: Mapping[str, object]) -> Settings:
    """Return the settings of a context: what was asked for, else what the engine was told.
    Raises InvalidArgument."""
    check_options(options, (f.name for f in fields(Settings)))
    defaults: dict[str, object] = {
        "repair": config.repair,
        "share": config.share,
        "max_drift": config.max_drift,
        "keep": config.keep,
        "bases": config.bases,
        "denoise": config.denoise == "after",
    }
    return Settings(**(defaults | dict(options)))  # type: ignore[arg-type]


def check_share(share: float) -> None:
    """Raise InvalidArgument unless ``share`` is a part of a whole."""
    if not 0 <= share <= 1:
        raise InvalidArgument("share", f"{share} is not between 0 and 1")
