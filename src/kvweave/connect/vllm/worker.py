"""vLLM's worker, with the verbs on chunks: ``--worker-cls kvweave.connect.vllm.worker.KVWeaveWorker``."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.platforms import current_platform
from vllm.tokenizers import get_tokenizer

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker

from kvweave.chunk.table import Table
from kvweave.connect.vllm.ahead import DONE
from kvweave.connect.vllm.connector import KVWeaveConnector
from kvweave.connect.vllm.refine import Prefill
from kvweave.connect.vllm.verbs import VerbReply, VerbRequest, Verbs
from kvweave.errors import KVWeaveError


class KVWeaveWorker(PlatformWorker):  # type: ignore[misc]
    """The platform's worker; it gives its model to the connector when its caches are there."""

    def initialize_from_config(self, *args: Any, **kwargs: Any) -> Any:
        """Make the caches, then begin to weave."""
        found = super().initialize_from_config(*args, **kwargs)
        connector = self.kvweave_connector()
        if connector is not None:
            runner = self.model_runner
            connector.attach(runner.get_model(), runner.attn_groups, self._tokenizer())
        return found

    def kvweave_connector(self) -> KVWeaveConnector | None:
        """Return the connector, if it is ours."""
        group = get_kv_transfer_group() if has_kv_transfer_group() else None
        return group if isinstance(group, KVWeaveConnector) else None

    def _tokenizer(self) -> Any:
        config = self.vllm_config.model_config
        if config.skip_tokenizer_init:
            return None
        return get_tokenizer(config.tokenizer, trust_remote_code=config.trust_remote_code)

    # ---- by collective_rpc: plain data only

    def kvweave_begin(
        self, method: str, path: str, headers: list[tuple[str, str]], body: bytes
    ) -> tuple[int, tuple[int, list[tuple[str, str]], bytes] | None]:
        """Begin a verb on chunks; return its ticket, and the reply if there is one already."""
        request = VerbRequest(method, path, headers, body)
        ticket, reply = self._verbs().begin(request)
        return ticket, None if reply is None else _plain(reply)

    def kvweave_go_on(self, ticket: int) -> tuple[int, list[tuple[str, str]], bytes] | None:
        """Go on with it; return the reply once there is one."""
        reply = self._verbs().go_on(ticket)
        return None if reply is None else _plain(reply)

    def kvweave_cancel(self, ticket: int) -> None:
        """Nobody waits for it any more."""
        self._verbs().cancel(ticket)

    def kvweave_ahead(self) -> int:
        """Make KV that requests may need, for a slice; return `DONE`, `LATER` or `MORE` of `ahead`."""
        connector = self.kvweave_connector()
        return DONE if connector is None or connector.host is None else connector.host.go_ahead()

    def kvweave_refine(self, seconds: float = 0.0) -> Prefill | int:
        """Return tokens that vLLM is to prefill while nobody asks, and their salt; or `DONE` or `LATER` of
        `ahead`. ``seconds``: that the last ones took."""
        connector = self.kvweave_connector()
        return DONE if connector is None else connector.prompts.next(seconds)

    def kvweave_missing(self, names: list[str], namespace: str) -> list[str]:
        """Return which of these name no chunk."""
        table = self._verbs().host.engine.table
        return [name for name in names if not _is_there(table, name, namespace)]

    def kvweave_texts(
        self, names: list[str], namespace: str
    ) -> list[tuple[int, str | None] | None]:
        """Return tokens and text of the first of these chunks; None for one that is not there."""
        return self._verbs().host.texts.of(names, namespace)

    def kvweave_report(self, ticket: str) -> dict[str, Any] | None:
        """Return what the response to a stream says of its weave."""
        connector = self.kvweave_connector()
        return None if connector is None else connector.reports.pop(ticket, None)

    def _verbs(self) -> Verbs:
        connector = self.kvweave_connector()
        if connector is None or connector.verbs is None:
            raise RuntimeError("kvweave does not weave here: see the log of the start")
        return connector.verbs


def _is_there(table: Table, name: str, namespace: str) -> bool:
    try:
        return table.lookup(name, namespace) is not None
    except KVWeaveError:  # no name at all
        return False


def _plain(reply: VerbReply) -> tuple[int, list[tuple[str, str]], bytes]:
    return reply.status, list(reply.headers), reply.body
