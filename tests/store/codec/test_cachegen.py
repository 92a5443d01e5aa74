"""CacheGen: bins by layer, and what one scale for all channels costs."""

from __future__ import annotations

import torch

from kvweave.store.codec import parse


def levels(spec, n):
    choice = parse(spec)
    return [(choice.codec(i, n, "k").levels, choice.codec(i, n, "v").levels) for i in range(n)]


def test_early_layers_have_more_bins():
    assert levels("cachegen", 6) == [(31, 31), (31, 31), *[(15, 15)] * 4]
    assert levels("cachegen:absmax:64", 7)[2:4] == [(63, 31), (31, 31)]
    assert levels("cachegen:9", 1) == [(9, 9)]


def error(spec, x):
    codec = parse(spec).codec(0, 1, "k")
    y = torch.empty_like(x)
    codec.decode(memoryview(b"".join(codec.encode(x))), y)
    return x - y


def test_with_loud_channels_a_scale_for_all_is_much_worse():
    x = torch.randn(256, 2, 32, generator=torch.Generator().manual_seed(0))
    x[:, 1, 5] *= 50
    quiet = [float(error(spec, x)[:, 0].norm()) for spec in ("cachegen:absmax", "cachegen")]
    assert quiet[0] > 5 * quiet[1]


def test_anchors_help_tokens_that_are_alike_and_only_those():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(250, 2, 32, generator=generator)
    alike = x[::10].repeat_interleave(10, 0) + 0.01 * x
    for data, better in ((alike, True), (x, False)):
        plain, anchored = (float(error(s, data).norm()) for s in ("cachegen", "cachegen:anchor"))
        assert (anchored < plain) == better


def test_anchors_themselves_are_kept_in_8_bits():
    x = torch.randn(25, 1, 8, generator=torch.Generator().manual_seed(0))
    x[1:10] = x[0] + 100
    e = error("cachegen:anchor", x)
    assert e[::10].abs().max() < 0.1 * e.abs().max()
