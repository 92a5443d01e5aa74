"""A device that is not there: it holds its values on the CPU and counts what a GPU would do.

``x.to(DEVICE)`` gives a tensor that says it lives on ``counted:0``. Inside ``with counting() as
log`` every kernel launch, every wait of the host for the device (a sync), every copy to the device
and every operation over both devices is logged with the line of Python it came from. What would be
an error on CUDA is one here: a mix of devices raises.

Copies on a `Stream` of its own happen when somebody waits for them, and what they fill is NaN until
then: a read that comes too early shows. One that may meet what is still being computed is a race.

What it cannot see: launches inside a fused operation (one attention counts as one launch, whatever
backend CUDA would choose; outside of inference mode torch takes it apart before anyone is asked),
computing on other streams, and time.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)

TORCH = str(Path(torch.__file__).parent)


class Stream:
    """Copies in order; `record_event` marks how far."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.copies: deque[Callable[[], Any]] = deque()
        self.n_put = self.n_done = 0
        self.behind = 0  # launches that are over before what is put here

    def put(self, copy: Callable[[], Any]) -> None:
        self.copies.append(copy)
        self.n_put += 1

    def wait_stream(self, other: Stream) -> None:
        assert other is MAIN
        self.behind = _ticks

    def wait_event(self, event: Mark) -> None:
        event.stream.do(event.n)

    def record_event(self) -> Mark:
        return Mark(self, self.n_put)

    def synchronize(self) -> None:
        self.do(self.n_put)

    def do(self, n: int) -> None:
        with _doing:
            while self.n_done < n:
                self.copies.popleft()()
                self.n_done += 1


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in a stream."""

    stream: Stream
    n: int

    def query(self) -> bool:
        return self.stream.n_done >= self.n

    def synchronize(self) -> None:
        if threading.current_thread() is threading.main_thread():
            _note("sync", "event")
        self.stream.do(self.n)


class _Module(_DummyBackendModule):
    """What `torch.cuda` is to CUDA."""

    Stream = Stream

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, _here_now.stream = self.current_stream(), stream
        try:
            with counting():
                yield
        finally:
            _here_now.stream = before

    def current_stream(self, device: torch.device | None = None) -> Stream:
        return getattr(_here_now, "stream", MAIN)


MODULE = _Module()
_setup_privateuseone_for_python_backend("counted", MODULE)
DEVICE = torch.device("counted:0")
MAIN = Stream()
_doing = threading.Lock()
_ticks = 0  # launches there were
_buffers: list[Tensor] = []  # pinned memory, of which others may be made

# composite operations that CUDA runs as one kernel; all others are taken apart
WHOLE = {"aten::scaled_dot_product_attention"}
# no kernel: allocations, and changes of nothing but sizes and strides (views are known by themselves)
FREE = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty",
        "aten::new_empty_strided", "aten::_unsafe_view", "aten::_local_scalar_dense"}  # fmt: skip
# the host must know a value to go on: how many there are, or the value itself
SYNCS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal",
         "aten::_unique", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
         "aten::repeat_interleave", "aten::bincount", "aten::multinomial"}  # fmt: skip
INDEXED = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
COPIES = {"aten::_to_copy", "aten::copy_"}


@dataclass(frozen=True, slots=True)
class Event:
    """Something that a GPU would have done; ``line`` is the innermost one outside of torch."""

    kind: str  # launch, sync, upload (from pinned memory), unpinned (upload), mix, race
    op: str
    line: str


@dataclass(slots=True, eq=False)
class Log:
    """What happened, in order."""

    events: list[Event] = field(default_factory=list)

    def count(self, kind: str) -> int:
        return sum(event.kind == kind for event in self.events)

    def lines(self, kind: str) -> Counter[str]:
        """Return how often each line of Python did this."""
        return Counter(f"{event.line} {event.op}" for event in self.events if event.kind == kind)


_logs: list[Log] = []  # those being written; a list, so that other threads' work counts too
_here_now = threading.local()


def _note(kind: str, op: str) -> None:
    if not _logs:
        return
    frame = sys._getframe(1)
    while frame.f_back and (frame.f_code.co_filename.startswith(TORCH) or _here(frame)):
        frame = frame.f_back
    path = frame.f_code.co_filename
    for root in ("/src/kvweave/", "/site-packages/"):
        path = path.split(root)[-1]
    for log in _logs:
        log.events.append(Event(kind, op.split("::")[-1], f"{path}:{frame.f_lineno}"))


def _here(frame: Any) -> bool:
    return frame.f_code.co_filename in (__file__, "<string>")


class Counted(Tensor):
    """A tensor on `DEVICE`; ``held`` has its values."""

    held: Tensor
    born: int  # launches there were when it was made
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor, requires_grad: bool = False) -> Counted:
        made: Counted = Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(),
            dtype=held.dtype, device=DEVICE, requires_grad=requires_grad,
        )  # fmt: skip
        made.held, made.born = held, _ticks
        return made

    def __repr__(self) -> str:
        return f"Counted({self.held})"

    def tolist(self) -> Any:
        return self.cpu().tolist()  # torch's own has no way for a class of ours

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Mode(TorchDispatchMode):
    """Sees what has no counted tensor among its arguments: tensors made, pinned and uploaded."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing here is compiled, and to say so takes as long as an operation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = _memory(func, args, kwargs := kwargs or {})
        if found is not None:
            return found
        if not any(map(_is_here, _leaves((args, kwargs)))):
            return func(*args, **kwargs)
        with self:
            return _run(func, args, kwargs)


@contextmanager
def counting() -> Iterator[Log]:
    """Count what happens inside; also needed to bring anything to the device."""
    log = Log()
    _logs.append(log)
    try:
        with nullcontext() if getattr(_here_now, "sees", False) else _seeing():
            yield log
    finally:
        _logs.remove(log)


@contextmanager
def _seeing() -> Iterator[None]:
    """One mode a thread: each more would cost every operation another round."""
    _here_now.sees = True
    try:
        with _Mode():
            yield
    finally:
        _here_now.sees = False


def _leaves(tree: Any) -> list[Any]:
    """Return what an operation's arguments hold; torch's own way takes many times as long."""
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (tuple, list)):
        return [tree]
    found = []
    for each in tree:
        if isinstance(each, (tuple, list, dict)):
            found += _leaves(each)
        else:
            found.append(each)
    return found


def _mapped(change: Callable[[Any], Any], tree: Any) -> Any:
    if isinstance(tree, (tuple, list)):
        return type(tree)(
            [
                _mapped(change, each) if isinstance(each, (tuple, list, dict)) else change(each)
                for each in tree
            ]
        )
    if isinstance(tree, dict):
        return {key: _mapped(change, each) for key, each in tree.items()}
    return change(tree)


def _memory(func: Any, args: Any, kwargs: Any) -> Any:
    """Do what concerns pinned memory, which a CPU build has not; None: it does not."""
    name = _about(func)[0]
    if name in ("aten::pin_memory", "aten::_pin_memory"):
        return args[0] if _is_pinned(args[0]) else _pin(args[0].clone())
    if name == "aten::is_pinned":
        return _is_pinned(args[0])
    if kwargs.get("pin_memory"):
        _buffers.append(_pin(func(*args, **kwargs | {"pin_memory": False})))
        return _buffers[-1]
    return None


def _pin(tensor: Tensor) -> Tensor:
    tensor.untyped_storage().pinned_here = True  # type: ignore[attr-defined]
    return tensor


def _is_pinned(tensor: Tensor) -> bool:
    if getattr(tensor.untyped_storage(), "pinned_here", False):
        return True
    at = tensor.data_ptr()
    return any(0 <= at - each.data_ptr() < each.nbytes for each in _buffers)


def _is_here(leaf: Any) -> bool:
    return isinstance(leaf, Counted) or (isinstance(leaf, torch.device) and leaf.type == "counted")


@cache
def _about(func: Any) -> tuple[str, bool, bool]:
    """Return an operation's name, whether it is to be taken apart, and whether it is no kernel."""
    name = func._schema.name
    free = name in FREE or func.is_view or torch.Tag.inplace_view in func.tags
    return name, name not in WHOLE and func._can_decompose(), free


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """Do one operation on the values held, and log it."""
    name, apart, free = _about(func)
    if apart:
        found = func.decompose(*args, **kwargs)
        if found is not NotImplemented:
            return found
    if name in COPIES:
        return _copy(func, name, args, kwargs)
    leaves = _leaves((args, kwargs))
    ours = [leaf for leaf in leaves if isinstance(leaf, Counted)]
    if ours:
        _check_mix(name, args, leaves)
    found = _held(func, ours, args, kwargs)
    if name in SYNCS or _asks_how_many(name, args):
        _note("sync", name)
    outs = [leaf for leaf in _leaves(found) if isinstance(leaf, Tensor)]
    if not free and (not outs or any(out.numel() for out in outs)):
        _launch(name)
    return found


def _launch(name: str) -> None:
    global _ticks
    _ticks += 1
    _note("launch", name)


def _held(func: Any, ours: list[Counted], args: Any, kwargs: Any) -> Any:
    """Call ``func`` on the values held; what it returns is on the device again."""
    wrapped = {id(each.held): each for each in ours}

    def bare(leaf: Any) -> Any:
        if isinstance(leaf, Counted):
            return leaf.held
        return torch.device("cpu") if _is_here(leaf) else leaf

    def wrap(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        found = wrapped.get(id(leaf))  # written in place
        if found is not None and found.shape != leaf.shape:
            raise NotImplementedError(f"{func} changes the shape of a tensor that is wrapped")
        if found is not None:
            return found
        with torch.inference_mode(leaf.is_inference()):  # a view of a tensor of before is none
            return Counted(leaf)

    args, kwargs = _mapped(bare, (args, kwargs))
    return _mapped(wrap, func(*args, **kwargs))


def _copy(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Copy, cast or move; the source stands last."""
    source = args[-1] if name == "aten::_to_copy" else args[1]
    if name == "aten::_to_copy":
        goes_up = _is_here(kwargs.get("device")) or (
            isinstance(source, Counted) and kwargs.get("device") is None
        )
    else:
        goes_up = isinstance(args[0], Counted)
    if MODULE.current_stream() is not MAIN:
        return _later(name, args, kwargs)
    if isinstance(source, Counted) and not goes_up:
        if not kwargs.get("non_blocking") and not (name == "aten::copy_" and args[2:] == (True,)):
            _note("sync", name)
        _note("download", name)
        host = _mapped(lambda leaf: leaf.held if isinstance(leaf, Counted) else leaf, args)
        return func(*host, **kwargs)
    if isinstance(source, Counted):
        _launch(name)
    else:
        _note("upload" if _is_pinned(source) else "unpinned", name)
    ours = [leaf for leaf in args if isinstance(leaf, Counted)]
    return _held(func, ours, args, kwargs)


def _later(name: str, args: Any, kwargs: Any) -> Tensor:
    """Copy between host and device on the current stream."""
    target, source, *_ = args
    stream, up = MODULE.current_stream(), isinstance(target, Counted)
    assert name == "aten::copy_" and up != isinstance(source, Counted), "only copies up and down"
    host, there = (source, target) if up else (target, source)
    _note(("upload" if up else "download") if _is_pinned(host) else "unpinned", name)
    if stream.behind < (there.born if up else _ticks):
        _note("race", name)
    into, values = (each.held if isinstance(each, Counted) else each for each in (target, source))
    into.fill_(float("nan"))
    stream.put(lambda: into.copy_(values))
    return target  # type: ignore[no-any-return]


def _check_mix(name: str, args: Any, leaves: list[Any]) -> None:
    """Raise for operations over both devices, but let pass what CUDA does."""
    here = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, Counted)]
    strangers = [leaf for leaf in here if leaf.dim()]
    if name in INDEXED and isinstance(args[0], Counted):
        indices = [leaf for leaf in args[1] if leaf is not None]
        for index in indices:
            if not isinstance(index, Counted):  # brought up by the operation itself
                _note("unpinned", name)
        strangers = [leaf for leaf in strangers if not any(leaf is index for index in indices)]
    if strangers:
        _note("mix", name)
        raise RuntimeError(f"{name} over {DEVICE} and cpu")


def _asks_how_many(name: str, args: Any) -> bool:
    """Whether indices are masks: how many they choose is known on the device only."""
    return name in INDEXED and any(
        index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
    )


# `torch.tensor(..., device=)` makes its tensor where neither the mode nor the class is asked, and
# other threads have no mode: there the device answers as a backend does
_library = torch.library.Library("aten", "IMPL")
for _op in ("empty.memory_format", "empty_strided", "copy_"):
    _func = getattr(torch.ops.aten, _op.split(".")[0])
    _func = getattr(_func, (_op.split(".") + ["default"])[1])

    def _backend(*args: Any, _func: Any = _func, **kwargs: Any) -> Any:
        return _run(_func, args, kwargs)

    _library.impl(_op, _backend, "PrivateUse1")
