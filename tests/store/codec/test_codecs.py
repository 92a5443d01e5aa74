"""What every codec keeps to: shapes, dtypes, errors, hostile bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave.errors import CorruptChunk, InvalidArgument
from kvweave.store.codec import CODECS, Place, parse

SPECS = (*CODECS, "int4:channel", "int4:token", "int5+zstd:channel", "step:0.1", "cachegen:absmax",
         "cachegen:anchor", "cachegen:absmax:anchor:64")  # fmt: skip
# relative error (Frobenius) of Gaussian values: a little over what was found
WORST = {"raw": 0, "raw+zstd": 0, "fp8": 0.028, "int8": 0.009, "int5": 0.08, "int4": 0.16,
         "step:0.1": 0.06, "step": 0.24, "cachegen": 0.17, "cachegen:absmax": 0.16,
         "cachegen:anchor": 0.25, "cachegen:absmax:anchor:64": 0.12}  # fmt: skip
BYTES = {"raw": 4, "fp8": 1.05, "fp8+zstd": 0.86, "int8": 1.05, "int8+zstd": 0.96, "int5": 0.66,
         "int5+zstd": 0.58, "int4": 0.54, "int4+zstd": 0.46}  # fmt: skip
PARTS = ("k", "v")


def gaussian(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def through(spec, x, part="k", out=None):
    codec = parse(spec).codec(0, 8, part)
    data = memoryview(b"".join(codec.encode(x)))
    out = torch.empty_like(x) if out is None else out
    codec.decode(data, out)
    return out


def off(x, y):
    return float((x.double() - y.double()).norm() / x.double().norm())


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("spec", SPECS)
def test_gaussian_values_come_back_as_near_as_stated(spec, part):
    x = gaussian(256, 4, 32)
    error = off(x, through(spec, x, part))
    assert error <= WORST.get(spec, WORST.get(spec.split("+")[0].split(":")[0])), error
    assert error > 0 or spec.startswith("raw")


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("spec", BYTES)
def test_bytes_of_a_value(spec, part):
    pieces = parse(spec).codec(0, 8, part).encode(gaussian(256, 4, 64))
    assert 0.78 * BYTES[spec] < sum(map(len, pieces)) / (256 * 4 * 64) <= BYTES[spec]


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 2, 8), (7, 3, 5), (256, 1, 3)])
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("spec", SPECS)
def test_any_shape(spec, part, shape):
    x = gaussian(*shape)
    y = through(spec, x, part)
    assert y.shape == x.shape and (x - y).abs().max() <= 2.2 * x.abs().max()
    assert torch.isfinite(y).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spec", SPECS)
def test_any_dtype_in_and_out(spec, dtype):
    x = gaussian(40, 2, 8).to(dtype)
    wide = through(spec, x.float())
    if spec.startswith("raw"):
        assert torch.equal(through(spec, x), x)
    else:
        assert torch.equal(through(spec, x, out=torch.empty(40, 2, 8)), wide)
        assert torch.equal(through(spec, x), wide.to(dtype))


@pytest.mark.parametrize("spec", SPECS)
def test_out_may_be_part_of_something_else(spec):
    x = gaussian(40, 2, 8)
    large = torch.zeros(2, 50, 8).transpose(0, 1)
    through(spec, x, out=large[5:45])
    assert torch.equal(large[5:45], through(spec, x))
    assert not large[:5].any() and not large[45:].any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), 2e17])
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("spec", SPECS)
def test_values_that_are_not_finite_are_refused_or_kept(spec, part, bad):
    x = gaussian(30, 2, 8)
    x[17, 1, 3] = bad
    if spec.startswith("raw"):
        assert torch.equal(through(spec, x), x) or bad != bad
        assert through(spec, x).view(torch.int32).equal(x.view(torch.int32))
    else:
        with pytest.raises(CorruptChunk, match="finite"):
            parse(spec).codec(0, 8, part).encode(x)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("size", [0.0, 1e-38, 1e-30, 1.0, 1e10, 1e16])
@pytest.mark.parametrize("spec", SPECS)
def test_any_size(spec, size, part):
    x = gaussian(64, 2, 8) * size
    y = through(spec, x, part)
    assert torch.isfinite(y).all()
    assert (y - x).abs().max() <= max(1e-34, 0.4 * float(x.abs().max()))


@pytest.mark.parametrize("spec", SPECS)
def test_one_outlier_is_not_cut_off(spec):
    x = gaussian(256, 2, 16)
    x[100, 1, 7] = 1e4
    for part in PARTS:
        y = through(spec, x, part)
        assert y[100, 1, 7] == pytest.approx(1e4, rel=0.1)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("spec", SPECS)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_bytes_that_are_too_few_or_too_many_are_refused(spec, part, data):
    n = data.draw(st.integers(1, 40))
    x = gaussian(n, 2, 8)
    codec = parse(spec).codec(0, 8, part)
    whole = b"".join(codec.encode(x))
    cut = data.draw(st.integers(0, len(whole) - 1))
    for wrong in (whole[:cut], b"", whole[cut + 1 :]):
        with pytest.raises(CorruptChunk):
            codec.decode(memoryview(wrong), torch.empty_like(x))


@pytest.mark.parametrize("spec", [s for s in SPECS if s != "raw"])
@settings(max_examples=25, deadline=None)
@given(noise=st.binary(max_size=400))
def test_noise_is_decoded_or_refused(spec, noise):
    codec = parse(spec).codec(0, 8, "k")
    try:
        codec.decode(memoryview(noise), torch.empty(5, 2, 8))
    except CorruptChunk:
        pass


@settings(max_examples=60, deadline=None)
@given(
    spec=st.sampled_from(["int8", "int5", "int4", "int8:token", "int4:token", "int4+zstd:token"]),
    seed=st.integers(0, 1000),
    shift=st.floats(-50, 50),
)
def test_an_integer_is_at_most_half_a_step_off(spec, seed, shift):
    x = gaussian(64, 2, 8, seed=seed) + shift
    y = through(spec, x)
    over = (1, 2) if "token" in spec else (0,)
    low, high = x.amin(over, keepdim=True), x.amax(over, keepdim=True)
    levels = 1 << int(spec[3])
    reach = (high - low) / 2 + (high + low).abs() / 2 * 2**-8  # the middle is a bfloat16
    if "zstd" in spec:
        reach, levels = torch.maximum(high, -low), levels - 1
    step = reach * 2 / (levels - 1) * (1 + 2**-6)
    assert ((x - y).abs() <= step / 2 * 1.0001 + 1e-6).all()


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("int9", "did you mean"),
        ("zip", "one of raw"),
        ("int4:sideways", "no such option"),
        ("raw:1", "no such option"),
        ("fp8:1", "no such option"),
        ("step:0", "step:0.5"),
        ("step:x", "step:0.5"),
        ("step:1:2", "step:0.5"),
        ("cachegen:3", "bins"),
        ("cachegen:max", "absmax"),
        ("", "one of raw"),
    ],
)
def test_what_is_no_codec_is_refused_with_a_hint(spec, says):
    with pytest.raises(InvalidArgument, match=says):
        parse(spec)


def test_every_codec_is_made_for_every_place():
    for name, make in CODECS.items():
        for part in PARTS:
            assert make(Place(3, 4, part), ()).encode(gaussian(2, 1, 4)), name
