from __future__ import annotations

from dataclasses import replace
from hashlib import blake2b

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvweave.chunk.identity import (
    KINDS,
    TIERS,
    ModelFingerprint,
    check_kind,
    check_name,
    check_namespace,
    check_tier,
    chunk_digest,
    token_bytes,
)
from kvweave.errors import InvalidArgument, InvalidName, ModelMismatch

FINGERPRINT = ModelFingerprint("org/model", "abc", "tok", "float32", "default")


@pytest.mark.parametrize(
    "name",
    ["a", "docs/faq", "chat/42/u-007", "A.b_c@d+e:f=g~h i-9", "...", ".hidden/..x", "Größe/日本",
     "हिन्दी", "x" * 200, "a/" * 99 + "aa"],
)  # fmt: skip
def test_valid_names_come_back(name):
    assert check_name(name) == name


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", "it is empty"),
        ("x" * 201, "it has 201 characters, 200 is the most"),
        ("#17", "a leading '#' marks a chunk id"),
        ("/a", "it has an empty part (a leading, trailing or double '/')"),
        ("a/", "it has an empty part (a leading, trailing or double '/')"),
        ("a//b", "it has an empty part (a leading, trailing or double '/')"),
        (".", "the part '.' is not allowed"),
        ("a/../b", "the part '..' is not allowed"),
        ("a/.", "the part '.' is not allowed"),
        ("a*", "'*' is a glob character"),
        ("a/[b]", "'[' is a glob character"),
        ("{a", "'{' is a glob character"),
        ("a\n", "the character '\\n' is not allowed"),
        ("a#b", "the character '#' is not allowed"),
        ("a\\b", "the character '\\\\' is not allowed"),
        ("a\x00", "the character '\\x00' is not allowed"),
        ("\ud800", "the character '\\ud800' is not allowed"),
        ("a\u200bb", "the character '\\u200b' is not allowed"),
    ],
)
def test_invalid_names_say_why(name, reason):
    with pytest.raises(InvalidName) as caught:
        check_name(name)
    assert caught.value.reason == reason


def test_one_spelling_of_an_accent():
    assert check_name("cafe\u0301") == "caf\u00e9"


@given(st.text(max_size=12))
def test_check_name_is_stable_and_says_no_otherwise(name):
    try:
        normal = check_name(name)
    except InvalidName:
        return
    assert check_name(normal) == normal
    assert normal and not normal.startswith(("#", "/")) and not normal.endswith("/")
    assert not {".", "..", ""} & set(normal.split("/"))


@pytest.mark.parametrize("namespace", ["a/b", "x" * 65, "a*", "#a", ".."])
def test_invalid_namespaces(namespace):
    with pytest.raises(InvalidArgument, match="namespace"):
        check_namespace(namespace)


def test_valid_namespaces():
    assert [check_namespace(n) for n in ("", "tenant-1", "x" * 64)] == ["", "tenant-1", "x" * 64]


def test_kinds_and_tiers():
    assert [check_kind(kind) for kind in KINDS] == list(KINDS)
    assert [check_tier(tier) for tier in TIERS] == ["gpu", "ram", "disk", "remote", "none"]
    with pytest.raises(InvalidArgument, match="'poem' is none of system, user"):
        check_kind("poem")
    with pytest.raises(InvalidArgument, match="'tape' is none of gpu, ram"):
        check_tier("tape")


def test_token_bytes():
    assert token_bytes([1, 0x01020304]) == bytes([1, 0, 0, 0, 4, 3, 2, 1])
    assert token_bytes(np.array([2**32 - 1])) == b"\xff" * 4
    assert token_bytes([]) == b""


@pytest.mark.parametrize("tokens", [[-1], [2**32], [1.5], ["a"], [[1, 2]], [True]])
def test_tokens_that_are_not_ids(tokens):
    with pytest.raises(InvalidArgument, match="tokens"):
        token_bytes(tokens)


def test_chunk_digest_is_what_the_format_says():
    def framed(part: bytes) -> bytes:
        return len(part).to_bytes(4, "little") + part

    text = framed(b"ns") + framed(FINGERPRINT.digest()) + framed(b"base") + token_bytes([5, 6])
    wanted = blake2b(text, digest_size=16, person=b"kvweave-chunk").digest()
    assert chunk_digest(FINGERPRINT, b"base", [5, 6], "ns") == wanted
    assert FINGERPRINT.digest().hex() == "c19e714b566005eceaae69562244bf41"


def test_anything_different_is_another_digest():
    digests = {
        chunk_digest(FINGERPRINT, b"", [1, 2]),
        chunk_digest(FINGERPRINT, b"", [2, 1]),
        chunk_digest(FINGERPRINT, b"", [1, 2], "a"),
        chunk_digest(FINGERPRINT, b"a", [1, 2]),
        chunk_digest(FINGERPRINT, b"\x01\0\0\0", [2]),
        *(
            chunk_digest(replace(FINGERPRINT, **{field: "other"}), b"", [1, 2])
            for field in FINGERPRINT.to_dict()
        ),
    }
    assert len(digests) == 12


def test_fingerprint_round_trip_and_first_difference():
    assert ModelFingerprint.from_dict(FINGERPRINT.to_dict()) == FINGERPRINT
    FINGERPRINT.require(ModelFingerprint("org/model", "abc", "tok", "float32", "default"))
    with pytest.raises(ModelMismatch) as caught:
        FINGERPRINT.require(replace(FINGERPRINT, dtype="bfloat16", adapter="lora"))
    error = caught.value
    assert (error.field, error.wanted, error.found) == ("dtype", "float32", "bfloat16")
    with pytest.raises(InvalidArgument, match="missing or unknown: colour, rope"):
        ModelFingerprint.from_dict(
            {"model": "m", "weights": "w", "tokenizer": "t", "dtype": "d", "colour": "red"}
        )
