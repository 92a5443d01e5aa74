"""Who runs in this step: one row for every decoding job, the rest of the rows shared fairly.

A job has rows to prefill (or repair) first, then tokens to generate. The piece that ends its
prefill also yields its first token, so ``n_left`` tokens cost ``n_left - 1`` decode steps::

    add(n_pending=700, n_left=3)   max_rows=512
    step 1  512 rows prefill       step 3  1 row  decode   (token 2)
    step 2  188 rows prefill       step 4  1 row  decode   (token 3, gone)
            (token 1)

What comes before the first token may only be known bit by bit: a grant is taken back with the rows
that are pending from then on, and the job keeps its place in the queue. Jobs that cannot run yet
are held: they keep their place as well.

Pending jobs are served by deficit round robin with divisible rows: tenants take turns of
``quantum`` rows, and inside a tenant jobs take turns in order of arrival, so that neither a
tenant with many jobs nor one long prefill holds up the others. A turn that the step's budget
cuts short goes on in the next step. No torch here: the steps are tested as exact lists.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass

from kvweave.errors import InvalidArgument
from kvweave.run.ledger import Ledger

MUCH = 64  # rows lately, with which one had a share
GREEDY = 4  # what may take its time has so many times fewer rows where a tenant had its share


@dataclass(slots=True)
class Job:
    """One request as the schedule sees it; any thread may set ``cancelled``."""

    key: int
    n_pending: int  # rows still to prefill or repair, as far as they are known
    n_left: int  # tokens still to generate
    tenant: str = ""
    cancelled: bool = False
    background: bool = False  # nobody's: it slows nobody, whoever is there
    urgent: bool = False  # it generates nothing, but what does waits for it


@dataclass(frozen=True, slots=True)
class Grant:
    """What one job runs in one step: ``n_rows`` rows, one if it decodes."""

    key: int
    n_rows: int
    is_decode: bool


class Schedule:
    """Plan steps of at most ``max_rows`` rows with at most ``max_batch`` decoding jobs.

    ``step()`` hands out grants, ``done()`` takes each of them back before the next ``step()``.
    While jobs are pending, at least one row of every step is theirs; where others
    decode, those that generate nothing and are not urgent (they store a chunk) have ``beside`` rows together. So have all
    of a tenant that had its share of the model lately, where another one is there that had little.
    """

    def __init__(self, max_batch: int = 16, max_rows: int = 512) -> None:
        if max_batch < 1:
            raise InvalidArgument("max_batch", f"{max_batch} is below 1")
        if max_rows < 2:
            raise InvalidArgument("max_rows", f"{max_rows} is below 2: one to decode, one to fill")
        self.max_batch = max_batch
        self.max_rows = max_rows
        self.beside = max_rows
        """Rows a step for what may take its time, while something else may not."""

        self.most = max_rows
        """Rows a step, while somebody else may come at any moment; turns are shorter then, too."""

        self.rows = 0, 0, 0
        """Of the last step: rows that decode, that may take their time, and others."""

        self._ledger = Ledger(MUCH)

        self._quantum = max(1, max_rows // 4)
        self._jobs: dict[int, Job] = {}
        self._decoding: deque[int] = deque()  # keys, next to run first
        self._tenants: deque[str] = deque()  # tenants with pending jobs, next to run first
        self._pending: dict[str, deque[int]] = {}  # tenant -> keys, next to run first
        self._credit = 0  # rows left of the first tenant's turn; 0: its turn has not begun
        self._out: dict[int, int] = {}  # key -> rows handed out, not yet done

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, key: int) -> bool:
        return key in self._jobs

    @property
    def quantum(self) -> int:
        """Rows of a turn; a shorter prefill is never cut by a rival."""
        return min(self._quantum, max(1, self.most // 4))

    def job(self, key: int) -> Job:
        """Return the job with this key; raises InvalidArgument when there is none."""
        if key not in self._jobs:
            raise InvalidArgument("key", f"no job {key}")
        return self._jobs[key]

    def add(self, job: Job) -> None:
        """Queue a job behind its tenant's others.

        Raises InvalidArgument for a key already here and for a job with nothing to do.
        """
        if job.key in self._jobs:
            raise InvalidArgument("key", f"job {job.key} is already here")
        if job.n_pending < 0 or job.n_left < 0 or job.n_pending + job.n_left == 0:
            raise InvalidArgument(
                "job", f"{job.n_pending} rows and {job.n_left} tokens: nothing to do"
            )
        self._jobs[job.key] = job
        if job.n_pending:
            self._enqueue(job)
        else:
            self._decoding.append(job.key)

    def cancel(self, key: int) -> bool:
        """Let a job go, at its ``done()`` when it is running; False when there is no such job."""
        job = self._jobs.get(key)
        if job is None:
            return False
        job.cancelled = True
        if key not in self._out:
            self._remove(job)
        return True

    def step(self, held: Collection[int] = ()) -> list[Grant]:
        """Return this step's grants, decoding ones first; empty when there is nothing to do.

        Jobs whose keys are in ``held`` get none. Raises InvalidArgument while grants of the step before have not been done.
        """
        if self._out:
            raise InvalidArgument("step", f"grants of {sorted(self._out)} are not done yet")
        for job in [job for job in self._jobs.values() if job.cancelled]:
            self._remove(job)
        waiting = {key for queue in self._pending.values() for key in queue if key not in held}
        n_most = min(self.max_batch, self.max_rows - (1 if waiting else 0))
        greedy = self._ledger.greedy({j.tenant for j in self._jobs.values() if not j.background})
        greedy = greedy if self.beside < self.max_rows else set()
        decoding = self._next_to_decode(held, waiting, greedy)[:n_most]
        for key in decoding:
            self._decoding.remove(key)
            self._decoding.append(key)
        grants = [Grant(key, 1, True) for key in decoding]
        slow = self._slow(waiting, greedy, bool(decoding))
        left = max(1, min(self.max_rows, self.most) - len(decoding))
        pieces = self._share(left, waiting - slow)
        n_urgent = sum(pieces.values())
        most = self.beside // GREEDY if greedy else self.beside
        pieces |= self._share(min(most, left - n_urgent), slow)
        self.rows = len(decoding), sum(pieces.values()) - n_urgent, n_urgent
        grants += [Grant(key, n_rows, False) for key, n_rows in pieces.items()]
        self._out = {grant.key: grant.n_rows for grant in grants}
        mine = ((self._jobs[grant.key], grant.n_rows) for grant in grants)
        self._ledger.note((job.tenant, n_rows) for job, n_rows in mine if not job.background)
        return grants

    def done(
        self, key: int, n_rows: int, finished: bool = False, pending: int | None = None
    ) -> None:
        """Take a grant back: ``n_rows`` of its rows were run; ``finished`` ends the job early.

        ``pending`` says how many rows a job has before its first token from now on, where that is
        not what the grant left of them. A failed grant is ``done(key, 0)`` to try again, or with
        ``finished=True`` to give up. Raises InvalidArgument for a grant that was not handed out, or
        more rows than it had, and for pending rows of a job that decodes.
        """
        if key not in self._out:
            raise InvalidArgument("key", f"job {key} has no grant")
        if not 0 <= n_rows <= self._out[key]:
            raise InvalidArgument("n_rows", f"{n_rows} is not in 0..{self._out[key]}")
        job = self._jobs[key]
        was_pending = job.n_pending > 0
        if pending is not None and not (was_pending and pending >= 0):
            raise InvalidArgument("pending", f"{pending} rows of {job}")
        del self._out[key]
        if was_pending:
            job.n_pending = job.n_pending - n_rows if pending is None else pending
        if not job.n_pending and (n_rows or was_pending):
            job.n_left -= 1
        if finished or job.cancelled or (not job.n_pending and job.n_left <= 0):
            self._remove(job, was_pending)
        elif was_pending and not job.n_pending:
            self._dequeue(job)
            self._decoding.append(key)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every job stands in exactly one queue."""
        waiting = [key for queue in self._pending.values() for key in queue]
        places = Counter([*waiting, *self._decoding])
        assert set(places) == set(self._jobs), "queues and jobs differ"
        assert all(n == 1 for n in places.values()), "a job stands in two places"
        assert all(self._jobs[key].n_pending > 0 for key in waiting), "nothing is pending"
        assert all(self._jobs[key].n_pending == 0 for key in self._decoding), "decodes too early"
        for tenant, queue in self._pending.items():
            assert queue, f"tenant {tenant!r} has an empty queue"
            assert all(self._jobs[key].tenant == tenant for key in queue), "wrong tenant"
        assert sorted(self._tenants) == sorted(self._pending), "tenants and queues differ"
        assert 0 <= self._credit <= self._quantum, "credit out of range"
        assert self._tenants or not self._credit, "credit without a tenant"
        assert set(self._out) <= set(self._jobs), "a grant without its job"
        assert sum(self._out.values()) <= self.max_rows, "more rows than the budget"

    def _next_to_decode(
        self, held: Collection[int], waiting: set[int], greedy: set[str]
    ) -> list[int]:
        """Return the jobs that may decode now: of those who had their share as many as others have that
        decode, or wait for their first token."""
        ready = [key for key in self._decoding if key not in held]
        modest = [key for key in ready if self._jobs[key].tenant not in greedy]
        if not greedy:
            return modest
        others = [key for key in ready if self._jobs[key].tenant in greedy]
        first = (self._jobs[key] for key in waiting)
        n = len(modest) + sum(job.tenant not in greedy and self._hurries(job) for job in first)
        return modest + (others[:n] if n else others)

    @staticmethod
    def _hurries(job: Job) -> bool:
        return bool(job.n_left or job.urgent)

    def _slow(self, waiting: set[int], greedy: set[str], decodes: bool) -> set[int]:
        """Return the jobs of ``waiting`` that may take their time, if there are any that may not."""
        if self.beside >= self.max_rows:
            return set()
        slow = {
            key
            for key in waiting
            if (job := self._jobs[key]).tenant in greedy or (decodes and not self._hurries(job))
        }
        return slow if decodes or len(slow) < len(waiting) else set()

    def _share(self, budget: int, waiting: set[int]) -> dict[int, int]:
        """Split ``budget`` rows over ``waiting`` jobs: key -> rows, in order of first service.

        Takes those out whose every row is in this step.
        """
        rows: dict[int, int] = {}
        while budget and waiting:
            queue = self._pending[self._tenants[0]]
            key = next((key for key in queue if key in waiting), None)
            if key is None:
                self._next_tenant()
                continue
            self._credit = min(self._credit, self.quantum) or self.quantum
            unplanned = self._jobs[key].n_pending - rows.get(key, 0)
            piece = min(unplanned, self._credit, budget)
            rows[key] = rows.get(key, 0) + piece
            budget -= piece
            self._credit -= piece
            if piece == unplanned:
                waiting.remove(key)
            if not self._credit:
                queue.remove(key)
                queue.append(key)
                self._next_tenant()
        return rows

    def _next_tenant(self) -> None:
        self._tenants.rotate(-1)
        self._credit = 0

    def _enqueue(self, job: Job) -> None:
        if job.tenant not in self._pending:
            self._pending[job.tenant] = deque()
            self._tenants.append(job.tenant)
        self._pending[job.tenant].append(job.key)

    def _dequeue(self, job: Job) -> None:
        queue = self._pending[job.tenant]
        queue.remove(job.key)
        if queue:
            return
        del self._pending[job.tenant]
        if self._tenants[0] == job.tenant:
            self._credit = 0
        self._tenants.remove(job.tenant)

    def _remove(self, job: Job, was_pending: bool | None = None) -> None:
        if job.n_pending > 0 if was_pending is None else was_pending:
            self._dequeue(job)
        else:
            self._decoding.remove(job.key)
        del self._jobs[job.key]
