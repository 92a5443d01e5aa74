"""A spec says for each layer and part what it is coded with."""

from __future__ import annotations

import pytest

from kvweave.errors import InvalidArgument
from kvweave.store.codec import parse


def names(spec, n=6):
    choice = parse(spec)
    return [(choice.named(i, "k").name, choice.named(i, "v").name) for i in range(n)]


def test_one_codec_for_all():
    assert names("int8") == [("int8", "int8")] * 6
    assert names("int8/int4+zstd", 2) == [("int8", "int4+zstd")] * 2


def test_codecs_by_layer():
    a, b, c = ("raw", "raw"), ("int8", "int4"), ("int4+zstd",) * 2
    assert names("0:raw,1-3:int8/int4,4-:int4+zstd") == [a, b, b, b, c, c]
    assert names(" 0-1:raw , 2-:int8/int4 ", 3) == [a, a, b]


def test_options_follow_their_codec():
    choice = parse("0-1:cachegen:absmax:64,2-:step:0.2/int4:token")
    assert choice.named(1, "v").options == ("absmax", "64")
    assert choice.named(2, "k").options == ("0.2",)
    assert choice.codec(2, 4, "k").step == 0.2
    assert choice.codec(2, 4, "v").axis == "token"


def test_only_raw_is_raw():
    choice = parse("raw/raw+zstd")
    assert choice.is_raw(0, "k") and not choice.is_raw(0, "v")


@pytest.mark.parametrize(
    "spec",
    [
        "0-3:int8",  # ends
        "1-:int8",  # begins late
        "0-3:int8,5-:int4",  # a gap
        "0-3:int8,3-:int4",  # one layer twice
        "0-:int8,4-:int4",  # the first has no end
        "int8,int4",
        "0-3:int8,int4",
        "0-3:int8,4-2:raw,3-:int4",
        "0-3:,4-:int4",
        "int8/",
        "/int8",
    ],
)
def test_unclear_specs_are_refused(spec):
    with pytest.raises(InvalidArgument) as caught:
        parse(spec)
    assert spec in str(caught.value) and caught.value.hint
