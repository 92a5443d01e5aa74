"""The scheduler's side of the connector: which requests are woven, how far, and under which keys."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from itertools import takewhile
from typing import Any

import numpy as np

from kvweave.connect.vllm.asks import Forks, PromptAsk, WeaveLoad, WeaveOffer
from kvweave.connect.vllm.spec import WeaveSpec, spec_of
from kvweave.errors import KVWeaveError

log = logging.getLogger("kvweave.vllm")
Fork = Callable[[Any, Forks], None]
EXACT = b"exact"  # the key of rows of ours that are what a prefill makes, whatever the plan
MOST_PLANS = 1024  # plans that are remembered, the latest
MOST_TAILS = 64  # questions of one plan
REMEMBERED = ("drift", "drift_by", "strategy", "approximate")  # of a plan's last weave


@dataclass(eq=False, slots=True)
class ForkPoint:
    """Rows of a prompt that begins with these ``n_tokens`` stand under ``key`` from ``block`` on; exact
    ones of ours before that, from block ``begins`` on, under one that all plans have."""

    n_tokens: int
    tail: bytes  # digest of the tokens behind the last chunk
    key: bytes  # of its own: rows that stand under that of a point forgotten are not found again
    block: int | None = None  # None: nothing of it was written yet
    begins: int | None = None  # None: no rows of ours before that
    report: dict[str, Any] | None = None  # of the weave that wrote it last

    @property
    def forks(self) -> Forks:
        """Where the chain leaves vLLM's keys."""
        own = () if self.block is None else ((self.block, self.key),)
        shared = self.begins is not None and (self.block is None or self.begins < self.block)
        return ((self.begins, EXACT), *own) if shared and self.begins is not None else own


@dataclass(eq=False, slots=True)
class WovenRequest:
    """A request that asks for a weave, until it has ended."""

    request: Any
    ask: PromptAsk
    asked: bool = False
    found: WeaveOffer | None = None  # None: the worker has not answered yet
    point: ForkPoint | None = None
    grows: bool = False  # the point is of a request that this one goes on from
    n_local: int = 0
    n_exact: int = 0  # of them those that are a prefill's
    goes: bool = False  # as it is, over these rows: once it has its blocks
    block: int = -1  # the first that is written for it
    report: dict[str, Any] | None = None


class Scheduling:
    """Bookkeeping of one scheduler.

    A request waits one step for the worker to say what it would weave. Rows are written from the
    end of the local hit on, never before it, and the chain of block hashes forks right there. What
    of them was exact is known when they are written, and stands under one key for all plans then.
    """

    def __init__(self, fork: Fork, block_size: int, matches: bool) -> None:
        """``fork``: has the chain of a request's hashes leave vLLM's at blocks, each under a key; none:
        has it be vLLM's again.
        ``matches``: a request that says nothing to us is woven too, where chunks are found."""
        self.fork, self.size, self.matches = fork, block_size, matches
        self.is_cached: Callable[[Any], bool] = lambda hash: False  # whether vLLM has such a block
        self._requests: dict[str, WovenRequest] = {}
        self._asks: dict[str, PromptAsk] = {}
        self._loads: dict[str, WeaveLoad] = {}
        self._reports: dict[str, dict[str, Any]] = {}  # by ticket
        self._inexact: list[tuple[PromptAsk, int]] = []  # answered over such rows
        self._n_points = 0
        self._plans: OrderedDict[bytes, list[ForkPoint]] = OrderedDict()  # by `WeaveOffer.digest`
        # prompts whose rows vLLM has under a point, by what they are and how they were asked for
        self._prompts: OrderedDict[bytes, tuple[int, ForkPoint]] = OrderedDict()

    def new(self, request: Any) -> None:
        """A request has come."""
        tokens = request.prompt_token_ids
        try:
            spec = spec_of(request.kv_transfer_params, None if tokens is None else len(tokens))
        except KVWeaveError as error:  # most are refused by the endpoint plugin before
            ask = PromptAsk(tuple(tokens or ()), WeaveSpec())
            woven = WovenRequest(request, ask, found=WeaveOffer())
            woven.report = {"woven": False, "error": error.to_dict()}
            self._requests[request.request_id] = woven
            return
        if spec is None and self.matches:
            spec = WeaveSpec(match=True)
        unfit = (
            tokens is None
            or request.mm_features
            or request.lora_request is not None
            or request.pooling_params is not None
            or request.resumable
            or request.skip_reading_prefix_cache
        )
        if spec is None or unfit:
            return
        ask = PromptAsk(tuple(tokens), spec, request.cache_salt)
        self._requests[request.request_id] = WovenRequest(request, ask)

    def external(self, request: Any, n_local: int) -> tuple[int | None, bool]:
        """Return how many rows behind the ``n_local`` that vLLM has will be woven, and True: beside
        other requests. None: ask again in the next step."""
        woven = self._requests.get(request.request_id)
        if woven is None:
            return 0, False
        if woven.found is None:
            if not woven.asked:
                woven.asked = True
                self._asks[request.request_id] = woven.ask
            return None, False
        woven.n_local, woven.goes = n_local, False
        enough, point = woven.found.useful, woven.point
        if woven.grows:
            enough = max(1, enough // self.size * self.size)
        is_whole = n_local >= enough and point is not None and point.report is not None
        if woven.grows and not is_whole:  # some of it was evicted: all is woven
            woven.grows = False
            self._go_by(woven, self._point(woven.ask, woven.found))
            return None, False
        if point is not None and not is_whole and self._mixes(woven, point):
            self._begin_anew(woven, point)
            return None, False
        is_ours = point is not None and point.block is not None
        if is_ours and not woven.found.looks:
            # of chunks woven for another question vLLM computes the last ones, less than a block
            enough = max(1, enough // self.size * self.size)
        if not is_ours and 0 < n_local < enough < n_local + self.size:
            enough = n_local  # less than a block of a prompt that vLLM has: it computes that
        if point is None or n_local >= enough:
            woven.goes = True
            return 0, False
        woven.n_exact = n_local if point.block is None else min(n_local, point.block * self.size)
        woven.block = block = n_local // self.size
        if point.block is None or block < point.block:
            point.block = block
        if point.begins is not None and block < point.begins:
            point.begins = block
        self.fork(request, point.forks)
        return woven.found.covered - n_local, True

    def allocated(self, request: Any, blocks: tuple[int, ...], n_external: int) -> None:
        """Rows of a request have their blocks."""
        woven = self._requests.get(request.request_id)
        if woven is not None and woven.goes:
            self._goes(woven)
        elif woven is not None and n_external > 0:
            stop = woven.n_local + n_external
            assert woven.found is not None
            self._loads[request.request_id] = WeaveLoad(
                woven.ask, blocks, woven.n_local, stop, woven.found.digest, woven.n_exact
            )

    def _goes(self, woven: WovenRequest) -> None:
        """A request is answered over rows that vLLM has."""
        assert woven.found is not None
        woven.goes, point, report = False, woven.point, _report(woven)
        if woven.ask.spec.ticket and not report["woven"]:
            self._reports[woven.ask.spec.ticket] = report
        if point is None or point.block is None:
            return
        if woven.report is None:  # whatever it is answered over later: it is preempted, say
            woven.report = report
        if point.report is None or point.report["approximate"]:
            self._inexact.append((woven.ask, self._n_own(woven, point)))
        if point.report is not None and (woven.grows or woven.n_local >= woven.found.useful):
            self._note(woven.ask, point)

    def _n_own(self, woven: WovenRequest, point: ForkPoint) -> int:
        """Return how many rows of a prompt stand under vLLM's own keys, where any would find them."""
        return min([woven.n_local, *(block * self.size for block, _ in point.forks[:1])])

    def told(self) -> tuple[dict[str, PromptAsk], dict[str, WeaveLoad]]:
        """Return what the worker is told in this step, by request id."""
        found = self._asks, self._loads
        self._asks, self._loads = {}, {}
        return found

    def reported(self) -> dict[str, dict[str, Any]]:
        """Return reports of requests that the worker does not weave, by ticket, each once."""
        found, self._reports = self._reports, {}
        return found

    def found(self, name: str, found: WeaveOffer) -> None:
        """The worker said what it would weave for a request."""
        woven = self._requests.get(name)
        if woven is None:
            return
        woven.found = found
        if found.error is not None:
            woven.report = {"woven": False, "error": found.error}
        if not found.covered:
            return
        n, size = self._n_cached(woven.request), self.size
        has_all = 0 < n and found.useful < (n + 1) * size  # of chunks, but less than a block
        # what was answered over rows of ours may be longer: a turn behind it goes on from these
        if not has_all or self._earlier(woven.ask, (n + 1) * size, len(woven.ask.tokens)):
            before = self._grown_from(woven.ask, found)
            woven.grows = before is not None
            self._go_by(woven, before or self._point(woven.ask, found))
        if has_all and self._n_cached(woven.request) <= n:
            woven.point, woven.grows = None, False
            self.fork(woven.request, ())

    def _go_by(self, woven: WovenRequest, point: ForkPoint) -> None:
        """Have vLLM find what was written for a request at a point."""
        woven.point = point
        if point.block is None:
            point.begins = self._exact_from(woven.request)
        self.fork(woven.request, point.forks)

    def _mixes(self, woven: WovenRequest, point: ForkPoint) -> bool:
        """Tell whether vLLM has rows of an earlier weave, some or unreported, that what is said of one
        more would not hold for: a bound is of one weave's, and another turn behind the same chunks may
        have all of them repaired."""
        assert woven.found is not None
        if point.block is None or woven.n_local <= point.block * self.size:
            return False
        drift = None if point.report is None else point.report["drift"]
        is_part = woven.n_local < woven.found.useful
        return (
            woven.found.bounded or bool(drift) or (is_part and drift is None and woven.found.looks)
        )

    def _begin_anew(self, woven: WovenRequest, point: ForkPoint) -> None:
        """Have a request find nothing of what was written at a point, which is forgotten."""
        assert woven.found is not None
        points = self._plans.get(woven.found.digest, [])
        if point in points:
            points.remove(point)
        for prompt in [key for key, (_, each) in self._prompts.items() if each is point]:
            del self._prompts[prompt]
        self.fork(woven.request, ())
        self._go_by(woven, self._point(woven.ask, woven.found))

    def wove(self, name: str, report: dict[str, Any]) -> None:
        """The worker wove, or failed to."""
        woven = self._requests.get(name)
        if woven is not None:
            woven.report = of_both(woven.report, report)
            if woven.point is not None and report["woven"]:
                told = {key: report[key] for key in REMEMBERED}
                woven.point.report = _worse(woven.point.report, told)
                self._share(woven, woven.point, report)
                self._note(woven.ask, woven.point)
                if report["approximate"]:
                    self._inexact.append((woven.ask, self._n_own(woven, woven.point)))
            if not report["woven"]:  # vLLM computes it, over none of our rows
                woven.point = None
                self.fork(woven.request, ())

    def _exact_from(self, request: Any) -> int | None:
        """Return the block from which on exact rows of ours are found for a request, of whatever plan:
        behind those that vLLM has of its own. None: there are none."""
        n = self._n_cached(request)
        self.fork(request, ((n, EXACT),))
        return n if self._n_cached(request) > n else None

    def _n_cached(self, request: Any) -> int:
        """Return how many blocks vLLM finds for a request."""
        return sum(1 for _ in takewhile(self.is_cached, request.block_hashes))

    def _share(self, woven: WovenRequest, point: ForkPoint, report: dict[str, Any]) -> None:
        """Have exact rows that were written stand under the key that all plans have."""
        exact = takewhile(lambda span: span["exact"], report.get("spans", ()))
        last = sum(span["n_tokens"] for span in exact) // self.size
        if woven.block == point.block and last > woven.block:
            point.begins, point.block = (
                (woven.block if point.begins is None else point.begins),
                last,
            )
            self.fork(woven.request, point.forks)

    def inexact(self) -> list[tuple[PromptAsk, int]]:
        """Return prompts that are answered over approximate rows, and how many are vLLM's own in front."""
        found, self._inexact = self._inexact, []
        return found

    def finished(self, name: str) -> dict[str, Any] | None:
        """A request has ended; return what its response says of it."""
        woven = self._requests.pop(name, None)
        self._asks.pop(name, None)
        self._loads.pop(name, None)
        return None if woven is None else _report(woven)

    def forget(self) -> None:
        """vLLM has forgotten all blocks."""
        self._plans.clear()
        self._prompts.clear()

    def _note(self, ask: PromptAsk, point: ForkPoint) -> None:
        """vLLM has rows of a prompt under a point."""
        key = _asked(ask)
        key.update(np.asarray(ask.tokens, np.int64).tobytes())
        self._prompts[key.digest()] = len(ask.tokens), point
        self._prompts.move_to_end(key.digest())
        while len(self._prompts) > MOST_PLANS:
            self._prompts.popitem(last=False)

    def _grown_from(self, ask: PromptAsk, found: WeaveOffer) -> ForkPoint | None:
        """Return the point of the longest earlier prompt that has all chunks of this one, behind which it
        goes on: nothing was edited, so its rows stay what they are. None where they depend on the question,
        or a bound does."""
        if found.bounded or found.looks:
            return None
        return self._earlier(ask, found.useful, len(ask.tokens) - 1)

    def _earlier(self, ask: PromptAsk, least: int, most: int) -> ForkPoint | None:
        """Return the point of the longest earlier prompt of so many tokens that this one begins with."""
        sizes = {n for n, _ in self._prompts.values() if least <= n <= most}
        tokens, key, at, longest = np.asarray(ask.tokens, np.int64), _asked(ask), 0, None
        for n in sorted(sizes):
            key.update(tokens[at:n].tobytes())
            longest, at = self._prompts.get(key.copy().digest(), longest), n
        return None if longest is None else longest[1]

    def _point(self, ask: PromptAsk, found: WeaveOffer) -> ForkPoint:
        """Return where rows of a plan leave vLLM's keys: the same for a prompt that goes on from
        one that was woven before."""
        points = self._plans.setdefault(found.digest, [])
        self._plans.move_to_end(found.digest)
        while len(self._plans) > MOST_PLANS:
            self._plans.popitem(last=False)
        for point in sorted(points, key=lambda point: -point.n_tokens):
            n = point.n_tokens
            goes_on = n < len(ask.tokens) and not found.bounded  # a bound is of one question
            if not goes_on and n != len(ask.tokens):
                continue
            if point.tail == _tail(found, ask.tokens[:n]):
                return point
        n = len(ask.tokens) if found.looks else found.useful
        tail = _tail(found, ask.tokens[:n])
        self._n_points += 1
        made = ForkPoint(n, tail, tail + self._n_points.to_bytes(8))
        points.append(made)
        del points[:-MOST_TAILS]
        return made


def _worse(one: dict[str, Any] | None, other: dict[str, Any]) -> dict[str, Any]:
    """Return the one that promises less of two weaves whose rows may be found under one key."""
    if one is None or other["drift"] is None:
        return other
    return one if one["drift"] is None or one["drift"] > other["drift"] else other


def of_both(before: dict[str, Any] | None, report: dict[str, Any]) -> dict[str, Any]:
    """Return what is told of a request that was woven before too, or found rows of a weave: it was
    preempted, and has answered a part by then over those: it has the counts of the second, and how many
    there were."""
    if before is None or not (before["woven"] or "cached" in before):
        return report
    if not report["woven"]:
        return before
    one, other = ({k: each[k] for k in REMEMBERED if k in each} for each in (before, report))
    return report | _worse(one, other) | {"weaves": before.get("weaves", 1) + 1}


def _report(woven: WovenRequest) -> dict[str, Any]:
    """Return what a response says of a request's weave."""
    report = woven.report
    if report is None:
        report, point = {"woven": False}, woven.point
        if point is not None and point.block is not None:
            # rows that we wrote for a request like this, found by vLLM
            report |= {"cached": woven.n_local, "drift": None, **(point.report or {})}
            if report["drift"] and point.n_tokens < len(woven.ask.tokens):  # of another question
                report |= {"drift": None, "drift_by": None}
        elif woven.found is not None:
            report |= {"drift": 0.0, "drift_by": "exact"}
    # what vLLM had of a request that was preempted behind its weave is another number
    local = report["rows"][0] if "rows" in report else report.get("cached", woven.n_local)
    return {**report, "local": local}


def _tail(found: WeaveOffer, tokens: tuple[int, ...]) -> bytes:
    """Return what a plan's rows go by: strategies choose them by what stands behind the chunks."""
    tail = np.asarray(tokens[found.useful :], np.int64).tobytes()
    return blake2b(found.digest + tail, digest_size=16).digest()


def _asked(ask: PromptAsk) -> Any:
    """Return a hash of how a prompt is to be woven, for its tokens to come."""
    spec = ask.spec
    said = (spec.system, spec.repair, spec.share, spec.max_drift, spec.namespace)
    return blake2b(repr(said).encode(), digest_size=16)
