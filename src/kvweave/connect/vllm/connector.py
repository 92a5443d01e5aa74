"""vLLM's KV connector, version 1: chunks at any position, inside an unmodified vLLM.

``--kv-transfer-config`` names this class; see docs/vllm.md. One object lives in the scheduler
(`Scheduling` decides), another in the worker (`Host` weaves).
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed import get_tp_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)

from kvweave.connect.vllm.ahead import LATER
from kvweave.connect.vllm.backend import VllmBackend
from kvweave.connect.vllm.fork import Forker
from kvweave.connect.vllm.host import Host, WeaveJob
from kvweave.connect.vllm.lockstep import Lockstep
from kvweave.connect.vllm.paged import Paged
from kvweave.connect.vllm.refine import PromptsAhead
from kvweave.connect.vllm.scheduling import Scheduling, of_both
from kvweave.connect.vllm.selftest import require_equal
from kvweave.connect.vllm.verbs import Verbs
from kvweave.connect.vllm.versions import require_known
from kvweave.connect.vllm.wire import StepMeta, StepReply
from kvweave.errors import InvalidArgument

log = logging.getLogger("kvweave.vllm")
MOST_REPORTS = 1024  # of streams, that wait for their last event


class KVWeaveConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Weaves declared chunks into the blocks of requests.

    Options (``kv_connector_extra_config``): ``match`` (look for known chunks in every prompt),
    ``ahead`` (chunks are computed while nobody waits, and are new text until then), ``refine`` (so are
    prompts that were answered over approximate rows), ``home``, ``base``, and the fields of
    `kvweave.config.Config`.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        require_known(vllm_config, kv_cache_config)
        self.block_size: int = vllm_config.cache_config.block_size
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None
        options = dict(transfer.kv_connector_extra_config or {})
        matches = _flag(options, "match")
        self.ahead, refines = _flag(options, "ahead"), _flag(options, "refine")
        if refines and not vllm_config.cache_config.enable_prefix_caching:
            raise InvalidArgument("refine", "this vLLM caches no prefixes", "leave it out")
        self.options = options
        self.host: Host | None = None
        self.verbs: Verbs | None = None
        self.prompts = PromptsAhead(
            self.block_size, lambda: LATER if self.host is None else self.host.says(), refines
        )
        algorithm = vllm_config.cache_config.prefix_caching_hash_algo
        fork = Forker(algorithm, self.block_size)
        self.scheduling = Scheduling(fork, self.block_size, matches)
        self._over: dict[str, WeaveJob] = {}
        self.reports: OrderedDict[str, dict[str, Any]] = OrderedDict()  # of streams, by ticket
        self._reply = StepReply()

    # ---- the scheduler's side

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Blocks are found in this pool; all layers are of its one group."""
        self.scheduling.is_cached = lambda hash: bool(gpu_block_pool.get_cached_block(hash, [0]))

    def on_new_request(self, request: Any) -> None:
        """A request has come."""
        self.scheduling.new(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many rows will be woven behind the local hit; see `Scheduling.external`."""
        return self.scheduling.external(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Rows of a request have their blocks."""
        self.scheduling.allocated(request, tuple(blocks.get_block_ids()[0]), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Return what the worker is told in this step."""
        idle = scheduler_output.total_num_scheduled_tokens == 0
        scheduling = self.scheduling
        return StepMeta(*scheduling.told(), scheduling.reported(), scheduling.inexact(), idle)

    def update_connector_output(self, connector_output: Any) -> None:
        """Take what the worker said in this step."""
        reply = connector_output.kv_connector_worker_meta
        if isinstance(reply, StepReply):
            for name, found in reply.found.items():
                self.scheduling.found(name, found)
            for name, report in reply.reports.items():
                self.scheduling.wove(name, report)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return what the response says of a request's weave."""
        report = self.scheduling.finished(request.request_id)
        return False, None if report is None else {"kvweave": report}

    def reset_cache(self) -> bool | None:
        """vLLM has forgotten all blocks; chunks stay."""
        self.scheduling.forget()
        return True

    # ---- the worker's side

    def attach(self, model: torch.nn.Module, attn_groups: Any, tokenizer: Any) -> None:
        """Begin to weave with the worker's model, if what we write is what its own kernels read.
        Raises CannotMove, with the reason."""
        workers = get_tp_group().cpu_group if get_tp_group().world_size > 1 else None
        backend = VllmBackend(model, self._vllm_config, tokenizer, Lockstep(workers))
        paged = Paged(backend, self.block_size)
        backend.require_move()
        require_equal(backend, paged, attn_groups)
        paged.learn()
        self.host = Host(backend, paged, self.options, backend.lockstep, ahead=self.ahead)
        self.verbs = Verbs(self.host)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Rows are written by the layers themselves, where their caches are known."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Answer what was asked, begin what was allocated, and go on a slice with all."""
        meta, host = self._get_connector_metadata(), self.host
        assert isinstance(meta, StepMeta)
        if host is None:
            raise RuntimeError(
                "kvweave has no model: start vLLM with --worker-cls kvweave.connect.vllm.worker.KVWeaveWorker"
            )
        for ticket, report in meta.reports.items():
            self._tell(ticket, report)
        for prompt, n in meta.inexact:
            self.prompts.note(prompt, n)
        for name, ask in meta.asks.items():
            self._reply.found[name] = host.find(ask)
        for name, load in meta.loads.items():
            host.load(name, load)
        self._over |= host.step(meta.idle)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded layer by layer."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kw: Any) -> None:
        """Nothing is saved: canonical KV comes of passes of our own."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return which weaves are over, and which of them failed."""
        assert self.host is not None
        self.host.drop(list(finished_req_ids))
        over, self._over = self._over | self.host.over(), {}
        for name, job in over.items():
            self._reply.reports[name] = report = job.report()
            self._tell(job.load.ask.spec.ticket, {**report, "local": job.load.start})
        failed = {name for name, job in over.items() if job.plan is None}
        return KVConnectorTransferResults(finished_recving=set(over), failed_recving=failed)

    def _tell(self, ticket: str, report: dict[str, Any]) -> None:
        """Keep a report until the server asks for it; it does not where nobody listens any more."""
        if ticket:
            self.reports[ticket] = of_both(self.reports.get(ticket), report)
        while len(self.reports) > MOST_REPORTS:
            self.reports.popitem(last=False)

    def build_connector_worker_meta(self) -> StepReply | None:
        """Return what the scheduler is told in this step."""
        reply, self._reply = self._reply, StepReply()
        return reply if reply.found or reply.reports else None

    def shutdown(self) -> None:
        """Give up what is under way, and close the engine."""
        if self.host is not None and self.verbs is not None:
            self.verbs.close()
            self.host.close()
            self.host = self.verbs = None


def _flag(options: dict[str, Any], name: str) -> bool:
    """Take an option that is true or false. Raises InvalidArgument."""
    found = options.pop(name, False)
    if not isinstance(found, bool):
        raise InvalidArgument(name, f"{found!r} is neither true nor false")
    return found
