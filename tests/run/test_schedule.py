"""The schedule as exact step lists, then as properties over random traffic."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvweave.errors import InvalidArgument
from kvweave.run.schedule import GREEDY, Grant, Job, Schedule


def jobs(*specs: tuple[int, int, int] | tuple[int, int, int, str]) -> list[Job]:
    return [Job(*spec) for spec in specs]


def run(schedule: Schedule, n_steps: int = 10_000) -> list[list[tuple[int, int, bool]]]:
    """Run up to ``n_steps`` steps, or until there is nothing to do: what ran in each of them."""
    steps = []
    for _ in range(n_steps):
        grants = schedule.step()
        schedule.check_integrity()
        if not grants:
            break
        for grant in grants:
            schedule.done(grant.key, grant.n_rows, finished=False)
            schedule.check_integrity()
        steps.append([(grant.key, grant.n_rows, grant.is_decode) for grant in grants])
    return steps


def filled(max_batch: int, max_rows: int, *queue: Job) -> Schedule:
    schedule = Schedule(max_batch, max_rows)
    for job in queue:
        schedule.add(job)
    schedule.check_integrity()
    return schedule


def test_one_job_is_cut_and_its_last_piece_yields_the_first_token():
    schedule = filled(16, 512, *jobs((1, 700, 3)))
    assert run(schedule) == [
        [(1, 512, False)],
        [(1, 188, False)],
        [(1, 1, True)],
        [(1, 1, True)],
    ]
    assert len(schedule) == 0


def test_a_job_that_only_prefills_never_decodes():
    assert run(filled(4, 8, *jobs((1, 10, 0)))) == [[(1, 8, False)], [(1, 2, False)]]


def test_a_job_without_pending_rows_decodes_at_once():
    assert run(filled(4, 8, *jobs((1, 0, 2)))) == [[(1, 1, True)], [(1, 1, True)]]


def test_a_long_prefill_does_not_stop_a_decoding_job():
    schedule = filled(4, 8, *jobs((1, 0, 3), (2, 20, 1)))
    assert run(schedule) == [
        [(1, 1, True), (2, 7, False)],
        [(1, 1, True), (2, 7, False)],
        [(1, 1, True), (2, 6, False)],
    ]


def test_decoding_jobs_do_not_stop_a_prefill_even_when_they_fill_the_step():
    schedule = filled(8, 4, *jobs((1, 0, 9), (2, 0, 9), (3, 0, 9), (4, 0, 9), (5, 2, 1)))
    assert run(schedule, 2) == [
        [(1, 1, True), (2, 1, True), (3, 1, True), (5, 1, False)],
        [(4, 1, True), (1, 1, True), (2, 1, True), (5, 1, False)],
    ]


def test_more_decoding_jobs_than_the_batch_take_turns():
    schedule = filled(2, 8, *jobs((1, 0, 2), (2, 0, 2), (3, 0, 2)))
    keys = [[key for key, _, _ in step] for step in run(schedule)]
    assert keys == [[1, 2], [3, 1], [2, 3]]


def test_a_short_job_behind_a_long_one_of_its_tenant_runs_in_the_same_step():
    schedule = filled(4, 16, *jobs((1, 100, 1), (2, 3, 1)))
    assert schedule.quantum == 4
    assert run(schedule, 1) == [[(1, 13, False), (2, 3, False)]]


def test_equal_jobs_of_one_tenant_that_fit_a_quantum_run_first_come_first_served():
    schedule = filled(4, 8, *jobs((1, 2, 0), (2, 2, 0), (3, 2, 0), (4, 2, 0), (5, 2, 0)))
    assert run(schedule) == [
        [(1, 2, False), (2, 2, False), (3, 2, False), (4, 2, False)],
        [(5, 2, False)],
    ]


def test_a_tenant_with_many_jobs_gets_no_more_than_one_with_few():
    crowd = [Job(key, 8, 0, "crowd") for key in range(1, 6)]
    schedule = filled(4, 8, *crowd, Job(9, 8, 0, "alone"))
    steps = run(schedule, 2)
    assert steps == [
        [(1, 2, False), (9, 4, False), (2, 2, False)],
        [(3, 2, False), (9, 4, False), (4, 2, False)],
    ]


def test_a_turn_cut_by_the_budget_goes_on_in_the_next_step():
    # Six rows left by two decoding jobs and a quantum of 4: tenant b gets 2 of its 4 rows.
    queue = jobs((1, 0, 9), (2, 0, 9), (3, 90, 1, "a"), (4, 90, 1, "b"))
    schedule = filled(2, 16, *queue)
    schedule.max_rows = 8
    decode = [(1, 1, True), (2, 1, True)]
    assert run(schedule, 3) == [
        [*decode, (3, 4, False), (4, 2, False)],
        [*decode, (4, 2, False), (3, 4, False)],
        [*decode, (4, 4, False), (3, 2, False)],
    ]


def test_what_a_tenant_leaves_of_its_turn_goes_to_no_one():
    schedule = filled(4, 8, Job(1, 0, 9), Job(2, 1, 0, "a"), Job(3, 90, 0, "b"), Job(4, 90, 0, "c"))
    assert schedule.quantum == 2
    decode = [(1, 1, True)]
    assert run(schedule, 1) == [[*decode, (2, 1, False), (3, 4, False), (4, 2, False)]]


def test_a_piece_done_short_is_planned_again():
    schedule = filled(4, 8, *jobs((1, 8, 2)))
    assert schedule.step() == [Grant(1, 8, False)]
    schedule.done(1, 5)
    assert schedule.step() == [Grant(1, 3, False)]
    schedule.done(1, 0)
    assert schedule.step() == [Grant(1, 3, False)]
    schedule.done(1, 3)
    assert schedule.step() == [Grant(1, 1, True)]
    schedule.done(1, 0)
    assert schedule.job(1).n_left == 1
    schedule.check_integrity()


def test_a_job_that_turns_out_to_have_more_rows_keeps_its_place_and_yields_no_token_yet():
    schedule = filled(4, 8, *jobs((1, 3, 2), (2, 30, 0), (3, 0, 9)))
    assert schedule.step() == [Grant(3, 1, True), Grant(1, 3, False), Grant(2, 4, False)]
    schedule.done(3, 1)
    schedule.done(2, 4)
    schedule.done(1, 3, pending=5)
    assert schedule.job(1).n_left == 2
    schedule.check_integrity()
    assert schedule.step() == [Grant(3, 1, True), Grant(1, 3, False), Grant(2, 4, False)]
    schedule.done(3, 1)
    schedule.done(2, 4)
    schedule.done(1, 0, pending=1)  # other rows than those it was to run
    assert [grant for grant in schedule.step() if grant.key == 1] == [Grant(1, 1, False)]
    for grant in (3, 2):
        schedule.done(grant, 0)
    schedule.done(1, 1, pending=0)
    assert schedule.job(1).n_left == 1
    assert schedule.step()[:2] == [Grant(3, 1, True), Grant(1, 1, True)]
    schedule.check_integrity()


def test_a_job_whose_rows_are_not_needed_after_all_decodes():
    schedule = filled(4, 8, *jobs((1, 6, 3)))
    schedule.step()
    schedule.done(1, 0, pending=0)
    assert run(schedule) == [[(1, 1, True)], [(1, 1, True)]]


def test_held_jobs_get_no_turn_and_keep_their_place():
    schedule = filled(2, 8, *jobs((1, 0, 9), (2, 0, 9), (3, 0, 9), (4, 5, 0), (5, 5, 0)))

    def keys(*held: int) -> list[int]:
        grants = schedule.step(held)
        schedule.check_integrity()
        for grant in grants:
            schedule.done(grant.key, 0)
        return [grant.key for grant in grants]

    assert keys(1, 4) == [2, 3, 5]
    assert keys() == [1, 2, 4, 5]
    assert keys(4, 5) == [3, 1]
    assert keys(1, 2, 3, 4, 5) == []
    assert keys(1, 2, 3) == [5, 4]


def test_who_is_held_leaves_its_rows_to_others_and_the_row_spared_for_it_to_decoding():
    schedule = filled(4, 4, *[Job(key, 0, 9) for key in range(4)], Job(8, 9, 0, "a"))
    assert [grant.key for grant in schedule.step({8})] == [0, 1, 2, 3]


@pytest.mark.parametrize("n_pending", [0, 3])
def test_finished_ends_a_job_that_had_more_to_do(n_pending):
    schedule = filled(4, 8, Job(1, n_pending, 50))
    (grant,) = schedule.step()
    schedule.done(1, grant.n_rows, finished=True)
    schedule.check_integrity()
    assert len(schedule) == 0 and schedule.step() == []


def test_cancel_frees_a_waiting_job_at_once_and_a_running_one_when_it_is_done():
    schedule = filled(4, 8, *jobs((1, 20, 5), (2, 0, 5)))
    grants = schedule.step()
    assert schedule.cancel(1) and len(schedule) == 2
    for grant in grants:
        schedule.done(grant.key, grant.n_rows)
    assert 1 not in schedule and schedule.cancel(2) and len(schedule) == 0
    schedule.check_integrity()
    assert not schedule.cancel(2)


def test_a_flag_set_by_another_thread_frees_the_job_at_the_next_step():
    doomed = Job(1, 20, 5)
    schedule = filled(4, 8, doomed, Job(2, 3, 1))
    doomed.cancelled = True
    assert schedule.step() == [Grant(2, 3, False)]
    assert 1 not in schedule


def test_a_tenant_that_leaves_in_mid_turn_leaves_no_credit_behind():
    schedule = filled(4, 8, Job(1, 0, 9), Job(2, 90, 0, "a"), Job(3, 90, 0, "b"))
    assert run(schedule, 1) == [[(1, 1, True), (2, 4, False), (3, 3, False)]]
    schedule.cancel(3)  # with one row of its turn left
    schedule.add(Job(4, 90, 0, "c"))
    assert run(schedule, 1) == [[(1, 1, True), (2, 4, False), (4, 3, False)]]


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("max_batch", lambda s: Schedule(max_batch=0)),
        ("max_rows", lambda s: Schedule(max_rows=1)),
        ("key", lambda s: s.add(Job(1, 5, 5))),
        ("job", lambda s: s.add(Job(3, 0, 0))),
        ("job", lambda s: s.add(Job(3, -1, 5))),
        ("key", lambda s: s.job(7)),
        ("key", lambda s: s.done(7, 1)),
        ("n_rows", lambda s: s.done(1, 6)),
        ("n_rows", lambda s: s.done(1, -1)),
        ("pending", lambda s: s.done(1, 5, pending=-1)),
        ("pending", lambda s: s.done(2, 1, pending=3)),
        ("step", lambda s: s.step()),
    ],
)
def test_wrong_calls_are_refused_and_change_nothing(argument, call):
    schedule = filled(4, 8, Job(1, 5, 5), Job(2, 0, 1))
    schedule.step()
    with pytest.raises(InvalidArgument) as error:
        call(schedule)
    assert error.value.argument == argument
    schedule.check_integrity()
    schedule.done(2, 1)
    schedule.done(1, 5)
    assert schedule.step() == [Grant(1, 1, True)]


traffic = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 9), st.sampled_from("abc")).filter(
        lambda spec: spec[0] + spec[1] > 0
    ),
    min_size=1,
    max_size=12,
)


@given(traffic, st.integers(1, 6), st.integers(2, 24))
def test_steps_stay_in_budget_and_every_job_gets_exactly_what_it_asked_for(specs, batch, rows):
    queue = [Job(key, *spec) for key, spec in enumerate(specs)]
    schedule = filled(batch, rows, *queue)
    prefilled, decoded = [0] * len(queue), [0] * len(queue)
    waits = dict.fromkeys(range(len(queue)), 0)
    # One round of every queue, in steps of at least this many pending rows; see the docstring.
    spare = rows - min(batch, rows - 1)
    bound = 1 + math.ceil(len(queue) / min(batch, rows - 1))
    bound += math.ceil(3 * len(queue) * schedule.quantum / spare)
    for step in run(schedule):
        assert len({key for key, _, _ in step}) == len(step)
        assert sum(n_rows for _, n_rows, _ in step) <= rows
        assert sum(is_decode for _, _, is_decode in step) <= batch
        for key, n_rows, is_decode in step:
            assert n_rows >= 1
            assert n_rows == 1 or not is_decode
            (decoded if is_decode else prefilled)[key] += n_rows
        waits = {key: waits[key] + 1 for key in waits} | {key: 0 for key, _, _ in step}
        waits = {key: n for key, n in waits.items() if key in schedule}
        assert max(waits.values(), default=0) <= bound
    assert len(schedule) == 0
    assert prefilled == [n_pending for n_pending, _, _ in specs]
    assert decoded == [max(0, n_left - (n_pending > 0)) for n_pending, n_left, _ in specs]


@given(traffic, st.integers(1, 6), st.integers(2, 24))
def test_no_row_is_left_unused_while_a_job_is_pending(specs, batch, rows):
    schedule = filled(batch, rows, *[Job(key, *spec) for key, spec in enumerate(specs)])
    while grants := schedule.step():
        pending = sum(schedule.job(k).n_pending for k in range(len(specs)) if k in schedule)
        used = sum(grant.n_rows for grant in grants if not grant.is_decode)
        n_decode = sum(grant.is_decode for grant in grants)
        assert used == min(pending, rows - n_decode)
        for grant in grants:
            schedule.done(grant.key, grant.n_rows)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(0, 9), st.integers(0, 20), st.integers(0, 4)),
            st.tuples(st.just("cancel"), st.integers(0, 9)),
            st.tuples(st.just("flag"), st.integers(0, 9)),
            st.tuples(st.just("step"), st.sets(st.integers(0, 9), max_size=4)),
            st.tuples(
                st.just("done"), st.floats(0, 1), st.booleans(), st.none() | st.integers(0, 9)
            ),
        ),
        max_size=60,
    )
)
def test_any_sequence_of_calls_keeps_the_queues_whole(calls):
    schedule, out = Schedule(3, 8), []
    for verb, *rest in calls:
        if verb == "add" and rest[0] not in schedule and rest[1] + rest[2] > 0:
            schedule.add(Job(rest[0], rest[1], rest[2], "ab"[rest[0] % 2]))
        elif verb == "cancel":
            schedule.cancel(rest[0])
            assert rest[0] not in schedule or rest[0] in {grant.key for grant in out}
        elif verb == "flag" and rest[0] in schedule:
            schedule.job(rest[0]).cancelled = True
        elif verb == "step" and not out:
            out = schedule.step(rest[0])
            assert not rest[0] & {grant.key for grant in out}
        elif verb == "done" and out:
            grant = out.pop()
            pending = None if grant.is_decode else rest[2]
            schedule.done(grant.key, round(rest[0] * grant.n_rows), rest[1], pending)
        schedule.check_integrity()


def hog(schedule: Schedule, n: int = 3) -> None:
    """A tenant that asks much, and has had much."""
    for i in range(n):
        schedule.add(Job(100 + i, n_pending=10_000, n_left=5, tenant="hog"))
    for _ in range(5):
        for grant in schedule.step():
            schedule.done(grant.key, grant.n_rows)


def test_who_asked_little_is_let_through_where_much_is_asked() -> None:
    schedule = Schedule(max_rows=64)
    hog(schedule)
    schedule.beside = 8
    assert sum(grant.n_rows for grant in schedule.step()) == 64, "alone it may have all"
    for key in range(100, 103):
        if key in schedule._out:
            schedule.done(key, schedule._out[key])
    schedule.add(Job(1, n_pending=40, n_left=3, tenant="kind"))
    rows = {grant.key: grant.n_rows for grant in schedule.step()}
    assert rows.pop(1) == 40 and sum(rows.values()) == 8 // GREEDY
    assert schedule.rows == (0, 8 // GREEDY, 40)
    for key, n in ({1: 40} | rows).items():
        schedule.done(key, n)
    grants = schedule.step()
    assert [grant.key for grant in grants if grant.is_decode] == [1]
    assert sum(grant.n_rows for grant in grants if not grant.is_decode) == 8 // GREEDY


def test_before_a_first_token_few_decode_who_had_much() -> None:
    """Each that decodes makes a step longer, for which the newcomer waits too."""
    schedule = Schedule(max_rows=64)
    for i in range(6):
        schedule.add(Job(100 + i, n_pending=20, n_left=500, tenant="hog"))
    schedule.add(Job(200, n_pending=10_000, n_left=0, tenant="hog"))
    run(schedule, 30)
    schedule.beside = 8
    schedule.add(Job(2, n_pending=300, n_left=3, tenant="kind"))
    seen: Counter[int] = Counter()
    for _ in range(5):
        grants = schedule.step()
        assert any(grant.key == 2 for grant in grants)
        decoding = [grant.key for grant in grants if grant.is_decode]
        assert len(decoding) == 1
        seen.update(decoding)
        for grant in grants:
            schedule.done(grant.key, grant.n_rows)
    assert len(seen) == 5, "they take turns"
    schedule.cancel(2)
    schedule.add(Job(3, n_pending=300, n_left=0, tenant="kind"))
    decoding = [grant for grant in schedule.step() if grant.is_decode]
    assert len(decoding) == 6, "nobody waits for a token of one that stores a chunk"


def test_of_equals_nobody_waits_for_another() -> None:
    schedule = Schedule(max_rows=64)
    hog(schedule)
    schedule.beside = 8
    schedule.add(Job(1, n_pending=10_000, n_left=3, tenant="late"))
    had: Counter[str] = Counter()
    for _ in range(400):
        for grant in schedule.step():
            had["late" if grant.key == 1 else "hog"] += grant.n_rows
            schedule.done(grant.key, grant.n_rows)
    assert had["late"] > 3 * 400, "it took what was its own"
    assert had["hog"] > 3 * 400, "the other had its share first, and starved"


def test_what_generates_nothing_takes_its_time_while_others_decode() -> None:
    schedule = Schedule(max_rows=64)
    schedule.beside = 5
    schedule.add(Job(1, n_pending=0, n_left=9))
    schedule.add(Job(2, n_pending=600, n_left=0))
    grants = schedule.step()
    assert {grant.key: grant.n_rows for grant in grants} == {1: 1, 2: 5}
    assert schedule.rows == (1, 5, 0)
    for grant in grants:
        schedule.done(grant.key, grant.n_rows)
    schedule.cancel(1)
    assert [grant.n_rows for grant in schedule.step()] == [64]


# ---- where others may come


@given(traffic, st.integers(1, 6), st.integers(8, 24), st.lists(st.integers(1, 30), min_size=1))
def test_steps_are_as_short_as_they_are_asked_to_be(specs, batch, rows, most):
    queue = [Job(key, *spec) for key, spec in enumerate(specs)]
    schedule = filled(batch, rows, *queue)
    prefilled, n = [0] * len(queue), 0
    while True:
        schedule.most = most[n % len(most)]
        grants = schedule.step()
        if not grants:
            break
        pieces = [grant.n_rows for grant in grants if not grant.is_decode]
        decoding = len(grants) - len(pieces)
        assert sum(pieces) <= max(1, min(rows, schedule.most) - decoding)
        for grant in grants:
            prefilled[grant.key] += grant.n_rows * (not grant.is_decode)
            schedule.done(grant.key, grant.n_rows)
        schedule.check_integrity()
        n += 1
    assert prefilled == [spec[0] for spec in specs]


def test_in_short_steps_turns_are_short_too() -> None:
    """A newcomer has rows in the second step at the latest, however many were there first."""
    schedule = filled(4, 512, *(Job(key, 5000, 1, f"t{key}") for key in range(3)))
    schedule.most = 32
    run(schedule, 5)
    schedule.add(Job(9, 8, 1, "new"))
    assert any(key == 9 for step in run(schedule, 2) for key, _, _ in step)
    schedule.most = 512
    run(schedule, 1)
    assert schedule.quantum == 128
