"""Claims about rows of which some rest in fewer bits: coded right, and the right ones."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from conftest import tiny
from reference import rounded
from run.backend import ids, off, transformers

from kvweave.errors import InvalidArgument
from kvweave.keep.tokens.sums import AttentionSums
from kvweave.keep.tokens.watch import TokenWatch
from kvweave.run import bags, packed
from kvweave.run.base import Ints, Work
from kvweave.run.below import BELOW
from kvweave.run.heads import Heads
from kvweave.run.model import Runner
from kvweave.run.packed import FORMS, ORDER, CodedLevel, PackedRows, form_bytes
from kvweave.run.rows import KVRows
from kvweave.run.tabled import TabledRows
from kvweave.run.thinned import ThinnedRows
from kvweave.store.kv import KV, LayerShape

BAGGED = {"llama_bags": "llama", "softcap_bags": "gemma2"}
DIMS = (64, 32, 96, 20, 6, 5, 1)


@pytest.mark.parametrize(("bits", "dim"), list(product((8, 4, 2), DIMS)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_values_are_the_nearest_points_of_their_grid(
    bits: int, dim: int, dtype: torch.dtype
) -> None:
    """As one row at a time gives them, in float64, by looking for the nearest."""
    generator = torch.Generator().manual_seed(dim * bits)
    x = torch.randn(17, dim, generator=generator).to(dtype)
    x[3], x[4, 0], x[5] = 0, 40.0, -2.5  # nothing, an outlier, all the same
    for kind in (PackedRows, TabledRows) if bits > 2 else (TabledRows,):
        found = kind.of(x, bits).values()
        assert found.dtype == dtype and found.shape == x.shape
        is_values = kind is TabledRows
        wanted = torch.stack([rounded(row.double(), bits, is_values) for row in x])
        best, distance = (wanted - x).abs(), (found.double() - x).abs()
        rounding = 2.0**-8 if dtype == torch.bfloat16 else 1e-6
        assert bool((distance <= best + rounding * x.double().abs().amax(1, keepdim=True)).all())
        assert float(best.mean()) > 0 or dim == 1


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_values_may_be_as_large_as_numbers_go(bits: int) -> None:
    """Larger than float16 holds, beside others and joined with others."""
    x = torch.randn(7, 64, generator=torch.Generator().manual_seed(bits))
    huge, most = x * 1e9, 2**bits - 1
    for rows in (huge, torch.cat((x, huge))):
        found, spread = TabledRows.of(rows, bits).values(), huge.amax() - huge.amin()
        assert bool(((found - rows).abs() <= 0.6 * spread / most).all())
    small, large = TabledRows.of(x, bits), TabledRows.of(huge, bits)
    for first, second in ((small, large), (large, small)):
        joined = first.joined([first, second])
        wanted = torch.cat((first.values(), second.values()))
        assert torch.allclose(joined.values(), wanted, rtol=1e-3, atol=1e5)
        swapped = first.changed(torch.arange(3), second.part(slice(0, 3)))
        wanted = torch.cat((second.values()[:3], first.values()[3:]))
        assert torch.allclose(swapped.values(), wanted, rtol=1e-3, atol=1e5)


@pytest.mark.parametrize("n", [255, 256, 700])
def test_keys_in_tiles_are_the_same_keys(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, rng = torch.randn(n, 64), np.random.default_rng(n)
    plain = PackedRows.of(x, 8, across=True)
    monkeypatch.setattr("kvweave.run.packed.TILED", 1)
    tiled, some = PackedRows.of(x, 8, across=True), np.flatnonzero(rng.random(n) < 0.6)
    assert plain.tiles is None and tiled.tiles is not None and len(tiled.tiles) == n // 256
    assert tiled.n_bytes == plain.n_bytes + n // 256 * 64 * 8
    where, other = torch.from_numpy(some[:5]), PackedRows.of(torch.randn(5, 64), 8)
    for a, b in (
        (tiled, plain), (tiled.flat(), plain), (tiled.at(some), plain.at(some)),
        (tiled.part(slice(3, 290)), plain.part(slice(3, 290))),
        (tiled.joined([tiled, plain]), plain.joined([plain, plain])),
        (tiled.changed(where, other), plain.changed(where, other)),
    ):  # fmt: skip
        assert a.n == b.n and torch.equal(a.values(), b.values())


@pytest.mark.parametrize("form", FORMS)
def test_bytes_are_those_that_are_said(form: str) -> None:
    for dim in DIMS:
        rows = [torch.randn(9, dim)] * 3
        level = CodedLevel.of(form, [np.arange(9)] * 3, rows, rows)
        said = 9 * form_bytes(form, LayerShape(3, dim, 3, dim))
        in_tiles = 9 * 3 * (-(-dim * 8 // 256)) if FORMS[form][0] == 8 else 0
        assert level.n_bytes == said - in_tiles  # so few rows are in none


class Plain:
    """What is where, head by head and slot by slot, in a dict."""

    def __init__(self, heads: int) -> None:
        self.rows: list[dict[int, tuple[torch.Tensor, torch.Tensor]]] = [{} for _ in range(heads)]
        self.form: list[dict[int, str]] = [{} for _ in range(heads)]

    def write(self, at: Ints, k: torch.Tensor, v: torch.Tensor) -> None:
        for head, rows in enumerate(self.rows):
            for i, slot in enumerate(at.tolist()):
                if slot in rows:
                    form = self.form[head].get(slot)
                    rows[slot] = self.coded(form, k[i, head], v[i, head])

    def place(self, at: Ints, k: torch.Tensor, v: torch.Tensor) -> None:
        for rows, forms in zip(self.rows, self.form, strict=True):
            for slot in at.tolist():
                rows[slot] = (k[0, 0], v[0, 0])
                forms.pop(slot, None)
        self.write(at, k, v)

    def coded(self, form: str | None, *both: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        bits = FORMS.get(str(form), (None, None))
        kinds = PackedRows, TabledRows
        made = (
            t if b is None else kind.of(t[None], b).values()[0]
            for kind, t, b in zip(kinds, both, bits, strict=True)
        )
        a, b = made
        return a, b

    def code(self, form: str, slots: list[Ints]) -> None:
        for head, some in enumerate(slots):
            for slot in some.tolist():
                was = self.form[head].get(slot)
                if was in (None, BELOW) or ORDER.index(str(was)) < ORDER.index(form):
                    self.rows[head][slot] = self.coded(form, *self.rows[head][slot])
                    self.form[head][slot] = form

    def below(self, slots: list[Ints]) -> None:
        for forms, some in zip(self.form, slots, strict=True):
            for slot in [slot for slot, form in forms.items() if form == BELOW]:
                del forms[slot]
            forms.update(dict.fromkeys(some.tolist(), BELOW))

    def keep(self, slots: list[Ints]) -> None:
        for head, some in enumerate(slots):
            self.rows[head] = {s: self.rows[head][s] for s in some.tolist()}
            self.form[head] = {s: f for s, f in self.form[head].items() if s in self.rows[head]}

    def cut(self, n: int) -> None:
        self.keep([np.array([s for s in rows if s < n], np.int64) for rows in self.rows])


def same(rows: KVRows, plain: Plain) -> None:
    rows.check_integrity()
    kept = rows.kept(0)
    keys, values = (t.cpu() for t in rows.packed(0))
    every = [t.cpu() for t in rows.read(0)]
    for head, slots in enumerate(kept):
        assert slots.tolist() == sorted(plain.rows[head])
        for i, slot in enumerate(slots.tolist()):
            k, v = plain.rows[head][slot]
            assert oracle.same(keys[head, i], k) and oracle.same(values[head, i], v)
            assert oracle.same(every[0][slot, head], k) and oracle.same(every[1][slot, head], v)
    forms = [form for forms in plain.form for form in forms.values()]
    assert rows.forms == {form: forms.count(form) for form in sorted(set(forms))} or not forms
    assert sum(rows.forms.values()) == len(forms)


@pytest.mark.parametrize("seed", range(16))
@pytest.mark.sampled
def test_any_verbs_leave_the_rows_that_a_dict_has(seed: int) -> None:
    """Keep, code, write, place, cut, grow, clone, in any order; copies are not touched."""
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    info = transformers("llama").layers[0]
    heads, dim = info.shape.k_heads, info.shape.k_dim
    rows, plain, positions = transformers("llama").new_rows(), Plain(heads), np.arange(200)
    rows.layers, rows.infos = rows.layers[:1], rows.infos[:1]

    def kv(n: int) -> KV:
        k, v = torch.randn(2, n, heads, dim, generator=generator, dtype=torch.float64)
        return KV([k.to(oracle.DEVICE)], [v.to(oracle.DEVICE)])

    def turn(new: KV, at: Ints) -> torch.Tensor:
        where = torch.from_numpy(at).to(oracle.DEVICE)
        return info.rotation.apply(new.k[0], info.rotation.angles(where)).cpu()

    def some(share: float) -> list[Ints]:
        return [own[rng.random(len(own)) < share] for own in rows.kept(0)]

    def placed(at: int, n: int) -> None:
        new = kv(n)
        rows.reserve(max(rows.n, at + n))
        rows.place([(at, [new])], positions[: max(rows.n, at + n)])
        where = np.arange(at, at + n)
        turned = turn(new, where)
        plain.place(where, turned, new.v[0].cpu())

    placed(0, 20)
    copies = []
    for _ in range(60):
        verb = rng.choice(
            ["keep", "code", "code", "below", "put", "place", "more", "cut", "grow", "clone"]
        )
        ahead = int(rng.integers(1, 40)) if rng.random() < 0.5 else 0
        if verb == "keep":
            slots = some(0.8)
            rows.keep(0, slots, ahead)
            plain.keep(slots)
        elif verb == "code":
            slots, form = some(0.4), str(rng.choice(ORDER))
            if rng.random() < 0.3:  # as many of each head: one attention
                n = min(map(len, slots))
                slots = [own[:n] for own in slots]
            rows.code(0, form, slots, ahead)
            plain.code(form, slots)
        elif verb == "below":
            slots = some(0.5)
            rows.code(0, BELOW, slots)
            plain.below(slots)
        elif verb == "put" and rows.n:
            at = np.sort(rng.choice(rows.n, min(rows.n, 5), False))
            new = kv(len(at))
            rows.put(at, new)
            turned = turn(new, at)
            plain.write(at, turned, new.v[0].cpu())
        elif verb == "place" and rows.n > 6:
            placed(int(rng.integers(0, rows.n - 5)), 5)
        elif verb == "more" and rows.n < 150:
            placed(rows.n, int(rng.integers(1, 20)))
        elif verb == "cut":
            n = int(rng.integers(rows.n // 2, rows.n + 1))
            rows.truncate(n)
            plain.cut(n)
        elif verb == "grow":
            rows.reserve(rows.n + int(rng.integers(0, 30)), exact=bool(rng.random() < 0.5))
        elif verb == "clone":
            copies.append((rows, [dict(r) for r in plain.rows], [dict(f) for f in plain.form]))
            rows = rows.clone()
        same(rows, plain)
    for old, was, forms in copies[-3:]:
        plain.rows, plain.form = was, forms
        same(old, plain)


@pytest.mark.parametrize("seed", range(4))
def test_room_that_a_choice_leaves_changes_nothing_else(seed: int) -> None:
    """Layers may then have more room than each other, or less than there was: the same logits and rows as where
    none is left, and no more memory than before the choice."""
    rng, backend = np.random.default_rng(seed), transformers("llama")
    both, n = [backend.new_rows() for _ in "ab"], 40
    for rows in both:
        rows.reserve(n + int(rng.integers(0, 40)))
        backend.forward([Work(rows, ids(n, 1), np.arange(n), np.arange(n))])
    for _ in range(8):
        ahead = int(rng.integers(1, 30))
        for layer in rng.permutation(len(backend.layers)).tolist():
            before = both[0].n_bytes
            slots = [own[rng.random(len(own)) < 0.8] for own in both[0].kept(layer)]
            own = [some[rng.random(len(some)) < 0.3] for some in slots]
            for rows, room in zip(both, (ahead, 0), strict=True):
                rows.keep(layer, slots, room)
                rows.check_integrity()
            assert both[0].n_bytes <= before
            for rows, room in zip(both, (ahead, 0), strict=True):
                rows.code(layer, "k8v4", own, room)
                rows.check_integrity()
        n, found = both[0].n, []
        assert both[0].capacity >= n and both[0].positions[:n].tolist() == list(range(n))
        more = ahead if rng.random() < 0.7 else ahead + 9
        for rows in both:
            rows.reserve(n + more, exact=bool(rng.random() < 0.7))
            at, want = np.arange(n, n + more), np.arange(more)
            found += backend.forward([Work(rows, ids(more, n), at, at, want)])
            rows.check_integrity()
        assert oracle.same(*found)
        for layer in range(len(backend.layers)):
            for a, b in zip(both[0].read(layer), both[1].read(layer), strict=True):
                assert oracle.same(a, b)
    for rows in both:
        rows.reserve(rows.n, exact=True)
    assert both[0].n_bytes == both[1].n_bytes


def thinned(backend: Runner, forms: tuple[str, ...], uneven: bool, raw: bool) -> KVRows:
    """Return 40 rows of which each head has its own in each form; with ``raw`` what these give back
    stands as it is."""
    rows, n, rng = backend.new_rows(), 40, np.random.default_rng(3)
    rows.reserve(48)
    slots = np.arange(n)
    backend.forward([Work(rows, ids(n, 1), slots, slots)])
    for layer, info in enumerate(backend.layers):
        heads = info.shape.k_heads
        order = [rng.permutation(n - 4) for _ in range(heads)]
        sizes = [8 + 2 * uneven * head for head in range(heads)]
        rows.keep(
            layer,
            [np.sort(np.r_[o[: 30 - u], n - 4 : n]) for o, u in zip(order, sizes, strict=True)],
        )
        for i, form in enumerate(forms):
            rows.code(
                layer,
                form,
                [np.sort(o[4 * i : 4 * i + 4 + uneven * h]) for h, o in enumerate(order)],
            )
        held = rows.layers[layer]
        assert isinstance(held, ThinnedRows) and set(held.forms) == set(forms)
        if raw:
            below = [[]] * heads if held.below is None else map(held.below.slots, range(heads))
            for head, (every, unseen) in enumerate(zip(held.kept(), below, strict=True)):
                own = np.setdiff1d(every, unseen)
                keys, values = (t.clone() for t in held._of(head, own))
                held.heads[head].slots = np.r_[own, np.arange(n, held.capacity)]
                spare = held.capacity - n
                for name, t in (("k", keys), ("v", values)):
                    setattr(held.heads[head], name, torch.cat((t, t.new_zeros(spare, t.shape[1]))))
            held.levels, held.below = [], None
            held._hold(Heads(held.heads).kept([head.slots for head in held.heads]))
    return rows


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize(
    "forms", [("int8",), ("k8v4", "k4v2"), ("int8", "int4", "k4v2"), ("below",), ("k8v4", "below")]
)
@pytest.mark.parametrize("name", ["llama", "mistral", "ministral", "gemma2_softcap", *BAGGED])
@pytest.mark.sampled
def test_attention_reads_what_the_bits_give_back(
    name: str, forms: tuple[str, ...], uneven: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same as over raw rows of these values: one row behind, several, and some anew."""
    monkeypatch.setattr(bags, "LEAST", 0)
    monkeypatch.setattr(packed, "TILED", 1)
    close, attended, n_bags = 1e-5, bags.attended, [0]
    if name in BAGGED:  # bags are float32
        backend, close = tiny(BAGGED[name], torch.float32), 1e-4
    else:
        backend = tiny("gemma2") if "softcap" in name else transformers(name)

    def counted(*given: Any) -> Any:
        n_bags[0] += 1
        return attended(*given)

    monkeypatch.setattr(bags, "attended", counted)
    assert "softcap" not in name or backend.model.config.attn_logit_softcapping
    coded, plain = (thinned(backend, forms, uneven, raw) for raw in (False, True))
    tallies = [AttentionSums(backend.layers, ages=True) for _ in "ab"]
    assert coded.n_bytes < plain.n_bytes or set(forms) == {BELOW}
    assert not plain.forms
    assert coded.n_freed + coded.forms.get(BELOW, 0) == plain.n_freed
    found = []
    for rows, tally in zip((coded, plain), tallies, strict=True):
        logits, watch = [], TokenWatch(tally, backend.layers)
        for slots in (np.array([40]), np.arange(41, 45), np.r_[38:40, 45]):
            want = np.arange(len(slots))
            seen = Work(rows, ids(len(slots), 2), slots, slots, want, observer=watch)
            (out,) = backend.forward([seen])
            logits.append(out)
        found.append(torch.cat(logits))
    assert off(*found) < close
    for a, b in zip(*([*x.total, *x.seen_by] for x in tallies), strict=True):
        assert a.n == b.n and off(a.written, b.written) < close
    in_bits = any(form != BELOW for form in forms)
    assert bool(n_bags[0]) == (name in BAGGED and in_bits and bags.there)


@pytest.mark.skipif(not bags.there, reason="torch has no FBGEMM here")
@pytest.mark.parametrize("uneven", [False, True])
def test_no_row_in_bits_becomes_floats_for_a_token(
    uneven: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where heads have more or fewer rows than each other, in bits and as they are."""
    backend = tiny("llama", torch.float32)
    rows = thinned(backend, ("k8v4", "k4v2"), uneven, False)
    monkeypatch.setattr(bags, "LEAST", 0)
    for name in ("together", "of_head", "scores"):
        monkeypatch.setattr(CodedLevel, name, lambda *_, name=name: pytest.fail(name))
    watch = TokenWatch(AttentionSums(backend.layers), backend.layers)
    backend.forward([Work(rows, ids(1, 2), np.array([40]), np.array([40]), observer=watch)])


def test_rows_of_8_bits_are_not_coded_again() -> None:
    backend = transformers("llama")
    rows, slots = backend.new_rows("int8"), np.arange(4)
    rows.reserve(4)
    backend.forward([Work(rows, ids(4, 1), slots, slots)])
    with pytest.raises(InvalidArgument):
        rows.code(0, "int8", [slots[:2]] * backend.layers[0].shape.k_heads)


@pytest.mark.parametrize("dim", [8, 32, 64, 96, 128])
@pytest.mark.parametrize("form", [form for form in FORMS if FORMS[form] is not None])
def test_scores_and_sums_are_those_of_the_rows_that_are_decoded(form: str, dim: int) -> None:
    """Each grid comes to what its symbols give: of heads with several grids a row too."""
    torch.manual_seed(dim)
    heads, n = 3, 5
    slots = [np.arange(n) + i for i in range(heads)]
    keys, values = ([torch.randn(n, dim) * (1 + i) + i for i in range(heads)] for _ in "kv")
    level = CodedLevel.of(form, slots, keys, values)
    both = level.together()
    assert both is not None
    k, v = (each.double() for each in both)
    queries, weights = torch.randn(heads, 2, dim), torch.rand(heads, 2, n)
    wanted = queries.double() @ k.transpose(1, 2), weights.double() @ v
    for found, true in zip((level.scores(queries), level.mixed(weights)), wanted, strict=True):
        assert torch.allclose(found.double(), true, atol=1e-5 * float(true.abs().max()))
