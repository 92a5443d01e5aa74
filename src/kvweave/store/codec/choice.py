"""Which codec each layer gets, as one string.

::

    int8                     every layer
    int8/int4                keys / values
    int4+zstd                entropy coded
    0-3:int8,4-:int4+zstd    by layer, from 0 on and without gaps
    cachegen:absmax          options of a codec, each after a colon
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvweave.store.codec.base import Codec, KeyOrValue, Make, Place

LOSSLESS = ("raw", "raw+zstd")
_RANGE = re.compile(r"(\d+)(-(\d*))?:(?=[a-z])")


@dataclass(frozen=True, slots=True)
class Named:
    """A codec by name, with its options."""

    name: str
    make: Make
    options: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Layers:
    """The codecs of layers up to ``last``, None for all that follow."""

    last: int | None
    k: Named
    v: Named


@dataclass(frozen=True, slots=True)
class CodecSpec:
    """A parsed codec spec."""

    spec: str
    layers: tuple[Layers, ...]

    def named(self, layer: int, part: KeyOrValue) -> Named:
        """Return what one tensor is coded with."""
        for each in self.layers:
            if each.last is None or layer <= each.last:
                return each.k if part == "k" else each.v
        raise AssertionError("the last range has no end")

    def codec(self, layer: int, n_layers: int, part: KeyOrValue) -> Codec:
        """Make the codec of one tensor."""
        named = self.named(layer, part)
        return named.make(Place(layer, n_layers, part), named.options)

    @property
    def lossy(self) -> bool:
        """Whether what comes back may differ from what was stored."""
        return any(named.name not in LOSSLESS for each in self.layers for named in (each.k, each.v))

    def is_raw(self, layer: int, part: KeyOrValue) -> bool:
        """Whether the bytes of one tensor are its values as they are."""
        return self.named(layer, part).name == "raw"


def split(text: str) -> tuple[int | None, int | None, str]:
    """Return (first, last, codec) of one part of a spec; first is None where no range is given."""
    found = _RANGE.match(text)
    if found is None:
        return None, None, text
    first = int(found[1])
    last = first if found[2] is None else int(found[3]) if found[3] else None
    return first, last, text[found.end() :]
