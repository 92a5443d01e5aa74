"""A record gives back what was stored, by layer, or says that it cannot, or that it is another's."""

from __future__ import annotations

import json
import struct

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from store.records import CHUNK, MODEL, about, load, store

from kvweave.errors import CorruptChunk, FormatTooNew, InvalidArgument
from kvweave.store.codec import CODECS, parse
from kvweave.store.kv import KV, LayerShape
from kvweave.store.record.encode import encode
from kvweave.store.record.layout import FIXED, START, Head
from kvweave.store.record.transfer import digest_of, fault, is_lossy, key_of, losses, read_heads
from kvweave.store.tier.base import PAGE, Outcome, checked

PLAIN = (LayerShape(2, 8, 2, 8),) * 3
LATENT = (LayerShape(1, 5, 1, 3), LayerShape(2, 4, 3, 2))  # like MLA: two tensors of their own


class Held:
    """The least tier: a dictionary that counts what is read."""

    name = "held"

    def __init__(self):
        self.values = {}
        self.read = 0
        self.answer = None  # given instead of the truth

    def put(self, puts, *, durable=False, deadline=None):
        for put in puts:
            self.values[put.key] = bytearray(b"".join(put.data))
        return [Outcome("done")] * len(puts)

    def get(self, gets, *, deadline=None):
        return [self.answer or self._one(get) for get in gets]

    def _one(self, get):
        value = self.values.get(get.key)
        if value is None:
            return Outcome("missing")
        at = get.offset
        for into in get.into:
            if at + len(into) > len(value):
                return Outcome("wrong", "beyond the end")
            into[:] = value[at : at + len(into)]
            at += len(into)
        self.read += at - get.offset
        return checked(get)

    def look(self, keys, *, deadline=None):
        return [len(self.values[k]) if k in self.values else Outcome("missing") for k in keys]


def make_kv(n, shapes=PLAIN, dtype=torch.float32, seed=0):
    made = KV.empty(shapes, n, dtype, torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    for tensor in (*made.k, *made.v):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return made


def record(kv, spec="raw"):
    return bytearray(b"".join(encode(kv, parse(spec), MODEL, CHUNK)))


def body(data):
    """The bytes behind the head."""
    return memoryview(data)[Head.parse(data).n_head :]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip((*a.k, *a.v), (*b.k, *b.v), strict=True))


def test_the_layout_is_what_the_docstring_says():
    data = record(make_kv(300))
    magic, version, n_head, n_json, n_sections, n_bytes = struct.unpack_from("<8s4IQ", data)
    assert (magic, version, n_head, n_sections) == (b"kvweave\n", 2, 4096, 3 * 2 * 2)
    assert n_bytes == len(data) == 4096 + 3 * 40960  # 2 * 19200 bytes of rows, up to 10 pages
    assert json.loads(data[40 : 40 + n_json]) == {
        "model": MODEL, "chunk": CHUNK, "n_tokens": 300, "dtype": "float32", "layers": [[2, 8, 2, 8]] * 3,
        "codec": "raw", "block": 256, "lossy": False,
    }  # fmt: skip
    at = -(-(40 + n_json) // 8) * 8
    offsets, lengths, sums = zip(
        *(struct.unpack_from("<QQQ", data, at + 24 * i) for i in range(4)), strict=True
    )
    assert offsets == (4096, 4096 + 16384, 4096 + 19200, 4096 + 19200 + 16384)
    assert lengths == (16384, 2816, 16384, 2816)
    ends = (*offsets[1:], 4096 + 40960)
    assert sums == tuple(
        xxhash.xxh3_64_intdigest(bytes(data[a:b])) for a, b in zip(offsets, ends, strict=True)
    )


@pytest.mark.parametrize("shape", [LayerShape(2, 8, 2, 0), LayerShape(2, 0, 2, 8)])
@pytest.mark.parametrize("spec", [*CODECS, "cachegen:absmax:anchor:64", "step:2"])
def test_what_has_no_width_takes_no_bytes_whatever_the_codec(spec, shape):
    kv = make_kv(300, (shape,))
    data = record(kv, spec)
    head = Head.parse(data)
    back = head.decode(body(data))
    empty, full = (1, 0) if shape.v_dim == 0 else (0, 1)
    lengths = head.table["length"].reshape(2, 2)
    assert not lengths[empty].any() and lengths[full].all()
    assert [t.shape for t in (back.k[0], back.v[0])] == [kv.k[0].shape, kv.v[0].shape]
    x, y = ((pair.k[0], pair.v[0])[full] for pair in (kv, back))
    assert (x - y).abs().max() <= 2.2 * x.abs().max()


@pytest.mark.parametrize("shapes", [PLAIN, LATENT, (LayerShape(1, 4, 1, 0),)])
@pytest.mark.parametrize("n", [1, 256, 257, 700])
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str
)
def test_raw_is_bit_equal(n, shapes, dtype):
    kv = make_kv(n, shapes, dtype)
    data = record(kv)
    head = Head.parse(data)
    assert (head.n_tokens, head.shapes, head.dtype) == (n, tuple(shapes), dtype)
    assert (head.model, head.n_bytes, head.choice.spec) == (MODEL, len(data), "raw")
    assert same(head.decode(body(data)), kv)
    assert len(data) % PAGE == 0


def test_raw_is_not_copied_on_the_way_in_or_out():
    kv = make_kv(600)
    pieces = encode(kv, parse("raw"), MODEL, CHUNK)
    kv.k[1][299] += 1
    data = bytearray(b"".join(pieces))
    back = Head.parse(data).decode(body(data))
    assert torch.equal(back.k[1], kv.k[1]), "a piece is the tensor's own memory"
    data[-PAGE * 30 :] = bytes(PAGE * 30)
    assert not back.v[2][200:].any() and back.k[0].any(), "a tensor is the buffer's own memory"
    again = Head.parse(bytes(data)).decode(body(bytes(data)))
    assert torch.equal(again.v[2], back.v[2]), "what cannot be written is copied"


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_layers_are_read_alone(draw):
    shapes = draw.draw(st.sampled_from([PLAIN, LATENT]))
    spec = draw.draw(st.sampled_from(["raw", "0:raw,1-:int8", "raw/step", "int4+zstd"]))
    data = record(make_kv(draw.draw(st.integers(1, 800)), shapes), spec)
    head = Head.parse(data)
    whole = head.decode(body(data))
    first = draw.draw(st.integers(0, len(shapes) - 1))
    last = draw.draw(st.integers(first + 1, len(shapes)))
    span = head.layers(first, last)
    assert span.offset % PAGE == 0 == span.n_bytes % PAGE
    found = head.decode(memoryview(data)[span.offset :][: span.n_bytes], first, last)
    assert same(found, KV(whole.k[first:last], whole.v[first:last]))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_changed_byte_goes_unnoticed(draw):
    tier, kv = Held(), make_kv(270, LATENT)
    key = store(tier, kv)
    value = tier.values[key]
    value[draw.draw(st.integers(0, len(value) - 1))] ^= draw.draw(st.integers(1, 255))
    found = load(tier, key, about(kv))
    newer = value[8:12] != (2).to_bytes(4, "little")
    assert isinstance(found, Outcome) and found.why
    assert found.state == "wrong" or (newer and found.state == "failed")


def test_a_shortened_or_foreign_value_is_wrong():
    tier, kv = Held(), make_kv(270)
    key = store(tier, kv)
    whole = tier.values[key]
    for n in (0, 10, START, 4095, 4096, len(whole) - 1):
        tier.values[key] = whole[:n]
        assert load(tier, key, about(kv)).state == "wrong", n
    tier.values[key] = bytearray(b"something else") * 1000
    assert load(tier, key, about(kv)).state == "wrong"
    with pytest.raises(CorruptChunk):
        Head.parse(bytes(5000))


def test_what_cannot_be_had_is_said():
    tier, kv = Held(), make_kv(20)
    key = key_of(CHUNK, parse("raw"), False)
    assert load(tier, key, about(kv)).state == "missing"
    store(tier, kv)
    tier.answer = Outcome("late", "slow")
    assert load(tier, key, about(kv)).state == "late"


def test_a_record_says_whose_it_is():
    """Exchanged, of another model, too short, coded otherwise than its key says: all are wrong."""
    tier, kv, other = Held(), make_kv(20), make_kv(20, seed=1)
    mine, theirs = store(tier, kv), store(tier, other, chunk="0d" * 16)
    tier.values[mine], tier.values[theirs] = tier.values[theirs], tier.values[mine]
    for key, chunk in ((mine, CHUNK), (theirs, "0d" * 16)):
        found = load(tier, key, about(kv, chunk))
        assert found.state == "wrong" and "chunk" in found.why
    tier.values[mine] = tier.values[theirs]
    assert same(load(tier, mine, about(kv)), kv)
    assert "model" in load(tier, mine, about(kv), model="cd" * 16).why
    for wanted in (
        about(make_kv(19)),
        about(make_kv(20, LATENT)),
        about(make_kv(20, dtype=torch.float16)),
    ):
        assert load(tier, mine, wanted).state == "wrong"
    tier.values[key_of(CHUNK, parse("raw"), True)] = tier.values[mine]
    assert load(tier, key_of(CHUNK, parse("raw"), True), about(kv)).state == "wrong"


def test_a_record_of_format_1_is_read_and_does_not_say_whose_it_is():
    data = record(make_kv(30))
    struct.pack_into("<I", data, 8, 1)
    head = Head.parse(resigned(data, lambda said: said))
    assert head.chunk == "" and same(head.decode(body(data)), make_kv(30))
    assert "does not say" in fault(
        head, key_of(CHUNK, parse("raw"), False), MODEL, about(make_kv(30))
    )


def test_keys_tell_records_apart_that_may_differ():
    specs = [
        "raw",
        "raw+zstd",
        "int8",
        "int4+zstd",
        "int8/int4",
        "0:raw,1-:int8",
        "cachegen:absmax",
    ]
    made = {
        key_of(CHUNK, parse(spec), lossy, g) for spec in specs for lossy in (0, 1) for g in (0, 1)
    }
    assert len(made) == 2 * 2 * len(specs), "what was lost before a codec is lost behind it too"
    for key in made:
        assert digest_of(key) == CHUNK and is_lossy(key) == (losses(key) > 0)
    once = {key_of(CHUNK, parse(spec), False) for spec in specs[2:]}
    assert {losses(key) for key in once} == {1} and {losses(key) for key in made} == {0, 1, 2}


def test_a_newer_format_is_told_apart():
    data = record(make_kv(3))
    struct.pack_into("<I", data, 8, 4)
    with pytest.raises(FormatTooNew) as caught:
        Head.parse(data, "here")
    assert (caught.value.data["found"], caught.value.data["supported"]) == (4, 3)


def resigned(data, change):
    """A head that is changed and has the right checksum."""
    n_json = FIXED.unpack_from(data)[3]
    said = change(data[START : START + n_json])
    data[START : START + n_json] = said
    state = xxhash.xxh3_64(data[: FIXED.size])
    state.update(data[START:4096])
    struct.pack_into("<Q", data, FIXED.size, state.intdigest())
    return data


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"n_tokens":300', b'"n_tokens":900'),
        (b'"codec":"raw"', b'"codex":"raw"'),
        (b'"model"', b'"nodel"'),
        (b"{", b"["),
    ],
)
def test_a_head_that_says_what_cannot_be_is_refused(old, new):
    data = record(make_kv(300))
    Head.parse(resigned(data, lambda said: said))
    with pytest.raises(CorruptChunk, match="cannot be"):
        Head.parse(resigned(data, lambda said: said.replace(old, new)))


@pytest.mark.parametrize(
    ("old", "new", "unknown"),
    [
        (b'"codec":"raw"', b'"codec":"row"', "the codec 'row'"),
        (b'"dtype":"float32"', b'"dtype":"float31"', "float31 rows"),
        (b'"block":256', b'"block":128', "blocks of 128 tokens"),
    ],
)
def test_what_is_not_known_here_is_no_damage(old, new, unknown):
    """Another version's codec, or one that is not installed: nobody may remove such a record."""
    kv, tier = make_kv(300), Held()
    key = store(tier, kv)
    data = resigned(bytearray(tier.values[key]), lambda said: said.replace(old, new))
    with pytest.raises(FormatTooNew, match=f"has {unknown}, which this kvweave does not know"):
        Head.parse(data)
    tier.values[key] = bytes(data)
    (found,) = read_heads(tier, [(key, about(kv))], MODEL, None)
    assert found.state == "failed" and unknown in found.why


def test_long_heads_are_read_in_two_steps():
    kv, tier = make_kv(256 * 200, (LayerShape(1, 1, 1, 1),) * 3, torch.float16), Held()
    key = store(tier, kv)
    (head,) = read_heads(tier, [(key, about(kv))], MODEL, None)
    assert head.n_head == 32768 > 16384 and same(load(tier, key, about(kv)), kv)


def test_one_record_has_one_dtype_with_a_name():
    kv = make_kv(3)
    for k in (kv.k[0].to(torch.float16), kv.k[0].to(torch.complex64)):
        with pytest.raises(InvalidArgument):
            encode(KV([k, *kv.k[1:]], kv.v), parse("raw"), MODEL, CHUNK)


def test_no_tokens_are_a_record_too():
    data = record(make_kv(0))
    assert Head.parse(data).decode(body(data)).n_tokens == 0


def test_strided_tensors_are_stored_by_value():
    kv = make_kv(300)
    turned = KV([k.transpose(0, 1).contiguous().transpose(0, 1) for k in kv.k], kv.v)
    assert record(turned) == record(kv)
