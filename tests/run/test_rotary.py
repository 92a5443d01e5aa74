"""Rotations found and applied: python -m pytest tests/run/test_rotary.py"""

from __future__ import annotations

import pytest
import torch

from kvweave.run.rotary import STATIC, Rotation, identify

FREQ = 1.0 / 100.0 ** (torch.arange(4) / 4)


@pytest.mark.parametrize("interleaved", [False, True])
def test_apply_turns_pairs_as_complex_numbers(interleaved: bool) -> None:
    spec = Rotation(8, interleaved, FREQ)
    x = torch.randn(5, 3, 10, dtype=torch.float64)
    positions = torch.tensor([0, 1, 7, 100, 3000])
    found = spec.apply(x, spec.angles(positions))
    pairs = x[..., :8].view(5, 3, 4, 2) if interleaved else x[..., :8].view(5, 3, 2, 4).mT
    angle = (positions[:, None].float() * FREQ).double()
    turned = (
        torch.view_as_complex(pairs.contiguous())
        * torch.polar(torch.ones_like(angle), angle)[:, None]
    )
    wanted = torch.view_as_real(turned)
    wanted = wanted.reshape(5, 3, 8) if interleaved else wanted.mT.reshape(5, 3, 8)
    assert torch.allclose(found[..., :8], wanted, atol=1e-6)
    assert torch.equal(found[..., 8:], x[..., 8:]), "dims beyond the width stay"
    assert torch.equal(found[0], x[0]), "position 0 is the identity"


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("ratio", [None, torch.tensor([0.5, 1.0, -2.0, 3.0])])
def test_what_is_turned_back_is_what_it_was(interleaved: bool, ratio: torch.Tensor | None) -> None:
    """To float64, though cosines and sines are rounded to float32."""
    spec = Rotation(8, interleaved, FREQ, ratio=ratio)
    x = torch.randn(64, 3, 10, dtype=torch.float64)
    angles = spec.angles(torch.arange(64) * 31)
    again = spec.apply(spec.apply(x, angles), spec.back(angles))
    assert torch.allclose(again, x, rtol=0, atol=1e-14 if ratio is None else 1e-6)
    assert torch.equal(STATIC.apply(x, STATIC.back(STATIC.angles(torch.arange(64)))), x)


def test_half_precision_is_rounded_once() -> None:
    spec = Rotation(8, False, FREQ)
    x = torch.randn(64, 3, 8).bfloat16()
    angles = spec.angles(torch.arange(64) * 31)
    wanted = spec.apply(x.float(), angles).bfloat16()
    assert torch.equal(spec.apply(x, angles), wanted)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width", [8, 12])
def test_identify_finds_the_rotation(sign: int, interleaved: bool, width: int) -> None:
    freqs = [0.5 * FREQ, FREQ, 1.0 / 100.0 ** (torch.arange(6) / 6)]
    true = Rotation(width, interleaved, sign * freqs[1 if width == 8 else 2])
    x = torch.randn(1, 2, 12, dtype=torch.float64)
    keys = {p: true.apply(x, true.angles(torch.tensor([p])))[0] for p in (0, 1, 37, 611)}
    found = identify(keys, freqs, 1e-5)
    assert found is not None and found.key == true.key


def test_identify_refuses_what_is_no_rotation() -> None:
    x = torch.randn(2, 12)
    assert identify(dict.fromkeys((0, 1, 37), x), [FREQ], 1e-4) is STATIC
    assert identify({p: x + p for p in (0, 1, 37)}, [FREQ], 1e-4) is None
    spec = Rotation(8, False, FREQ)
    scaled = {p: spec.apply(x[None], spec.angles(torch.tensor([p])))[0] * (1 + p) for p in (0, 1)}
    assert identify(scaled, [FREQ], 1e-4) is None
