"""Codecs: how KV is stored in fewer bytes. One file each, found by name here."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvweave.errors import InvalidArgument, check_options, nearest
from kvweave.store.codec.base import BLOCK, Codec, KeyOrValue, Make, Place
from kvweave.store.codec.cachegen import cachegen
from kvweave.store.codec.choice import CodecSpec, Layers, Named, split
from kvweave.store.codec.fp8 import FP8
from kvweave.store.codec.integer import integer
from kvweave.store.codec.raw import Packed, Raw
from kvweave.store.codec.step import step


def _plain(make: Callable[[Place], Codec]) -> Make:
    """Return what makes a codec that has no options."""

    def made(place: Place, options: Sequence[str]) -> Codec:
        check_options(options, ())
        return make(place)

    return made


CODECS: dict[str, Make] = {
    "raw": _plain(lambda place: Raw()),
    "raw+zstd": _plain(lambda place: Packed()),
    "fp8": _plain(lambda place: FP8(place.part == "k")),
    "fp8+zstd": _plain(lambda place: FP8(place.part == "k", entropy=True)),
    "int8": integer(8, entropy=False),
    "int8+zstd": integer(8, entropy=True),
    "int5": integer(5, entropy=False),
    "int5+zstd": integer(5, entropy=True),
    "int4": integer(4, entropy=False),
    "int4+zstd": integer(4, entropy=True),
    "step": step,
    "cachegen": cachegen,
}


def parse(spec: str) -> CodecSpec:
    """Return the codecs a spec names; `choice` shows the grammar. Raises InvalidArgument."""
    layers: list[Layers] = []
    covered = 0
    texts = [text.strip() for text in spec.split(",")]
    for i, text in enumerate(texts):
        first, last, rest = split(text)
        if first is None and len(texts) > 1:
            raise _refused(
                spec, f"{text!r} does not say for which layers", "write 0-3:int8,4-:int4"
            )
        if (first or 0) != covered:
            raise _refused(
                spec,
                f"layers from {covered} on have no codec or two",
                f"begin {text!r} at {covered}",
            )
        if last is not None and last < covered:
            raise _refused(spec, f"{text!r} ends before it begins", "write the smaller layer first")
        if (last is None) != (i == len(texts) - 1):
            hint = "end the last range, and only that, with a dash: 0-3:int8,4-:int4"
            raise _refused(spec, "the last range has no end, the others have one", hint)
        covered = 0 if last is None else last + 1
        k, slash, v = rest.partition("/")
        layers.append(Layers(last, _named(spec, k), _named(spec, v if slash else k)))
    return CodecSpec(spec, tuple(layers))


def _named(spec: str, text: str) -> Named:
    name, *options = text.strip().split(":")
    if name not in CODECS:
        near = nearest(name, CODECS)
        known = ", ".join(CODECS)
        raise _refused(
            spec, f"no codec {name!r}", f"did you mean {near[0]}?" if near else f"one of {known}"
        )
    CODECS[name](Place(0, 1, "k"), options)  # refuses options it does not know
    return Named(name, CODECS[name], tuple(options))


def _refused(spec: str, reason: str, hint: str) -> InvalidArgument:
    return InvalidArgument("codec", f"{reason} in {spec!r}", hint)


__all__ = ["BLOCK", "CODECS", "Codec", "CodecSpec", "KeyOrValue", "Make", "Place", "parse"]
