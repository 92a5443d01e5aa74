"""8-bit floats: every byte has the value torch gives it, the largest is that of the channel."""

from __future__ import annotations

import torch

from kvweave.store.codec import parse
from kvweave.store.codec.fp8 import values_of


def test_every_byte_has_its_value():
    every = torch.arange(256).to(torch.uint8)
    wanted = every.view(torch.float8_e4m3fn).float()
    found = values_of(every)
    finite = ~wanted.isnan()
    assert finite.sum() == 254 and torch.equal(found[finite], wanted[finite])


def test_the_largest_of_a_channel_or_token_is_the_largest_there_is():
    x = torch.randn(50, 2, 8, generator=torch.Generator().manual_seed(0))
    for part, over in (("k", (0,)), ("v", (1, 2))):
        codec = parse("fp8").codec(0, 1, part)
        y = torch.empty_like(x)
        codec.decode(memoryview(b"".join(codec.encode(x))), y)
        ratio = y.abs().amax(over) / x.abs().amax(over)
        assert ratio.sub(1).abs().max() <= 2**-4
        assert (x - y).abs().max() <= 2**-4 * x.abs().max()
