"""What a model can do, and why not; plain data, no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Capability:
    """Whether the model can do something, and why not."""

    ok: bool
    reason: str

    def __bool__(self) -> bool:
        return self.ok
