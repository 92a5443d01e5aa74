from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave.chunk.postings import TRIED, Postings


def passing(table: Postings, keys: list[int]) -> list[int]:
    return table.passing(np.array(keys, np.uint64)).tolist()


def test_get_gives_the_two_oldest_and_the_two_newest():
    table = Postings()
    for id in range(1, 9):
        table.add(id, {7: 10 * id})
    assert TRIED == 4
    assert table.get(7) == [(1, 10), (2, 20), (8, 80), (7, 70)]
    assert table.get(7, 5) == [(5, 50), (1, 10), (2, 20), (8, 80), (7, 70)]
    assert table.get(7, 1) == table.get(7, 99) == table.get(7)
    table.remove(1, [7])
    table.remove(8, [7])
    assert table.get(7) == [(2, 20), (3, 30), (7, 70), (6, 60)]
    for id in range(2, 6):
        table.remove(id, [7])
    assert table.get(7) == [(6, 60), (7, 70)]
    assert table.get(8) == []
    assert len(table) == 1
    table.check_integrity({7: {6: 60, 7: 70}})


def test_passing_lets_all_known_hashes_through_and_few_others():
    rng = np.random.default_rng(0)
    keys = rng.integers(0, 2**64, 5000, dtype=np.uint64)
    table = Postings()
    assert passing(table, [1, 2, 3]) == []
    for id, key in enumerate(keys.tolist()):
        table.add(id, {key: 0})
    assert table.passing(keys).tolist() == [*range(5000)]
    others = rng.integers(0, 2**64, 100_000, dtype=np.uint64)
    assert len(table.passing(others)) < 2000
    for id, key in enumerate(keys.tolist()):
        table.remove(id, [key])
    assert len(table) == 0 and len(table.passing(keys)) == 0
    table.check_integrity({})


def test_flags_say_what_passes_and_known_what_is_in():
    rng = np.random.default_rng(1)
    keys = rng.integers(0, 2**64, 3000, dtype=np.uint64)
    table = Postings()
    assert table.flags(keys[:3]) == bytes(3) and not table.known(keys[:3]).any()
    for id, key in enumerate(keys[:1000].tolist()):
        table.add(id, {key: 0})
    flags = table.flags(keys)
    assert [i for i, flag in enumerate(flags) if flag == 1] == table.passing(keys).tolist()
    assert set(flags) == {0, 1} and flags[:1000] == b"\1" * 1000
    assert table.known(keys).tolist() == [True] * 1000 + [False] * 2000
    assert table.known(keys[:0]).tolist() == []


def test_a_slot_that_overflows_never_loses_a_hash():
    table = Postings()
    keys = [j << 20 for j in range(300)]  # the same first and last bits: the same two slots
    for id, key in enumerate(keys):
        table.add(id, {key: 0})
    for id, key in enumerate(keys[:-1]):
        table.remove(id, [key])
    table.check_integrity({keys[-1]: {299: 0}})
    assert 299 in passing(table, keys)


def test_integrity_sees_a_wrong_count_and_a_wrong_entry():
    for damage in (
        lambda t: t._counts.__setitem__(0, 1),
        lambda t: t._first.pop(2**40),
        lambda t: t._more.__setitem__(2**40, {}),
        lambda t: t._first.__setitem__(2**40, 5 << 32 | 1),
    ):
        table = Postings()
        table.add(5, {2**40: 0, 2**63 + 9: 3})
        table.check_integrity(entered := {2**40: {5: 0}, 2**63 + 9: {5: 3}})
        damage(table)
        try:
            table.check_integrity(entered)
        except AssertionError:
            continue
        raise RuntimeError("not seen")


steps = st.lists(
    st.tuples(st.integers(0, 5), st.dictionaries(st.integers(0, 5), st.integers(0, 9)))
)


@settings(deadline=None)
@given(steps)
def test_it_is_a_dict_of_dicts(steps):
    table, model = Postings(), {}
    entered: dict[int, dict[int, int]] = {}
    for id, entries in steps:
        if id in entered:
            for key in entered.pop(id):
                del model[key][id]
            table.remove(id, [key for key in range(6) if id in dict(table.get(key, id))])
        else:
            entered[id] = entries
            table.add(id, entries)
            for key, offset in entries.items():
                model.setdefault(key, {})[id] = offset
        model = {key: ids for key, ids in model.items() if ids}
        table.check_integrity(model)
