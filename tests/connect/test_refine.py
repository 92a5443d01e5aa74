"""Prompts that vLLM is to prefill while nobody asks, without vLLM."""

from __future__ import annotations

from itertools import pairwise

import pytest
from vllm_blocks import SIZE, ids

from kvweave.connect.vllm import refine
from kvweave.connect.vllm.ahead import DONE, LATER, MORE, SLICE_SECONDS
from kvweave.connect.vllm.asks import PromptAsk
from kvweave.connect.vllm.refine import PromptsAhead
from kvweave.connect.vllm.spec import WeaveSpec

LONG = ids(41, 1)


def asks(tokens, salt=None):
    return PromptAsk(tuple(tokens), WeaveSpec(), salt)


def handed(prompts, seconds=0.0):
    """Return what is handed out until nothing is left."""
    found = []
    while (said := prompts.next(seconds)) != DONE:
        found.append(said)
        assert len(found) < 100
    return found


def test_a_prompt_is_handed_out_a_block_more_each_time_until_no_whole_one_is_left():
    prompts = PromptsAhead(SIZE, lambda: MORE)
    prompts.note(asks(LONG, "salt"), 10)
    found = handed(prompts, 1e6)
    assert found == [(list(LONG[:n]), "salt") for n in range(12, 41, SIZE)]
    assert prompts.next(0) == DONE


@pytest.mark.parametrize(("size", "n_last"), [(40, 40), (41, 40), (43, 40), (44, 44)])
def test_blocks_that_vllm_would_cache_are_all_it_is_about(size, n_last):
    prompts = PromptsAhead(SIZE, lambda: MORE)
    prompts.note(asks(ids(size, 2)), 0)
    assert [len(tokens) for tokens, _ in handed(prompts)][-1] == n_last


def test_pieces_take_as_long_as_a_slice_may():
    prompts, sizes = PromptsAhead(SIZE, lambda: MORE), []
    prompts.note(asks(ids(250, 3)), 0)
    took = [0, SLICE_SECONDS / 9, SLICE_SECONDS / 1.5, SLICE_SECONDS * 3, SLICE_SECONDS * 3, 0]
    before = 0
    for seconds in took:
        n = len(prompts.next(seconds)[0])
        sizes.append(n - before)
        before = n
    assert sizes == [4, 8, 12, 4, 4, 4]
    prompts.note(asks(ids(30_000, 3)), 0)
    n = [len(prompts.next(1e-9)[0]) for _ in range(12)]
    assert max(b - a for a, b in pairwise(n)) == refine.MOST_ROWS


def test_a_long_prompt_comes_in_no_more_pieces_than_there_may_be():
    """Though each takes longer than a slice; and what comes then is as short as ever."""
    prompts = PromptsAhead(SIZE, lambda: MORE)
    prompts.note(asks(ids(9000, 3)), 0)
    found = [len(tokens) for tokens, _ in handed(prompts, 1.0)]
    assert len(found) <= refine.MOST_PIECES + 1 and found[:2] == [140, 280]
    prompts.note(asks(LONG), 0)
    assert len(prompts.next(1.0)[0]) == SIZE


def test_nothing_is_handed_out_while_others_run():
    says = [LATER, MORE]
    prompts = PromptsAhead(SIZE, lambda: says.pop(0))
    prompts.note(asks(LONG), 0)
    assert prompts.next(0) == LATER and len(prompts.next(0)[0]) == SIZE


def test_how_long_a_piece_took_is_heard_right_behind_it_when_vllm_has_just_run():
    says = [MORE, LATER, MORE, LATER, MORE]
    prompts = PromptsAhead(SIZE, lambda: says.pop(0))
    prompts.note(asks(LONG), 0)
    found = [prompts.next(seconds) for seconds in (0, 1e-9, 0, 1e-9, 0)]
    assert [said if said == LATER else len(said[0]) for said in found] == [4, LATER, 12, LATER, 28]


def test_what_goes_on_from_a_prompt_stands_for_it_and_begins_where_that_was():
    prompts = PromptsAhead(SIZE, lambda: MORE)
    prompts.note(asks(LONG), 0)
    for n in (SIZE, 2 * SIZE):
        assert len(prompts.next(1e6)[0]) == n
    prompts.note(asks((*LONG, 5, 6, 7)), 0)
    assert len(prompts.next(1e6)[0]) == 3 * SIZE
    assert len(handed(prompts, 1e6)) == 8, "the one before is not handed out too"


def test_prompts_of_another_salt_or_an_edit_are_others_and_the_latest_comes_first():
    prompts = PromptsAhead(SIZE, lambda: MORE)
    prompts.note(asks(LONG), 0)
    prompts.note(asks((*LONG, 5, 6), "salt"), 0)
    prompts.note(asks((7, *LONG[1:])), 0)
    ends = [(tokens[0], salt) for tokens, salt in handed(prompts, 1e-9) if len(tokens) >= 40]
    assert ends == [(7, None), (LONG[0], "salt"), (LONG[0], None)]
    for i in range(9):
        prompts.note(asks(ids(20, 10 + i)), 0)
    assert len(prompts._waiting) == refine.MOST_PROMPTS


def test_nothing_waits_where_it_is_off():
    prompts = PromptsAhead(SIZE, lambda: MORE, on=False)
    prompts.note(asks(LONG), 0)
    assert prompts.next(0) == DONE
