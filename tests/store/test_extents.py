from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvweave.store.tier.extents import MAX_KEPT, Extents, _class_of


def space(*regions: int) -> Extents:
    made = Extents()
    for n in regions:
        made.grow(n)
    return made


def test_a_space_is_given_out_and_taken_back() -> None:
    extents = space(100)
    assert [extents.allocate(n) for n in (30, 20, 50, 1)] == [0, 30, 50, None]
    assert (extents.free_units, extents.taken_units, extents.largest_hole) == (0, 100, 0)
    extents.free(30, 20)
    assert (extents.free_units, extents.largest_hole, extents.fragmentation) == (20, 20, 0.0)
    assert [extents.allocate(n) for n in (21, 5, 15)] == [None, 30, 35]
    extents.check_integrity()


def test_neighbours_become_one_hole() -> None:
    extents = space(90)
    assert [extents.allocate(30) for _ in range(3)] == [0, 30, 60]
    for order in ((0, 30, 60), (60, 30, 0), (0, 60, 30), (30, 0, 60)):
        for offset in order:
            extents.free(offset, 30)
        assert list(extents.holes()) == [(0, 90)]
        assert sorted(extents.allocate(30) for _ in range(3)) == [0, 30, 60]  # type: ignore[type-var]


def test_what_was_freed_is_used_again_as_it_was() -> None:
    extents = space(1000)
    for offset in range(0, 900, 100):
        assert extents.allocate(100) == offset
    extents.free(300, 100)
    extents.free(500, 100)
    assert [extents.allocate(100), extents.allocate(100)] == [500, 300]


def test_fragmentation_is_what_lies_outside_the_largest_hole() -> None:
    extents = space(100)
    for offset in range(0, 100, 10):
        assert extents.allocate(10) == offset
    for offset in (0, 20, 40, 50):
        extents.free(offset, 10)
    assert (extents.largest_hole, extents.free_units, extents.fragmentation) == (20, 40, 0.5)


def test_no_extent_crosses_regions() -> None:
    extents = space(10, 10)
    assert [extents.allocate(n) for n in (15, 10, 10, 1)] == [None, 10, 0, None]
    extents.free(0, 10)
    extents.free(10, 10)
    assert sorted(extents.holes()) == [(0, 10), (10, 10)]
    assert extents.allocate(11) is None
    extents.check_integrity()


def test_a_region_begins_with_what_is_known_to_be_taken() -> None:
    extents = Extents()
    assert extents.grow(5) == 0
    assert extents.grow(20, [(2, 3), (5, 1), (18, 2)]) == 5
    assert sorted(extents.holes()) == [(0, 5), (5, 2), (11, 12)]
    extents.check_integrity()
    for start, n in ((7, 3), (10, 1), (23, 2)):
        extents.free(start, n)
    assert sorted(extents.holes()) == [(0, 5), (5, 20)]
    before = extents.n_units
    for runs in ([(2, 3), (4, 1)], [(19, 2)], [(0, 0)], [(-1, 2)]):
        with pytest.raises(ValueError):
            extents.grow(20, runs)
    assert extents.n_units == before
    extents.check_integrity()


def test_a_free_region_can_be_retired_and_its_offsets_do_not_return() -> None:
    extents = space(10, 10)
    assert extents.allocate(10) == 10
    with pytest.raises(ValueError, match="in use"):
        extents.retire(10)
    assert extents.is_free(0) and not extents.is_free(10)
    extents.retire(0)
    assert (extents.n_units, extents.free_units, extents.largest_hole) == (10, 0, 0)
    assert extents.allocate(1) is None
    assert extents.grow(3) == 20
    extents.check_integrity()


def test_what_is_not_taken_cannot_be_freed() -> None:
    extents = space(100)
    assert extents.allocate(10) == 0
    for offset, n in ((0, 9), (1, 9), (50, 1), (0, 11)):
        with pytest.raises(ValueError):
            extents.free(offset, n)
    extents.free(0, 10)
    with pytest.raises(ValueError):
        extents.free(0, 10)
    with pytest.raises(ValueError):
        extents.allocate(0)
    assert extents.free_units == 100
    extents.check_integrity()


@pytest.mark.parametrize("shift", range(6))
def test_alignment(shift: int) -> None:
    extents = space(300)
    if shift:
        assert extents.allocate(shift) == 0
    offsets = [extents.allocate(40, align=64) for _ in range(4)]
    assert (
        sorted(o for o in offsets if o is not None)
        == [0, 64, 128, 192][bool(shift) :] + [256][: bool(shift)]
    )
    extents.check_integrity()


def test_a_hole_can_be_claimed_whole() -> None:
    extents = space(100)
    assert [extents.allocate(10) for _ in range(3)] == [0, 10, 20]
    extents.free(10, 10)
    assert sorted(extents.holes()) == [(10, 10), (30, 70)]
    assert extents.claim(10) == 10
    with pytest.raises(KeyError):
        extents.claim(10)
    assert extents.free_units == 70
    extents.free(10, 10)
    assert extents.free_units == 80
    extents.check_integrity()


def test_classes_grow_with_size_and_waste_an_eighth_at_most() -> None:
    classes = [_class_of(n) for n in range(1, 5000)]
    assert classes == sorted(classes)
    assert classes[:20] == [*range(1, 16), 16, 16, 17, 17, 18]
    for c in set(classes):
        same = [n for n, each in enumerate(classes, 1) if each == c]
        assert same[-1] - same[0] < max(1, same[0] / 8)


def test_nothing_that_fits_is_refused_and_nothing_leaks() -> None:
    rng = random.Random(0)
    extents = space(5000, 3000)
    held: dict[int, int] = {}
    for step in range(20_000):
        if held and rng.random() < 0.5:
            offset = rng.choice(list(held)[:50])
            extents.free(offset, held.pop(offset))
        else:
            n = rng.choice((1, 2, 3, 7, 16, 17, 33, 100, 900))
            offset_or_none = extents.allocate(n)
            if offset_or_none is None:
                assert extents.largest_hole < n
            else:
                held[offset_or_none] = n
        if step % 2000 == 0:
            extents.check_integrity()
        assert extents.taken_units == sum(held.values())
    for offset, n in held.items():
        extents.free(offset, n)
    assert sorted(extents.holes()) == [(0, 5000), (5000, 3000)]


def test_many_frees_are_merged_without_being_asked() -> None:
    extents = space(10 * MAX_KEPT)
    offsets = [extents.allocate(1) for _ in range(2 * MAX_KEPT)]
    for offset in offsets:
        assert offset is not None
        extents.free(offset, 1)
    assert extents._n_kept < MAX_KEPT
    extents.check_integrity()


class Model(RuleBasedStateMachine):
    """Against a list of units."""

    def __init__(self) -> None:
        super().__init__()
        self.extents = Extents()
        self.units: list[int] = []  # 0 free, 1 taken, 2 retired
        self.borders: list[tuple[int, int]] = []
        self.held: list[tuple[int, int]] = []

    @rule(n=st.integers(1, 64))
    def grow(self, n: int) -> None:
        start = self.extents.grow(n)
        assert start == len(self.units)
        self.units += [0] * n
        self.borders.append((start, n))

    @rule(n=st.integers(1, 40), align=st.sampled_from((1, 1, 1, 4, 16)))
    def allocate(self, n: int, align: int) -> None:
        fits = [
            at
            for start, length in self.borders
            for at in range(start, start + length - n + 1)
            if at % align == 0 and not any(self.units[at : at + n])
        ]
        offset = self.extents.allocate(n, align)
        assert offset in fits if fits else offset is None
        if offset is not None:
            self.units[offset : offset + n] = [1] * n
            self.held.append((offset, n))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        offset, n = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.extents.free(offset, n)
        self.units[offset : offset + n] = [0] * n

    @rule()
    def merge(self) -> None:
        for start, n in self.extents.holes():
            assert not any(self.units[start : start + n])

    @rule()
    def retire(self) -> None:
        self.extents.holes()
        for start, n in list(self.borders):
            if self.extents.is_free(start):
                self.extents.retire(start)
                self.units[start : start + n] = [2] * n
                self.borders.remove((start, n))
                return

    @invariant()
    def counted(self) -> None:
        self.extents.check_integrity()
        assert self.extents.free_units == self.units.count(0)
        assert self.extents.taken_units == self.units.count(1)


Model.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestModel = Model.TestCase
