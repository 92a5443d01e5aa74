"""Fields that clients send and no model is told of: taken, and named in ``kvweave.ignored``.

A field whose type is `Any` is one of these.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from pydantic import BaseModel

from kvweave.serve.routes.base import STRICT

# What this server made and is sent back as it is; and what kind of text a text is.
UNTOLD = frozenset({"signature", "encrypted_content", "media_type"})
NOTHING: tuple[object, ...] = (None, False, [], {})


class Noted(BaseModel):
    """What may have notes to others, which say nothing to a model; another field is refused."""

    model_config = STRICT
    is_left_out: ClassVar[bool] = False  # the model is shown nothing of it
    cache_control: Any = None
    citations: Any = None


def unused(given: BaseModel, where: str) -> Iterator[str]:
    """Yield the paths of what was given, in any depth, and changes nothing."""
    if isinstance(given, Noted) and given.is_left_out:
        yield where
        return
    for name, field in type(given).model_fields.items():
        value, path = getattr(given, name), f"{where}.{name}"
        if field.annotation is Any:
            if value not in NOTHING and name not in UNTOLD:
                yield path
        elif isinstance(value, BaseModel):
            yield from unused(value, path)
        elif isinstance(value, list):
            for i, each in enumerate(value):
                if isinstance(each, BaseModel):
                    yield from unused(each, f"{path}.{i}")
