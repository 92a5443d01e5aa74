"""A thinned chunk's record gives back its rows and of which tokens they are, or is refused; on its way
between memory and the levels below it stays what it is."""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from store.records import CHUNK, MODEL, about, load, store, thinned

from kvweave.errors import CorruptChunk, FormatTooNew, InvalidArgument
from kvweave.keep import LRU
from kvweave.store import behind, reader
from kvweave.store.arriving import Arriving, Load
from kvweave.store.codec import CODECS, parse
from kvweave.store.kv import KV
from kvweave.store.level import Level
from kvweave.store.mover import Mover
from kvweave.store.record import layout
from kvweave.store.record.encode import encode, record_bytes
from kvweave.store.record.layout import FIXED, START, Head
from kvweave.store.record.offsets import masked, offsets_of
from kvweave.store.record.transfer import Expected, fault, key_of, read_heads
from kvweave.store.shelf import Shelf
from kvweave.store.tier.base import PAGE, Outcome
from kvweave.store.tier.memory import Memory

SHAPES = [(1, 1), (5, 1), (40, 12), (300, 90), (257, 257), (2000, 600)]  # tokens, rows of a head
KEY = key_of(CHUNK, parse("raw"), False)


def record(kv: KV, spec: str = "raw") -> bytearray:
    return bytearray(b"".join(encode(kv, parse(spec), MODEL, CHUNK)))


def back(data: bytearray) -> KV:
    head = Head.parse(data)
    return head.decode(memoryview(data)[head.n_head :])


def same(a: KV | None, b: KV) -> bool:
    assert a is not None and a.kept is not None and b.kept is not None
    rows = zip((*a.k, *a.v), (*b.k, *b.v), strict=True)
    kept = zip(a.kept, b.kept, strict=True)
    return (
        a.n_tokens == b.n_tokens
        and all(torch.equal(x, y) for x, y in rows)
        and all(np.array_equal(x, y) for x, y in kept)
    )


def left(kv: KV) -> list[list[object]]:
    """The rows of each layer and head, without padding: offset, key, value."""
    assert kv.kept is not None
    return [
        [(at, k.tolist(), v.tolist()) for at, k, v in zip(*head, strict=True) if at >= 0]
        for layer in range(len(kv.k))
        for head in zip(kv.kept[layer], kv.k[layer].unbind(1), kv.v[layer].unbind(1), strict=True)
    ]


def resealed(data: bytearray) -> bytearray:
    """A record that is changed, and has the right checksums."""
    _, _, n_head, n_json, n_sections, n_bytes = FIXED.unpack_from(data)
    at = -(-(START + n_json) // 8) * 8
    table = np.frombuffer(data, layout.SECTION, n_sections, at)
    ends = [*table["offset"].tolist(), n_bytes]
    for i, section in enumerate(table):
        section["sum"] = xxhash.xxh3_64_intdigest(bytes(data[ends[i] : ends[i + 1]]))
    state = xxhash.xxh3_64(bytes(data[: FIXED.size]))
    state.update(bytes(data[START:n_head]))
    struct.pack_into("<Q", data, FIXED.size, state.intdigest())
    return data


# ---- the record


def test_the_layout_is_what_the_docstring_says() -> None:
    kept = np.array([[[0, 3, 11], [9, 10, -1]]])
    rows = [torch.arange(24.0).reshape(3, 2, 4)]
    data = record(KV(rows, rows, False, kept, 12))
    assert struct.unpack_from("<8s4I", data)[1] == 3
    n_json, n_sections = struct.unpack_from("<II", data, 16)
    said = json.loads(data[START : START + n_json])
    assert (said["n_tokens"], said["n_rows"], n_sections) == (12, 3, 3)
    assert data[PAGE : PAGE + 64] == bytes([0b1001, 0b1000, 0, 0b110]).ljust(64, b"\0")
    assert torch.equal(
        torch.frombuffer(data[PAGE + 64 :][:96], dtype=torch.float32), rows[0].flatten()
    )


@pytest.mark.parametrize("spec", [*CODECS, "0:raw,1-:int8", "int8/step"])
@pytest.mark.parametrize(("span", "n_rows"), SHAPES)
def test_it_comes_back_as_any_rows_through_that_codec(spec: str, span: int, n_rows: int) -> None:
    """Of the same tokens, and the rows as they would be in a record of a whole chunk."""
    kv = thinned(span, n_rows)
    found, whole = back(record(kv, spec)), back(record(KV(kv.k, kv.v), spec))
    assert found.kept is not None and found.kept.dtype == np.int64
    assert np.array_equal(found.kept, kv.kept) and found.n_tokens == span
    assert same(found, KV(whole.k, whole.v, False, kv.kept, span))
    assert found.lossy == parse(spec).lossy and found.altered
    assert spec != "raw" or (same(found, kv) and len(record(kv)) <= record_bytes(kv) + PAGE)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_layers_of_any_rows_are_read_alone(draw: st.DataObject) -> None:
    span = draw.draw(st.integers(1, 600))
    n_rows, layers = draw.draw(st.integers(0, span)), draw.draw(st.integers(1, 4))
    kv = thinned(
        span, n_rows, layers, draw.draw(st.integers(2, 3)), seed=draw.draw(st.integers(0, 99))
    )
    data = record(kv, draw.draw(st.sampled_from(["raw", "0:raw,1-:int8", "int4+zstd"])))
    head, whole = Head.parse(data), back(data)
    assert whole.kept is not None and np.array_equal(whole.kept, kv.kept)
    first = draw.draw(st.integers(0, layers - 1))
    last = draw.draw(st.integers(first + 1, layers))
    part = head.layers(first, last)
    assert part.offset % PAGE == 0 == part.n_bytes % PAGE
    found = head.decode(memoryview(data)[part.offset :][: part.n_bytes], first, last)
    assert same(
        found, KV(whole.k[first:last], whole.v[first:last], False, kv.kept[first:last], span)
    )  # type: ignore[index]


@pytest.mark.slow
def test_every_changed_byte_is_found() -> None:
    """Each byte of a small record, with one bit changed, then with all: never other rows."""
    tier, kv = Memory(1 << 20), thinned(9, 4, layers=2)
    store(tier, kv)
    value, wanted = tier._values[KEY], about(kv)
    assert same(load(tier, KEY, wanted), kv)  # type: ignore[arg-type]
    for at in range(len(value)):
        for change in (1 << at % 8, 255):
            value[at] ^= change
            found = load(tier, KEY, wanted)
            value[at] ^= change
            assert isinstance(found, Outcome) and found.why, at
            assert found.state == "wrong" or (8 <= at < 12 and found.state == "failed"), at


@pytest.mark.parametrize(
    ("at", "byte"),
    [(1, 0b1000_0000), (1, 0b0001_0000), (0, 0b0110_1011)],
    ids=["behind the end", "one bit behind it", "more rows than there are"],
)
def test_a_mask_that_cannot_be_is_refused(at: int, byte: int) -> None:
    """Whoever sealed it: 12 tokens are one byte and a half."""
    data = record(thinned(12, 3, layers=1))
    data[PAGE + at] = byte
    with pytest.raises(CorruptChunk):
        back(resealed(data))
    tier = Memory(1 << 20)
    store(tier, thinned(12, 3, layers=1))
    tier._values[KEY][:] = data
    with pytest.raises(CorruptChunk):
        load(tier, KEY)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"n_rows":3', b'"n_rows":9'),
        (b'"n_rows":3', b'"n_rows":-'),
        (b'"n_rows":3', b'"n_rowz":3'),
        (b'"n_tokens":8', b'"n_tokens":2'),
        (b"[2,4,2,4]", b"[2,4,1,8]"),
    ],
)
def test_a_head_that_says_what_cannot_be_is_refused(old: bytes, new: bytes) -> None:
    data = record(thinned(8, 3, layers=1))
    assert same(back(resealed(data)), thinned(8, 3, layers=1))
    changed = bytearray(bytes(data).replace(old, new, 1))
    assert changed != data and len(changed) == len(data)
    with pytest.raises(CorruptChunk, match="cannot be"):
        Head.parse(resealed(changed))


def test_a_mask_of_other_tokens_than_the_head_says_is_refused() -> None:
    data = bytearray(
        bytes(record(thinned(8, 3, layers=1))).replace(b'"n_tokens":8', b'"n_tokens":9')
    )
    with pytest.raises(CorruptChunk, match="of 9 tokens"):
        back(resealed(data))


@pytest.mark.parametrize(
    "kept",
    [
        [[3, 0, 5], [1, 2, 3]],
        [[0, 0, 5], [1, 2, 3]],
        [[0, -1, 5], [1, 2, 3]],
        [[0, 5, 12], [1, 2, 3]],
        [[0, 5, 13], [1, 2, 3]],
        [[-2, 0, 5], [1, 2, 3]],
        [[0, 5], [1, 2]],
        [[0, 1, 2]],
    ],
    ids=str,
)
def test_offsets_that_make_no_sense_are_not_written(kept: list[list[int]]) -> None:
    good = thinned(12, 3, layers=1)
    with pytest.raises(InvalidArgument):
        record(KV(good.k, good.v, False, np.array([kept]), 12))


def test_a_mask_has_one_length() -> None:
    mask = masked(np.array([[0, 8], [3, -1]]), 9)
    assert len(mask) == 4 and offsets_of(mask, 2, 9, 2).tolist() == [[0, 8], [3, -1]]
    for wrong in (mask[:3], memoryview(bytes(mask) + b"\0")):
        with pytest.raises(CorruptChunk):
            offsets_of(wrong, 2, 9, 2)


@pytest.mark.parametrize(
    ("spec", "digest"), [("raw", "d19f53909abece4e"), ("int8", "d91dc96c175c4b66")]
)
def test_a_whole_chunks_record_is_what_it_was_before_there_were_others(
    spec: str, digest: str
) -> None:
    """Byte for byte as of 2026-11-23, format 2."""
    k = torch.arange(300 * 16, dtype=torch.float32).reshape(300, 2, 8)
    data = record(KV([k, -k], [k * (2 if spec == "raw" else 3), k]), spec)
    assert xxhash.xxh3_64_hexdigest(bytes(data)) == digest


def test_an_older_kvweave_refuses_it_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    tier, kv = Memory(1 << 20), thinned(40, 12)
    store(tier, kv)
    monkeypatch.setattr(layout, "FORMAT", 2)
    with pytest.raises(FormatTooNew):
        Head.parse(tier._values[KEY])
    (found,) = read_heads(tier, [(KEY, about(kv))], MODEL, None)
    assert isinstance(found, Outcome) and found.state == "failed" and "upgrade" in found.why


def test_it_is_never_taken_for_a_whole_chunk_or_for_one_of_other_rows() -> None:
    kv = thinned(40, 12)
    whole = KV([torch.zeros(40, 2, 4)] * 3, [torch.zeros(40, 2, 4)] * 3)
    for have in (kv, whole, thinned(40, 13), KV(kv.k, kv.v)):
        for want in (kv, whole, thinned(40, 13), KV(kv.k, kv.v)):
            why = fault(Head.parse(record(have)), KEY, MODEL, about(want))
            assert bool(why) == (about(have) != about(want)), why


# ---- levels


def level(budget: int | None = None, codec: str = "raw") -> Level:
    return Level(Memory(1 << 22), parse(codec), "model", LRU(), budget, index=("1" * 32, "here"))


CHUNKS = {i: thinned(40 + 7 * i, 12 + i, seed=i) for i in range(12)}


def wanted(id: int) -> Expected:
    return about(CHUNKS[id], f"{id:032x}")


@pytest.fixture
def two() -> Iterator[Mover]:
    """A level with room for three chunks, over a large one."""
    mover = Mover([level(60_000), level()], wanted)
    mover.levels[1].name = "disk"
    yield mover
    mover.check_integrity()
    mover.close()


@pytest.mark.parametrize("step", [1, reader.TOGETHER])
def test_what_arrives_is_sliced_as_what_is_there(
    two: Mover, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    monkeypatch.setattr(reader, "TOGETHER", step)
    kv = CHUNKS[3]
    two.save(3, kv)
    one = two.load([3])[3]
    assert isinstance(one, Arriving) and one.altered and one.n_bytes == kv.n_bytes
    cut, whole = one.rows(5, 33), kv.rows(5, 33)
    assert cut.n_tokens == whole.n_tokens == 28
    assert whole.n_bytes <= cut.n_bytes <= kv.n_bytes
    for found in (one.whole(), one.rows(0, kv.n_tokens), one.clone()):
        assert same(found, kv)
    assert left(one.rows(2, 40).rows(3, 31)) == left(cut) == left(whole)
    assert same(two.load([3])[3].clone(), kv)


def test_a_slice_of_what_has_not_arrived_is_waited_for_when_it_is_asked() -> None:
    kv = CHUNKS[3]
    load_ = Load(3, wanted(3))
    rows = zip(kv.k, kv.v, kv.kept, strict=True)  # type: ignore[arg-type]

    def arrive() -> None:
        for k, v, kept in rows:
            load_.add(k, v, kept=kept)

    later = threading.Timer(0.05, arrive)
    later.start()
    cut = Arriving(load_).rows(5, 33)
    assert isinstance(cut, Arriving) and cut.n_tokens == 28 and not load_.ended
    assert left(cut) == left(kv.rows(5, 33)) == left(cut.whole())
    later.join()


def test_it_sinks_from_level_to_level(two: Mover) -> None:
    for i, kv in CHUNKS.items():
        two.save(i, kv)
    where = [sorted(each.held) for each in two.levels]
    assert sorted(where[0] + where[1]) == list(CHUNKS) and len(where[1]) > 6
    for i, found in two.load(CHUNKS).items():
        assert same(found.whole(), CHUNKS[i])
    assert two.counts["lost"] == 0


def test_memory_lets_go_of_it_for_the_level_below(two: Mover) -> None:
    size = max(kv.n_bytes for kv in CHUNKS.values())
    shelf = Shelf(4 * size, LRU(), two)
    for i, kv in CHUNKS.items():
        shelf.put(i, kv)
    assert all(shelf.tier(i) != "none" and shelf.thinned(i) for i in CHUNKS)
    assert sum(i in shelf.ram for i in CHUNKS) <= 4
    for i, kv in CHUNKS.items():
        assert same(shelf.get(i), kv)
    shelf.check_integrity()


def test_it_is_written_behind(two: Mover, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(behind, "MOST", 1 << 20)
    assert two.clean(4, CHUNKS[4])
    two.settle()
    assert same(two.load([4])[4].whole(), CHUNKS[4])


def test_a_spoilt_one_is_lost_and_can_be_written_again(two: Mover) -> None:
    shelf = Shelf(1 << 20, LRU(), two)
    shelf.put(1, CHUNKS[1])
    shelf.place(1, "disk")
    tier = two.levels[1].tier
    assert isinstance(tier, Memory)
    (key,) = tier.keys()
    tier._values[key][PAGE] ^= 1  # of the mask
    assert shelf.get(1) is None and shelf.tier(1) == "none" and not list(tier.keys())
    shelf.put(1, CHUNKS[1])
    assert shelf.place(1, "disk") and same(shelf.get(1), CHUNKS[1])
