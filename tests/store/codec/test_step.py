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


def test_values_have_twice_the_step():
    x = gaussian(256, 1, 32)
    k, v = (float((x - coded("step:0.2", x, part)[0]).norm()) for part in ("k", "v"))
    assert 1.9 < v / k < 2.1


def test_the_mean_of_a_key_costs_nothing():
    x = gaussian(256, 2, 32)
    means = 20 * gaussian(1, 2, 32)
    sizes = [coded("step", each)[1] for each in (x, x + means)]
    assert abs(sizes[1] / sizes[0] - 1) < 0.03
    assert coded("step", x + means, "v")[1] / coded("step", x, "v")[1] < 1, "coarser"


def test_a_loud_channel_has_longer_steps_and_the_others_do_not():
    x = gaussian(256, 1, 33)
    loud = x.clone()
    loud[:, 0, 3] *= 100
    (plain, _), (y, _) = coded("step:0.2", x), coded("step:0.2", loud)
    others = torch.arange(33) != 3
    assert torch.allclose(plain[:, :, others], y[:, :, others], atol=0.02)
    far = (loud - y)[:, 0, 3].abs().max() / loud[:, 0, 3].abs().max()
    assert 1 / 600 < far < 1 / 120
