"""One verb, three faces: it blocks, it is awaited, or it is collected with other edits.

A class of verbs has each of them once, as steps. Its subclasses say with `Blocking`, `Awaited` or
`Block` what calling one does.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast, overload

from kvweave.client.block import Block, Edit, Made
from kvweave.client.steps import Steps
from kvweave.client.wires import AwaitedWire, BlockingWire

P = ParamSpec("P")
T = TypeVar("T")
Coming = Coroutine[Any, Any, T]


class Blocking:
    """Verbs return when they are done."""

    _wire: BlockingWire


class Awaited:
    """Verbs are awaited."""

    _wire: AwaitedWire


class Verb(Generic[P, T]):
    """A method that does what its steps say; on a class, `steps` are for other verbs' use."""

    def __init__(self, steps: Callable[Concatenate[Any, P], Steps[T]]) -> None:
        self.steps = steps
        functools.update_wrapper(cast(Any, self), steps)

    @overload
    def __get__(self, face: None, owner: type) -> Verb[P, T]: ...
    @overload
    def __get__(self, face: Blocking, owner: type) -> Callable[P, T]: ...
    @overload
    def __get__(self, face: Awaited, owner: type) -> Callable[P, Coming[T]]: ...
    def __get__(self, face: Any, owner: type) -> Any:
        return self if face is None else _driven(face, self.steps)


class Told(Generic[T]):
    """A property that is asked of the server; of an awaited face, it is awaited."""

    def __init__(self, steps: Callable[[Any], Steps[T]]) -> None:
        self.steps = steps
        functools.update_wrapper(cast(Any, self), steps)

    @overload
    def __get__(self, face: None, owner: type) -> Told[T]: ...
    @overload
    def __get__(self, face: Blocking, owner: type) -> T: ...
    @overload
    def __get__(self, face: Awaited, owner: type) -> Coming[T]: ...
    def __get__(self, face: Any, owner: type) -> Any:
        return self if face is None else _driven(face, self.steps)()


class Editing(Generic[P, T]):
    """A method that edits a context: sent at once, or collected."""

    def __init__(self, edit: Callable[Concatenate[Any, P], Edit[T]]) -> None:
        self.edit = edit
        functools.update_wrapper(cast(Any, self), edit)

    @overload
    def __get__(self, face: None, owner: type) -> Editing[P, T]: ...
    @overload
    def __get__(self, face: Block, owner: type) -> Callable[P, Made[T]]: ...
    @overload
    def __get__(self, face: Blocking, owner: type) -> Callable[P, T]: ...
    @overload
    def __get__(self, face: Awaited, owner: type) -> Callable[P, Coming[T]]: ...
    def __get__(self, face: Any, owner: type) -> Any:
        if face is None:
            return self
        if not isinstance(face, Block):

            def send(face: Any, /, *args: Any, **options: Any) -> Steps[T]:
                return cast(Steps[T], face._send(self.edit(face, *args, **options)))

            return _driven(face, functools.update_wrapper(send, self.edit))

        @functools.wraps(self.edit)
        def collect(*args: Any, **options: Any) -> Made[T]:
            return cast(Made[T], face.take(self.edit(face, *args, **options)))

        return collect


class Streamed(Generic[P]):
    """A method that returns a turn; called, it gives the pieces of that turn's text."""

    def __init__(self, turn: Callable[Concatenate[Any, P], Any]) -> None:
        self.turn = turn
        functools.update_wrapper(cast(Any, self), turn)

    @overload
    def __get__(self, face: None, owner: type) -> Streamed[P]: ...
    @overload
    def __get__(self, face: Blocking, owner: type) -> Callable[P, Generator[str]]: ...
    @overload
    def __get__(self, face: Awaited, owner: type) -> Callable[P, AsyncGenerator[str]]: ...
    def __get__(self, face: Any, owner: type) -> Any:
        if face is None:
            return self

        @functools.wraps(self.turn)
        def stream(*args: Any, **options: Any) -> Any:
            return self.turn(face, *args, **options).stream()

        return stream


def _driven(face: Any, steps: Callable[..., Steps[Any]]) -> Callable[..., Any]:
    """Return the bound method that runs the steps; a coroutine function of an awaited face."""
    if isinstance(face, Awaited):

        @functools.wraps(steps)
        async def awaited(*args: Any, **options: Any) -> Any:
            return await face._wire.run(steps(face, *args, **options))

        return awaited

    @functools.wraps(steps)
    def blocking(*args: Any, **options: Any) -> Any:
        return face._wire.run(steps(face, *args, **options))

    return blocking
