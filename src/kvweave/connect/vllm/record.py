"""Record inside vLLM what the decoded rows of a request read of its KV; the request is as ever.

No kernel shows its weights, and the blocks have each kernel's own layout. So the operation of each layer's
backend (``impl.forward``, which vLLM calls whether compiled or not) is wrapped: the keys and values it is handed
are kept, and a decoded row's weights computed from them. What these make of the values must be what
the kernel made of its blocks, in every layer and step; where it is not, nothing is recorded. ::

    llm = LLM(model, worker_extension_cls=EXTENSION)
    trace = record(llm, prompt, "there.kvt")
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm import LLM, SamplingParams

from kvweave.chunk.identity import ModelFingerprint
from kvweave.connect.vllm.look import why_not
from kvweave.connect.vllm.selftest import TOLERANCE
from kvweave.connect.vllm.versions import installed
from kvweave.errors import InvalidArgument, KVWeaveError
from kvweave.keep.tokens.access import Rule
from kvweave.probe.recorder import PageRecorder, Recording, check_notes
from kvweave.probe.trace import PageTrace, TraceHeader, TraceSteps, TraceWriter
from kvweave.run.base import ALL, LayerInfo, Mask
from kvweave.run.rotary import STATIC
from kvweave.store.kv import LayerShape

EXTENSION = "kvweave.connect.vllm.record.RecordingWorker"  # LLM(worker_extension_cls=...)
ROOM = 256  # rows that are made room for at once


def record(
    llm: LLM,
    prompt: str | Sequence[int],
    path: str | Path,
    sampling: SamplingParams | None = None,
    how: Recording | None = None,
    notes: dict[str, Any] | None = None,
) -> PageTrace:
    """Answer ``prompt`` alone, and write what each step read to ``path`` (`.kvt`), on the worker's disk.

    ``llm`` was made with ``worker_extension_cls=EXTENSION``. Forgets vLLM's prefix cache: rows that were found
    there were shown to nobody. Greedy by default. Raises InvalidArgument, with no file left, for what
    cannot be recorded.
    """
    check_notes(notes)
    how, sampling = how or Recording(), sampling or SamplingParams(temperature=0, max_tokens=256)
    if sampling.n != 1:
        raise InvalidArgument("sampling", f"n is {sampling.n}", "one answer is recorded at a time")
    if llm.llm_engine.vllm_config.parallel_config.worker_extension_cls != EXTENSION:
        hint = f"LLM(..., worker_extension_cls={EXTENSION!r})"
        raise InvalidArgument("llm", "it was made without this extension", hint)
    tokens = llm.get_tokenizer().encode(prompt) if isinstance(prompt, str) else list(prompt)
    if not tokens:
        raise InvalidArgument("prompt", "it is empty", "give some text, or token ids")
    if not llm.reset_prefix_cache():
        raise InvalidArgument("llm", "requests run in it", "record when none does")
    where, rule = str(Path(path).absolute()), (how.rule.kind, how.rule.amount)
    _ask(llm, "kvweave_watch", where, len(tokens), how.page, rule, how.block)
    try:
        (found,) = llm.generate({"prompt_token_ids": tokens}, sampling, use_tqdm=False)
    except BaseException:
        llm.collective_rpc("kvweave_watched", args=(None, {}))
        raise
    said = list(found.outputs[0].token_ids)
    own = {"prompt_tokens": tokens, "text": found.outputs[0].text, "tokens": said}
    _ask(llm, "kvweave_watched", said, {**(notes or {}), **own})
    return PageTrace(where)


def _ask(llm: LLM, method: str, *args: Any) -> None:
    """Call a method of all workers. Raises InvalidArgument with what one of them says."""
    for said in llm.collective_rpc(method, args=args):
        if said is not None:
            raise InvalidArgument("vllm", said, "docs/probe.md says what is recorded there")


class RecordingWorker:
    """What a worker of vLLM can do besides; plain data in and out."""

    vllm_config: Any
    get_model: Callable[[], torch.nn.Module]
    _watch: RequestWatch | None = None

    def kvweave_watch(
        self, path: str, n_prompt: int, page: int, rule: tuple[str, float], block: int
    ) -> str | None:
        """Watch the next request; return why not, or None."""
        if self._watch is not None:
            return "a recording runs"
        how = Recording(page, Rule(*rule), block)
        try:
            self._watch = RequestWatch(
                self.get_model(), self.vllm_config, Path(path), n_prompt, how
            )
        except (KVWeaveError, OSError) as error:
            return str(error)
        return None

    def kvweave_watched(self, said: list[int] | None, notes: dict[str, Any]) -> str | None:
        """Watch no longer; return why nothing was recorded, or None. ``said``: the answer's tokens."""
        watch, self._watch = self._watch, None
        return "no recording runs" if watch is None else watch.close(said, notes)


class RequestWatch:
    """The keys, values and attention of one request, seen from the layers. Raises InvalidArgument, NoSpace."""

    def __init__(
        self, model: torch.nn.Module, config: Any, path: Path, n_prompt: int, how: Recording
    ) -> None:
        context = config.compilation_config.static_forward_context
        modules: dict[str, Any] = {n: m for n, m in context.items() if hasattr(m, "impl")}
        reason = why_not(config, modules) or _why_not(config, modules)
        if reason is not None:
            raise InvalidArgument("vllm", reason)
        self.modules = list(modules.values())
        self.infos = [_info(module) for module in self.modules]
        self.recorder, self.n_prompt = PageRecorder(self.infos, how), n_prompt
        name = f"{type(model).__name__}:{Path(config.model_config.model).name}"
        dtype = str(config.model_config.dtype).removeprefix("torch.")
        about = ModelFingerprint(name, "", "", dtype, "").to_dict()
        header = TraceHeader(
            how.page, self.recorder.heads, n_prompt, how.rule, about, f"vLLM {installed()}"
        )
        self.writer = TraceWriter(path, header)
        self.allowed = TOLERANCE.get(config.model_config.dtype, TOLERANCE[torch.bfloat16])
        self.rows: list[_Rows] = [_Rows() for _ in self.infos]
        self.trouble: str | None = None
        self.inputs: list[int] = []  # tokens of the decoded rows
        self.token: int | None = None  # of the pass that runs
        self.written, self.seen = 0, 0  # steps; layers of the pass that runs
        self._hook = model.register_forward_pre_hook(self._begins, with_kwargs=True)
        for i, module in enumerate(self.modules):
            module.impl.forward = partial(self._forward, i, module.impl.forward)

    def _begins(self, model: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        ids = options.get("input_ids", args[0] if args else None)
        self.token = None if ids is None or not len(ids) else int(ids[0])
        self.seen = 0

    def _forward(
        self, layer: int, operation: Callable[..., Any], *args: Any, **options: Any
    ) -> Any:
        made = operation(*args, **options)
        if self.trouble is None:
            try:
                _, query, key, value, _, metadata = args
                self._see(layer, query, key, value, metadata, options["output"])
            except Exception as error:  # the request is vLLM's: it goes on
                self.trouble = f"{type(error).__name__}: {error}"
        return made

    def _see(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, metadata: Any, output: Tensor
    ) -> None:
        """Keep the rows of a layer that a pass has computed, and add up what a decoded one pays."""
        if metadata is None:  # vLLM warms up
            return
        n, (stop, *others) = metadata.num_actual_tokens, metadata.seq_lens.tolist()
        rows, first = self.rows[layer], stop - n
        if others or first != rows.n:
            raise ValueError(f"a pass of {n} rows behind {first} follows {rows.n} of this request")
        rows.add(key[:n], value[:n])
        if first < self.n_prompt:
            return
        if n != 1 or self.token is None:
            raise ValueError(f"a pass decodes {n} rows, and their tokens are {self.token}")
        if layer == 0:
            self._flush()
            self.recorder.starts(first)
            self.recorder.begin()
        begin, weights = self._weights(layer, query[0], output[0])
        self.recorder.see(layer, 0, begin, weights)
        self.seen += 1
        if self.seen == len(self.infos):
            self.recorder.end()
            self.inputs.append(self.token)

    def _weights(self, layer: int, query: Tensor, output: Tensor) -> tuple[int, Tensor]:
        """Return the first slot that a row sees, and its attention [head, 1, slot] from there on.

        Raises ValueError where vLLM's kernel made another ``output`` [head, dim] of it.
        """
        info, rows, impl = self.infos[layer], self.rows[layer], self.modules[layer].impl
        begin = max(0, rows.n - (info.mask.window or rows.n))
        k, v = rows.keys[begin : rows.n].float(), rows.values[begin : rows.n].float()
        asked = query.view(info.shape.k_heads, info.group, -1).float()
        scores = torch.einsum("kgd,skd->kgs", asked, k) * impl.scale
        softcap = getattr(impl, "logits_soft_cap", None)
        if softcap:
            scores = softcap * (scores / softcap).tanh()
        weights = scores.softmax(-1)
        mine = torch.einsum("kgs,skd->kgd", weights, v).flatten(0, 1)
        theirs = output.view(mine.shape).float()
        off = float((mine - theirs).abs().max() / mine.abs().max().clamp_min(1e-9))
        if not off <= self.allowed:
            raise ValueError(
                f"layer {layer} attends otherwise in slot {rows.n - 1}: its output is off by {off:.1e} "
                f"of the largest value ({self.allowed:.0e} allowed)"
            )
        return begin, weights.flatten(0, 1)[:, None]

    def _flush(self, last: int | None = None) -> None:
        """Write the steps that wait, when it is time; at the end those up to the ``last``."""
        if not (self.recorder.full if last is None else self.recorder.n):
            return
        mass, access = (found.float().cpu().numpy() for found in self.recorder.take())
        n = mass.shape[-1] if last is None else last - self.written
        if n:
            tokens = np.array(self.inputs[self.written : self.written + n], np.int32)
            steps = TraceSteps(self.written, tokens, mass[..., :n], access[..., :n] > 0)
            self.writer.steps(steps)
        self.written += n

    def close(self, said: list[int] | None, notes: dict[str, Any]) -> str | None:
        """Leave vLLM as it was and end the file; return why there is none, or None."""
        self._hook.remove()
        for module in self.modules:
            del module.impl.forward
        trouble, n = self.trouble, 0 if said is None else max(0, len(said) - 1)
        if said is None:
            trouble = trouble or "the request failed"
        # a row more: vLLM may begin one before it knows that the answer has ended
        elif trouble is None and (self.inputs[:n] != said[:n] or len(self.inputs) > n + 1):
            trouble = f"it showed {len(self.inputs)} steps of an answer of {len(said)} tokens"
        if trouble is None:
            try:
                self._flush(n)
                self.writer.notes(**notes)
                self.writer.close()
                return None
            except KVWeaveError as error:
                trouble = str(error)
        self.writer.discard()
        return f"nothing was recorded: {trouble}"


class _Rows:
    """Keys and values [row, head, dim] of a layer, as it was handed them; there is room behind the ``n``."""

    def __init__(self) -> None:
        self.n, self.keys, self.values = 0, torch.empty(0), torch.empty(0)

    def add(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = self._with(self.keys, keys), self._with(self.values, values)
        self.n += len(keys)

    def _with(self, held: Tensor, new: Tensor) -> Tensor:
        stop = self.n + len(new)
        if len(held) < stop:
            room = new.new_empty(2 * stop + ROOM, *new.shape[1:])
            if self.n:
                room[: self.n] = held[: self.n]
            held = room
        held[self.n : stop] = new
        return held


def _why_not(config: Any, modules: dict[str, Any]) -> str | None:
    if config.parallel_config.world_size > 1:
        return "each of its workers sees some heads of a layer only"
    for name, module in modules.items():
        if module.kv_cache_torch_dtype != config.model_config.dtype:
            return f"layer {name} keeps rows in {module.kv_cache_dtype}, not as it is handed them"
    return None


def _info(module: Any) -> LayerInfo:
    shape = LayerShape(
        module.num_kv_heads, module.head_size, module.num_kv_heads, module.head_size_v
    )
    mask = ALL if module.sliding_window is None else Mask(window=int(module.sliding_window))
    return LayerInfo(shape, STATIC, mask, module.num_heads // module.num_kv_heads)
