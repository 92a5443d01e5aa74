"""How a public verb is entered: with what its annotations ask for, one thread at a time, while it is open.

::

    @checked
    class Engine:
        def put(self, name: str, text: str | Sequence[int], *, replace: bool = False) -> Entry: ...

    engine.put("a", [3, 4.5])        InvalidArgument: text: not token ids: 4.5 is not a whole number
    engine.put("a", array([3, 4]))   the verb gets [3, 4]

A verb that is added is held to its annotations; nothing has to be said of it here.
"""

from __future__ import annotations

import os
from collections import abc, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from inspect import Parameter, get_annotations, signature, unwrap
from math import nan
from numbers import Integral, Real
from threading import RLock
from types import FunctionType, NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, cast, get_args, get_origin
from weakref import WeakSet

from kvweave.errors import InvalidArgument
from kvweave.interrupts import HELD

T = TypeVar("T")
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
STILL = ("close", "check_integrity", "contexts_of")  # verbs of what is closed
MOST = 1 << 63  # whole numbers are below
SHOWN = 60  # characters of a value in a message


class Gate:
    """Lets one thread at a time into the verbs over one engine; others wait. What a verb calls back
    (``progress``, say) stands in the middle of it, and may enter none. ``around`` is entered with each
    verb, and left with it. What comes in between, as finalizers do, waits in `soon`: who has held
    ``lock`` looks there afterwards (`catch_up`)."""

    def __init__(self, around: Callable[[], AbstractContextManager[object]] = nullcontext) -> None:
        # entered by ``with`` alone: Ctrl-C may come between two lines of Python, and keep it locked
        self.lock, self.around = RLock(), around
        self._is_mine: Callable[[], bool] = self.lock._is_owned  # type: ignore[attr-defined]
        self._n_calling = 0
        self._is_half_done = False
        self.later: deque[Callable[[], object]] = deque()
        _GATES.add(self)

    @property
    def calls_back(self) -> bool:
        """Whether this thread is in what a verb has called back."""
        return self._is_mine() and self._n_calling > 0

    def soon(self, call: Callable[[], object]) -> None:
        """Make a call as soon as nobody holds the gate: now, or by who holds it. Never waits, so that a
        finalizer may ask for it, which comes at any time in any thread."""
        self.later.append(call)
        self.catch_up()

    def catch_up(self) -> None:
        """Make the calls that wait, unless somebody holds the gate."""
        with HELD:
            while self.later and not self._is_mine() and self.lock.acquire(blocking=False):
                try:
                    if self.later:  # else another was faster
                        self.later.popleft()()
                finally:
                    self.lock.release()

    def first(self) -> None:
        """Make them before a verb of this thread, unless it is in one: it may ask again for what it let go
        of, and who held the gate then need not be the next to look."""
        if self.later and not self._is_mine():
            with self.lock, HELD:
                while self.later:
                    self.later.popleft()()

    def require(self, verb: str, closed: bool) -> None:
        """Raise InvalidArgument for a verb of what is closed, and for one within a callback."""
        if self._is_half_done:
            reason = "another thread was in the middle of a verb when this process was forked"
            raise InvalidArgument(verb, reason, "open it in this process")
        if closed and verb not in STILL:
            raise InvalidArgument(verb, "it is closed", "open another")
        if self._n_calling:
            reason = "another verb is in the middle of its work, and has called back"
            raise InvalidArgument(verb, reason, "let that verb return first")

    def require_outside(self, verb: str) -> None:
        """Raise InvalidArgument where this thread is in a callback; does not wait for others."""
        if self.calls_back:
            self.require(verb, False)

    def outside(self, call: Callable[..., T]) -> Callable[..., T]:
        """Return a callback during which no verb is entered."""

        def calling(*args: Any) -> T:
            self._n_calling += 1
            try:
                return call(*args)
            finally:
                self._n_calling -= 1

        return calling

    def forked(self) -> None:
        """In a fork no other thread is left, to leave the gate."""
        if self._is_mine():
            return
        if self.lock.acquire(blocking=False):
            self.lock.release()
            return
        self.lock, self._is_half_done = RLock(), True
        self._is_mine = self.lock._is_owned  # type: ignore[attr-defined]


_GATES: WeakSet[Gate] = WeakSet()


def _forked() -> None:
    for gate in _GATES:
        gate.forked()


os.register_at_fork(after_in_child=_forked)


def checked(cls: type[T]) -> type[T]:
    """Have the public methods of a class, and what makes it, refuse what is not as annotated
    (InvalidArgument). Where it has a ``gate`` they go through that."""
    for name, found in [*vars(cls).items()]:
        if isinstance(found, FunctionType) and (name == "__init__" or name[0] != "_"):
            setattr(cls, name, checking(found))
    return cls


def checking(function: FunctionT) -> FunctionT:
    """Return a method that looks at what it is given before it does anything."""
    asked: list[_Arguments] = []  # from the first call on: annotations may name what comes later

    @wraps(function)
    def verb(self: Any, /, *args: Any, **options: Any) -> Any:
        if not asked:
            asked.append(_Arguments.of(function))
        gate = None if function.__name__ == "__init__" else getattr(self, "gate", None)
        args, options = asked[0].take(args, options, gate)
        if gate is None:
            return function(self, *args, **options)
        gate.first()
        try:
            with gate.lock, HELD, gate.around():
                gate.require(function.__name__, self.closed)
                return function(self, *args, **options)
        finally:
            if gate.later:
                gate.catch_up()

    return cast(FunctionT, verb)


HALF = "half of a surrogate pair is no character"


class _WrongError(Exception):
    """What is wrong with a value; ``near``: only with something in it."""

    def __init__(self, reason: str, near: bool = False) -> None:
        self.reason, self.near = reason, near


class _Kind(NamedTuple):
    """What an annotation asks for: its name, and what takes a value or raises _WrongError."""

    says: str
    take: Callable[[Any], Any]


class _Arguments(NamedTuple):
    """The parameters of one method: by place, by name, and what stands for those beyond."""

    places: list[tuple[str, _Kind]]
    names: dict[str, _Kind]
    more: tuple[str, _Kind]  # of *args

    @classmethod
    def of(cls, function: Callable[..., Any]) -> _Arguments:
        """Read a signature; what cannot be resolved at run time may be anything."""
        space, more = unwrap(function).__globals__, ("", ANYTHING)
        places: list[tuple[str, _Kind]] = []
        names: dict[str, _Kind] = {}
        for p in [*signature(function).parameters.values()][1:]:
            try:
                asked = p.annotation
                each = p.name, _kind(eval(asked, space) if isinstance(asked, str) else asked)
            except NameError:
                each = p.name, ANYTHING
            if p.kind is Parameter.VAR_POSITIONAL:
                more = each
            places += [each] if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) else []
            names |= [each] if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD) else []
        return cls(places, names, more)

    def take(self, args: Sequence[Any], options: Mapping[str, Any], gate: Gate | None) -> Any:
        """Return the arguments as the method wants them. Raises InvalidArgument."""
        places = [*self.places[: len(args)], *[self.more] * (len(args) - len(self.places))]
        given = [_taken(*each, value, gate) for each, value in zip(places, args, strict=True)]
        kinds = ((name, self.names.get(name, ANYTHING)) for name in options)
        return given, {name: _taken(name, kind, options[name], gate) for name, kind in kinds}


def _taken(name: str, kind: _Kind, value: Any, gate: Gate | None) -> Any:
    try:
        taken = kind.take(value)
    except _WrongError as error:
        hint = f"give {kind.says}"
        if error.reason == HALF:
            hint = (
                "give a path that is no UTF-8 as a Path"
                if "Path" in kind.says
                else "decode it as UTF-8 first"
            )
        raise InvalidArgument(name, error.reason, hint) from None
    return gate.outside(taken) if gate is not None and kind is FUNCTION else taken


def _refused(value: object, says: str, near: str = "") -> _WrongError:
    """Return an error that shows plain values; what others would show of themselves may raise."""
    plain = type(value) in (str, float, bool, NoneType)
    plain = plain or (type(value) is int and abs(value) < MOST * MOST)
    shown = repr(value) if plain else type(value).__name__
    shown = f"the truth value {shown}" if type(value) is bool else shown
    shown = shown if len(shown) <= SHOWN else f"{shown[:SHOWN]}..."
    return _WrongError(f"{shown} is not {says}{near}")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _refused(value, "text")
    try:
        str.encode(value)
    except UnicodeEncodeError:
        raise _WrongError(HALF, near=True) from None
    own = (
        getattr(type(value), m) is not getattr(str, m) for m in ("__str__", "__eq__", "__hash__")
    )
    return str.__str__(value) if any(own) else value  # str() of an enum is its name


def _number(kind: type, says: str) -> _Kind:
    """Take numbers of Python and numpy as plain ones; no truth value, and none that is not a number."""
    wanted = Integral if kind is int else Real

    def take(value: Any) -> Any:
        if isinstance(value, wanted) and not isinstance(value, bool):
            try:
                number = kind(value)
            except (OverflowError, ValueError):
                number = nan
            if number == number and (kind is float or -MOST < number < MOST):
                return number
        raise _refused(value, says)

    return _Kind(says, take)


def _instance(wanted: type, says: str) -> _Kind:
    """Take objects of a class, or that have what a protocol asks for."""
    inside = {**vars(wanted), **get_annotations(wanted)}
    is_protocol = getattr(wanted, "_is_protocol", False)
    names = [name for name in inside if name == "__call__" or name[0] != "_"]

    def take(value: Any) -> Any:
        try:
            same = (
                all(hasattr(value, n) for n in names) if is_protocol else isinstance(value, wanted)
            )
        except Exception:  # of its own making
            same = False
        if not same:
            raise _refused(value, says)
        return value

    return _Kind(says, take)


ANYTHING = _Kind("anything", lambda value: value)
FUNCTION = _instance(cast(type, abc.Callable), "a function")
WHOLE = _number(int, "a whole number")
SIMPLE: dict[object, _Kind] = {
    str: _Kind("text", _text), int: WHOLE, float: _number(float, "a number"),
    bool: _instance(bool, "True or False"), None: _instance(NoneType, "None"),
    object: ANYTHING, Any: ANYTHING, abc.Callable: FUNCTION,
}  # fmt: skip
SIMPLE[NoneType] = SIMPLE[None]


def _kind(asked: Any) -> _Kind:
    """Return what an annotation asks for."""
    asked = asked.__bound__ if isinstance(asked, TypeVar) else asked
    asked = getattr(asked, "__supertype__", asked)  # of a NewType
    origin, inner = get_origin(asked) or asked, get_args(asked)
    if origin is Literal:
        return _one_of(inner)
    if origin is Annotated:
        kind, also = _kind(inner[0]), inner[1]
        return _Kind(kind.says, lambda value: also(kind.take(value)))
    if origin in SIMPLE:
        return SIMPLE[origin]
    kinds = [_kind(each) for each in inner if each is not ...]
    if origin in (Union, UnionType):
        return _any_of(kinds)
    if origin in (abc.Sequence, abc.Iterable, list, tuple):
        return _several(kinds or [ANYTHING], tuple if origin is tuple else list)
    if origin in (abc.Mapping, dict):
        pairs = _several([_several(kinds, tuple)], dict).take
        mapping = _instance(cast(type, Mapping), "a dict")
        return _Kind("a dict", lambda value: pairs([*mapping.take(value).items()]))
    return _instance(origin, origin.__name__) if isinstance(origin, type) else ANYTHING


def _any_of(kinds: Sequence[_Kind]) -> _Kind:
    says = " or ".join(kind.says for kind in kinds)

    def take(value: Any) -> Any:
        for kind in kinds:
            try:
                return kind.take(value)
            except _WrongError as error:
                if error.near:
                    raise
        raise _refused(value, says)

    return _Kind(says, take)


def _one_of(known: Sequence[Any]) -> _Kind:
    says = ", ".join(map(str, known))

    def take(value: Any) -> Any:
        if isinstance(value, str) and (value := _text(value)) in known:
            return known[known.index(value)]
        raise _refused(value, f"one of {says}")

    return _Kind(f"one of {says}", take)


def _several(kinds: Sequence[_Kind], made: type) -> _Kind:
    """Take what has items in order, arrays and tensors as plain numbers: each of the one kind, or for
    a tuple of several kinds one of each."""
    ids = kinds[0] is WHOLE
    each = ", ".join(kind.says for kind in kinds)
    says = f"a list of {each}" if len(kinds) == 1 else f"({each})"
    says = "token ids" if len(kinds) == 1 and ids else says

    def take(value: Any) -> Any:
        if isinstance(value, str | bytes | bytearray | memoryview | Mapping | set | frozenset):
            raise _refused(value, says)
        try:
            found = list(value.tolist() if hasattr(value, "tolist") else value)
        except Exception as error:
            raise _refused(value, says, f" ({type(error).__name__})") from None
        if len(kinds) > 1 and len(found) != len(kinds):
            raise _refused(value, says, f": it has {len(found)} items")
        if ids and all(type(item) is int for item in found):
            return made(found)
        wanted = kinds if len(kinds) > 1 else [*kinds] * len(found)
        try:
            return made([kind.take(item) for kind, item in zip(wanted, found, strict=True)])
        except _WrongError as error:
            reason = error.reason if error.near else f"not {says}: {error.reason}"
            raise _WrongError(reason, near=True) from None

    return _Kind(says, take)


def _from_0(number: int) -> int:
    if number < 0:
        raise _refused(number, "0 or above")
    return number


FromZero = Annotated[int, _from_0]


def token_ids(given: Sequence[int]) -> list[int]:
    """Return whole numbers as they are; nothing is rounded, read or cut. Raises InvalidArgument."""
    found: list[int] = _taken("tokens", _several([WHOLE], list), given, None)
    return found
