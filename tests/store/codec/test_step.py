"""One step a head: spread decides the bits, outliers coarsen it."""

from __future__ import annotations

import torch

from kvweave.store.codec import parse


def coded(spec, x, part="k"):
    codec = parse(spec).codec(0, 1, part)
    data = b"".join(codec.encode(x))
    y = torch.empty_like(x)
    codec.decode(memoryview(data), y)
    return y, len(data)


def gaussian(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def test_no_key_is_more_than_half_a_step_off():
    x = gaussian(256, 2, 33) * torch.tensor([1.0, 5.0]).view(2, 1) + 20 * gaussian(1, 2, 33)
    y, _ = coded("step:0.3", x)
    spread = (x - x.mean(0)).square().mean(0).sqrt().median(1).values
    worst = (x - y).abs().amax((0, 2)) / spread
    assert ((worst <= 0.151 * (1 + 2**-7)) & (worst > 0.14)).all()


def test_values_have_longer_steps():
    x = gaussian(256, 1, 32)
    k, v = (float((x - coded("step:0.2", x, part)[0]).norm()) for part in ("k", "v"))
    assert 1.35 < v / k < 1.45


def test_a_loud_channel_has_longer_steps_and_the_others_do_not():
    x = gaussian(256, 1, 33)
    loud = x.clone()
    loud[:, 0, 3] *= 100
    (plain, _), (y, _) = coded("step:0.2", x), coded("step:0.2", loud)
    others = torch.arange(33) != 3
    assert torch.allclose(plain[:, :, others], y[:, :, others], atol=0.02)
    far = (loud - y)[:, 0, 3].abs().max() / loud[:, 0, 3].abs().max()
    assert 1 / 600 < far < 1 / 120


def test_means_are_kept_apart_where_that_pays():
    x, means = gaussian(256, 2, 32), 5 * gaussian(1, 2, 32)
    plain, apart, short = (coded("step", each)[1] for each in (x, x + means, (x + means)[:20]))
    assert 100 <= apart - plain < 160, "64 means of 2 bytes"
    centred = coded("step", (x + 0.3 * gaussian(1, 2, 32))[:20])[1]
    assert centred < short + 128, "20 tokens do not pay for them"


def test_few_symbols_are_coded_in_pairs():
    x = gaussian(256, 2, 32)
    most = {1: 2.2, 2: 1.6, 3: 1.2}  # bits; 2.1 is the entropy of a Gaussian's at its own spread
    for step, bits in most.items():
        y, size = coded(f"step:{step}", x)
        assert 8 * size / x.numel() < bits, step
        assert (x - y).abs().max() <= step / 2 * 1.1
