"""Token policies: what their statistics survive, and what scores depend on."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from conftest import tiny
from keep.views import best, compute, pinned, view, watched
from oracle import DEVICE
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvweave.errors import InvalidArgument
from kvweave.keep.tokens import POLICIES
from kvweave.keep.tokens.base import LayerView, Need, TokenPolicy, made
from kvweave.keep.tokens.h2o import H2O
from kvweave.keep.tokens.kvzip import KVzip, Replay, Replayed
from kvweave.keep.tokens.lazy import Lazy
from kvweave.keep.tokens.rkv import RKV
from kvweave.keep.tokens.spec import Keep
from kvweave.keep.tokens.sums import AttentionSums
from kvweave.keep.tokens.tova import TOVA
from kvweave.keep.tokens.watch import BySlot, TokenWatch
from kvweave.run.base import LayerInfo, Work
from kvweave.run.rotary import STATIC, Rotation
from kvweave.store.kv import LayerShape

N = 45
TOKENS = np.random.default_rng(3).integers(3, 101, N)
PROMPTS = np.array([5, 6, 7]), np.array([8, 9])
MODELS = "llama", "mistral", "phi3_partial", "cohere_interleaved", "smollm3_nope"
SMALL: dict[str, dict[str, object]] = {
    "snapkv": {"window": 10}, "rkv": {"window": 8}, "lazy": {"alpha": 0.02}, "kvzip": {"span": 20},
}  # fmt: skip


def policy(name: str, **options: object) -> TokenPolicy:
    return POLICIES[name](**(SMALL.get(name, {}) | options))


def scores(kind: TokenPolicy, views: list[LayerView]) -> Tensor:
    found = torch.stack([kind.scores(each) for each in views])
    assert found.shape == (len(views), *views[0].shape) and found.isfinite().all()
    return found.double()


def same(found: Tensor, wanted: Tensor) -> bool:
    return torch.allclose(found, wanted, rtol=1e-6, atol=1e-9)


def seen(name: str, size: int = 1000, model: str = "llama", **options: object) -> Tensor:
    kind = policy(name, **options)
    return scores(kind, watched(kind, tiny(model), TOKENS, size, PROMPTS))


def padded(one: LayerView, at: int, n: int) -> LayerView:
    """Put ``n`` rows of padding before row ``at``, with rubbish in them."""

    def put(rows: Tensor | None, rubbish: object) -> Tensor | None:
        if rows is None:
            return None
        middle = torch.full_like(rows[:, :1], rubbish).expand(-1, n, *rows.shape[2:])
        return torch.cat([rows[:, :at], middle, rows[:, at:]], 1)

    return replace(
        one, slots=put(one.slots, 0), there=put(one.there, False), positions=put(one.positions, 9999),
        keys=put(one.keys, float("nan")), values=put(one.values, float("nan")),
    )  # fmt: skip


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.sampled
def test_every_model_and_group_gets_scores_that_are_the_same_again(name):
    for model in MODELS:
        assert torch.equal(seen(name, model=model), seen(name, model=model))


@pytest.mark.parametrize("size", [1, 7, 64])
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.sampled
def test_pieces_of_a_prompt_add_up_to_the_whole(name, size):
    for model in ("llama", "mistral"):
        assert same(seen(name, size, model), seen(name, model=model))


@pytest.mark.parametrize("name", POLICIES)
def test_padding_is_ignored(name):
    kind = policy(name)
    views = watched(kind, tiny(), TOKENS, 64, PROMPTS)
    wanted = scores(kind, views)
    for at in (N, 0):  # behind and before all rows
        wide = [padded(each, at, 6) for each in views]
        found = torch.stack([kind.scores(each).double() for each in wide])
        rows = slice(0, N) if at else slice(6, None)
        assert same(found[..., rows], wanted)
        chosen = best(pinned(kind, wide[1], found[1]), 30)
        assert not (chosen & ~wide[1].there).any() and (chosen.sum(-1) == 30).all()
        assert torch.equal(chosen[:, rows], best(pinned(kind, views[1], wanted[1]), 30))


@pytest.mark.parametrize("name", POLICIES)
def test_rows_that_decode_go_on_from_the_prompt(name):
    kind = policy(name)
    if Need.REPLAY in kind.needs:
        pytest.skip("what is decoded is read again with all else")
    runner, watch = tiny(), kind.watch(tiny().layers, tiny().device)
    rows = None
    if watch is not None:
        watch.until = N
    rows = compute(runner, TOKENS[:30], watch)
    for row in range(30, N):
        rows.reserve(row + 1)
        at = np.array([row])
        runner.forward([Work(rows, TOKENS[row : row + 1], at, at, observer=watch, at=row)])
    assert same(scores(kind, [view(runner, rows, i, watch) for i in range(4)]), seen(name))


@pytest.mark.parametrize("name", POLICIES)
def test_a_pass_that_failed_and_ran_again_counts_once(name, monkeypatch):
    kind = policy(name)
    runner, end, fails = tiny(), TokenWatch.end, iter([True, False] * 1000)

    def broken(self: TokenWatch) -> None:
        if next(fails):
            raise ConnectionError
        end(self)

    forward = runner.forward

    def again(works: list[Work]) -> list[Tensor]:
        try:
            return forward(works)
        except ConnectionError:
            return forward(works)

    monkeypatch.setattr(TokenWatch, "end", broken)
    monkeypatch.setattr(runner, "forward", again)
    found = scores(kind, watched(kind, runner, TOKENS, 7, PROMPTS))
    monkeypatch.undo()
    assert same(found, seen(name))


@pytest.mark.parametrize("name", POLICIES)
def test_slots_that_are_renumbered_keep_their_scores(name):
    kind = policy(name)
    views = watched(kind, tiny(), TOKENS, 64, PROMPTS)
    kept = np.r_[0:5, 9:N:2, N - 1]
    at = torch.from_numpy(kept)
    less = [
        replace(
            each, slots=each.slots[:, at], there=each.there[:, at], positions=each.positions[:, at],
            keys=each.keys[:, at], values=each.values[:, at],
        )
        for each in views
    ]  # fmt: skip
    wanted = scores(kind, less)
    if views[0].watch is not None:
        views[0].watch.compact(kept)
    found = [
        replace(each, slots=torch.arange(len(kept), device=DEVICE).expand(2, -1)) for each in less
    ]
    assert name == "random" or same(scores(kind, found), wanted)


def test_windows_begin_anew_at_a_choice():
    kind = policy("snapkv")
    runner, watch = tiny(), kind.watch(tiny().layers, tiny().device)
    watch.until = 20
    rows = compute(runner, TOKENS[:20], watch)
    watch.chosen()
    watch.until = N
    assert not view(runner, rows, 0, watch).tally(AttentionSums).n_rows[0]
    work = Work(rows, TOKENS, np.arange(N), np.arange(N), observer=watch)
    rows.reserve(N)
    runner.forward([work.part(20, N)])
    found = scores(kind, [view(runner, rows, i, watch) for i in range(4)])
    assert same(found, seen("snapkv"))
    assert view(runner, rows, 0, watch).tally(AttentionSums).n_rows == [10] * 4


def test_sums_do_not_begin_anew_at_a_choice():
    kind = H2O()
    watch = kind.watch(tiny().layers, tiny().device)
    rows = compute(tiny(), TOKENS, watch)
    before = kind.scores(view(tiny(), rows, 1, watch))
    watch.chosen()
    assert torch.equal(kind.scores(view(tiny(), rows, 1, watch)), before)


def test_random_differs_by_seed_layer_head_and_slot():
    draws = {seed: seen("random", seed=seed) for seed in (0, 1, 2**40)}
    every = torch.cat([each.flatten() for each in draws.values()])
    assert len(every.unique()) == len(every)
    assert 0 <= every.min() and every.max() < 1 and abs(float(every.mean()) - 0.5) < 0.05


def test_every_option_can_be_given_as_text():
    for kind in POLICIES.values():
        plain = kind()
        text = {f.name: str(getattr(plain, f.name)) for f in fields(kind)}
        text = {
            key: each.lower() if each in ("True", "False") else each for key, each in text.items()
        }
        assert made(kind, text) == plain
        with pytest.raises(InvalidArgument, match="has no 'nothing'"):
            Keep.parse(f"{kind.name},nothing=1")


def packed(runner, rows, layer: int, watch: TokenWatch | None, left: list[np.ndarray]) -> LayerView:
    """Return a layer of which each head keeps the slots ``left``, others filled up with padding."""
    whole = view(runner, rows, layer, watch)
    width = max(map(len, left))
    slots = torch.stack([torch.from_numpy(np.pad(each, (0, width - len(each)))) for each in left])
    there = torch.arange(width) < torch.tensor([[len(each)] for each in left])
    slots, there = slots.to(DEVICE), there.to(DEVICE)
    at = slots[..., None].expand(-1, -1, whole.keys.shape[-1])
    return replace(
        whole, slots=slots, there=there, positions=slots, keys=whole.keys.gather(1, at),
        values=whole.values.gather(1, at),
    )  # fmt: skip


@pytest.mark.parametrize("name", POLICIES)
def test_choices_follow_one_another_while_rows_decode(name):
    """Heads keep different rows of the prompt, then 12 rows are decoded, and a choice is made again."""
    kind = policy(name, sinks=1, window=3)
    runner, watch = tiny(), kind.watch(tiny().layers, tiny().device)
    rows = compute(runner, TOKENS[:30], watch)
    left = [np.arange(30)] * 2
    for stop in (34, 38, 42):
        for layer in range(len(runner.layers)):
            one = packed(runner, rows, layer, watch, left)
            found = kind.scores(one)
            assert found.isfinite()[one.there].all()
            if layer == 1:
                stays = best(pinned(kind, one, found), 20 if stop == 34 else 18)
        freed = left
        left = [one.slots[head][stays[head]].cpu().numpy() for head in range(2)]
        left[1] = left[1][1:]  # one less
        if watch is not None:
            watch.chosen()
        for layer in range(len(runner.layers)):
            for head in range(2):
                rows.free(layer, head, np.setdiff1d(freed[head], left[head]))
        rows = compute(runner, TOKENS[stop - 4 : stop], watch, (1, 2, 3), rows)
        left = [np.r_[each, stop - 4 : stop] for each in left]
    assert len(left[0]) == 22 and len(left[1]) == 21


# ---- each by hand

INFO = LayerInfo(LayerShape(1, 2, 1, 2), STATIC)
CPU = torch.device("cpu")


def by_hand(
    watch: TokenWatch | None, n: int, keys: Tensor | None = None, info: LayerInfo = INFO
) -> LayerView:
    every = torch.arange(n)[None]
    return LayerView(0, info, every, every >= 0, every, keys, values=keys, watch=watch)


def paid(watch: TokenWatch, first: int, *rows: list[float]) -> None:
    """Show attention of rows, the same for both heads of a group."""
    width = max(map(len, rows))
    weights = torch.tensor([[row + [0.0] * (width - len(row)) for row in rows]] * 2)
    watch.begin()
    watch.see(0, first, 0, weights)
    watch.end()


def test_age_divides_by_the_rows_that_could_see():
    for age, wanted in ((False, [1.7, 1.0, 0.3]), (True, [1.7 / 3, 1.0 / 2, 0.3])):
        kind = H2O(age=age)
        watch = kind.watch([INFO], CPU)
        paid(watch, 0, [1.0], [0.5, 0.5])
        paid(watch, 2, [0.2, 0.5, 0.3])
        assert torch.allclose(kind.scores(by_hand(watch, 3)), torch.tensor([wanted]))


def test_the_last_row_alone_counts():
    kind = TOVA()
    watch = kind.watch([INFO], CPU)
    watch.until = 3
    assert watch.rows(0, 3) == (2, 3)
    paid(watch, 1, [0.5, 0.5], [0.2, 0.5, 0.3])
    assert torch.allclose(kind.scores(by_hand(watch, 3)), torch.tensor([[0.2, 0.5, 0.3]]))


def test_gaps_between_looks_are_found_across_passes():
    kind = Lazy(alpha=0.4)
    rows = [[1.0], [0.5, 0.5], [0.1, 0.4, 0.5], [0.1, 0.5, 0.3, 0.1], [0.4, 0.1, 0.1, 0.4, 0.0]]
    for cuts in ([5], [1, 4], [2, 3], [1, 1, 1, 1, 1]):
        watch, at = kind.watch([INFO], CPU), 0
        for n in cuts:
            paid(watch, at, *rows[at : at + n])
            at += n
        looks = watch.tally
        assert looks.last[0].written.tolist() == [[5, 4, 3, 5, 4]]
        assert looks.gap[0].written.tolist() == [[3, 1, 1, 2, 0]]
        assert Lazy(stamps=True).scores(by_hand(watch, 5)).tolist() == [[5, 4, 3, 5, 4]]


def test_a_part_is_weighed_among_the_sinks_itself_and_the_replay():
    kind = KVzip(sinks=1, span=2)
    watch = kind.watch([INFO], CPU)
    paid(watch, 0, [1.0], [0.5, 0.5])
    assert watch.rows(0, 9) == (0, 0) and not kind.scores(by_hand(watch, 2)).any()
    tokens = np.arange(20, 25)
    parts = list(kind.replays(tokens, *PROMPTS))
    assert [(each.start, each.stop) for each in parts] == [(0, 2), (2, 4), (4, 5)]
    assert parts[1].tokens.tolist() == [8, 9, 20, 21, 22, 23]
    watch.tally.read(parts[1])
    paid(watch, 0, [0.1, 0.3, 0.1, 0.2, 0.1, 0.2], [0.1, 0.3, 0.3, 0.1, 0.1, 0.1, 0.0])
    part = kind.scores(by_hand(watch, 5))
    assert torch.allclose(part, torch.tensor([[0, 0, 0.3 / 0.6, 0.2 / 0.6, 0]]))


def test_a_slot_that_comes_again_is_forgotten_first():
    kind = H2O()
    watch = kind.watch([INFO], CPU)
    paid(watch, 0, [1.0], [0.5, 0.5], [0.2, 0.5, 0.3])
    watch.compact(np.arange(1))
    paid(watch, 1, [0.5, 0.5])
    assert torch.allclose(kind.scores(by_hand(watch, 2)), torch.tensor([[2.2, 0.5]]))


def test_of_rows_that_are_alike_the_newest_counts_as_none():
    keys = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [1.0, 0.1], [1.0, 0.0]]])
    kind = RKV(window=1, mix=0.0)
    found = kind.scores(by_hand(kind.watch([INFO], CPU), 4, keys))[0]
    assert found.argmin() == 0  # the newest of the three stays longer


def test_room_of_statistics_doubles():
    each, made_ = BySlot(), set()
    for n in range(1, 500):
        each.upto(n, torch.zeros(2, 1))[:, -1] = n
        made_.add(each._room.data_ptr())
    assert len(made_) <= 5 and each.written[0].tolist() == list(range(1, 500))


# ---- memory


class Largest(TorchDispatchMode):
    """Notes how many bytes the largest tensor takes that anything makes."""

    n_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for each in made if isinstance(made, tuple | list) else (made,):
            if isinstance(each, Tensor):
                self.n_bytes = max(self.n_bytes, each.untyped_storage().nbytes())
        return made


def largest(name: str, n: int) -> int:
    """Return the bytes of the largest tensor that a policy makes of ``n`` rows, shown 16 at a time."""
    kind = policy(name, **({"window": 8} if name == "snapkv" else {}))
    rotation = Rotation(8, False, torch.tensor([1.0, 0.1, 0.01, 0.001]))
    info = LayerInfo(LayerShape(1, 8, 1, 8), rotation)
    watch, keys = kind.watch([info], CPU), torch.randn(1, n, 8)
    if watch is not None and isinstance(watch.tally, Replayed):
        watch.tally.read(Replay(n - 16, 0, n - 16, TOKENS[:16]))
    queries, weights = torch.randn(16, 2, 8), torch.rand(2, 16, n)
    shown = by_hand(watch, n, keys, info)
    with Largest() as mode:
        if watch is not None:
            watch.begin()
            if watch.tally.sees:
                watch.see(0, n - 16, 0, weights)
            if watch.asks:
                watch.ask(0, n - 16, queries)
            watch.end()
        kind.scores(shown)
    return mode.n_bytes


@pytest.mark.parametrize("name", POLICIES)
def test_memory_grows_with_rows_not_with_their_square(name):
    small, large = largest(name, 1000), largest(name, 8000)
    assert large <= 8.5 * small
    assert large <= 8 * 64 * 8000  # 64 rows of 8 bytes at once, where it is not 1000 x 1000 already
