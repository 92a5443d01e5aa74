"""Integers: exact bytes, and what the axis is for."""

from __future__ import annotations

import torch

from kvweave.store.codec import parse


def encoded(spec, x, part="k"):
    return [bytes(piece) for piece in parse(spec).codec(0, 1, part).encode(x)]


def error(spec, x, part="k"):
    codec = parse(spec).codec(0, 1, part)
    y = torch.empty_like(x)
    codec.decode(memoryview(b"".join(codec.encode(x))), y)
    return (x - y).norm(dim=0)


def test_the_bytes_of_a_small_block():
    x = torch.arange(16.0).view(16, 1, 1) * 2
    scale, middle, symbols = encoded("int4", x)
    assert torch.frombuffer(bytearray(middle), dtype=torch.bfloat16).tolist() == [15.0]
    assert torch.frombuffer(bytearray(scale), dtype=torch.bfloat16).item() == 2.0
    assert symbols.hex() == "1032547698badcfe"


def test_a_loud_channel_of_the_keys_costs_the_others_nothing():
    x = torch.randn(256, 2, 16, generator=torch.Generator().manual_seed(0))
    loud = x.clone()
    loud[:, 0, 3] *= 100
    for spec in ("int8", "int5", "int4", "int4+zstd"):
        assert torch.equal(error(spec, x)[1], error(spec, loud)[1]), "another head"
    assert torch.allclose(error("int4", x)[0, :3], error("int4", loud)[0, :3])
    assert error("int4:token", loud)[1].mean() > 3 * error("int4:token", x)[1].mean()
    assert error("int4", x, "v").equal(error("int4:token", x)), "values have a scale per token"


def test_a_loud_token_of_the_values_costs_the_others_nothing():
    x = torch.randn(64, 1, 16, generator=torch.Generator().manual_seed(0))
    x[5] *= 100
    by_token, by_channel = error("int4", x[:, :, :], "v"), error("int4:channel", x, "v")
    assert by_token.mean() < 2 * by_channel.mean()
    codec = parse("int4").codec(0, 1, "v")
    y = torch.empty_like(x)
    codec.decode(memoryview(b"".join(codec.encode(x))), y)
    assert (x - y)[6:].abs().max() < 0.3


def test_entropy_coding_makes_quiet_channels_smaller():
    x = torch.randn(256, 2, 64, generator=torch.Generator().manual_seed(0))
    quiet = x * torch.logspace(-2, 0, 64)
    size = {name: sum(map(len, encoded("int4+zstd", t))) for name, t in (("x", x), ("q", quiet))}
    assert size["q"] < 0.85 * size["x"]
    assert sum(map(len, encoded("int4", quiet))) == sum(map(len, encoded("int4", x)))
