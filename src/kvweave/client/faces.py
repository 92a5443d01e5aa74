"""One verb, three faces: it blocks, it is awaited, or it is collected with other edits.

A class of verbs has each of them once, as a course. Its subclasses say with `Blocking`, `Awaited` or
`Block` what calling one does.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast, overload

from kvweave.client.block import Block, OneEdit, Promise
from kvweave.client.course import Course
from kvweave.client.wires import AwaitedWire, BlockingWire
from kvweave.verbs import checking

P = ParamSpec("P")
T = TypeVar("T")
Soon = Coroutine[Any, Any, T]


class Blocking:
    """Verbs return when they are done."""

    _wire: BlockingWire


class Awaited:
    """Verbs are awaited."""

    _wire: AwaitedWire


class _Method:
    """What a class shows of a verb: its name, words and signature; called, it takes an object first."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(cast(Any, self), function)

    def __call__(self, face: Any, /, *args: Any, **options: Any) -> Any:
        return cast(Any, self).__get__(face, type(face))(*args, **options)


class Verb(_Method, Generic[P, T]):
    """A method that goes its course; on a class, `course` is for other verbs' use."""

    def __init__(self, course: Callable[Concatenate[Any, P], Course[T]]) -> None:
        self.course = checking(course)
        super().__init__(self.course)

    @overload
    def __get__(self, face: None, owner: type) -> Verb[P, T]: ...
    @overload
    def __get__(self, face: Blocking, owner: type) -> Callable[P, T]: ...
    @overload
    def __get__(self, face: Awaited, owner: type) -> Callable[P, Soon[T]]: ...
    def __get__(self, face: Any, owner: type) -> Any:
        return self if face is None else _driven(face, self.course)


class Told(Generic[T]):
    """A property that is asked of the server; of an awaited face, it is awaited."""

    def __init__(self, course: Callable[[Any], Course[T]]) -> None:
        self.course = course
        functools.update_wrapper(cast(Any, self), course)

    @overload
    def __get__(self, face: None, owner: type) -> Told[T]: ...
    @overload
    def __get__(self, face: Blocking, owner: type) -> T: ...
    @overload
    def __get__(self, face: Awaited, owner: type) -> Soon[T]: ...
    def __get__(self, face: Any, owner: type) -> Any:
        return self if face is None else _driven(face, self.course)()


class Editing(_Method, Generic[P, T]):
    """A method that edits a context: sent at once, or collected."""

    def __init__(self, edit: Callable[Concatenate[Any, P], OneEdit[T]]) -> None:
        self.edit = checking(edit)
        super().__init__(self.edit)

    @overload
    def __get__(self, face: None, owner: type) -> Editing[P, T]: ...
    @overload
    def __get__(self, face: Block, owner: type) -> Callable[P, Promise[T]]: ...
    @overload
    def __get__(self, face: Blocking, owner: type) -> Callable[P, T]: ...
    @overload
    def __get__(self, face: Awaited, owner: type) -> Callable[P, Soon[T]]: ...
    def __get__(self, face: Any, owner: type) -> Any:
        if face is None:
            return self
        if not isinstance(face, Block):

            def send(face: Any, /, *args: Any, **options: Any) -> Course[T]:
                return cast(Course[T], face._send(self.edit(face, *args, **options)))

            return _driven(face, functools.update_wrapper(send, self.edit))

        @functools.wraps(self.edit)
        def collect(*args: Any, **options: Any) -> Promise[T]:
            return cast(Promise[T], face.take(self.edit(face, *args, **options)))

        return collect


class Streamed(_Method, Generic[P]):
    """A method that returns a turn; called, it gives the pieces of that turn's text."""

    def __init__(self, turn: Callable[Concatenate[Any, P], Any]) -> None:
        self.turn = checking(turn)
        super().__init__(self.turn)

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


def _driven(face: Any, course: Callable[..., Course[Any]]) -> Callable[..., Any]:
    """Return the bound method that runs the course; a coroutine function of an awaited face."""
    if isinstance(face, Awaited):

        @functools.wraps(course)
        async def awaited(*args: Any, **options: Any) -> Any:
            return await face._wire.run(course(face, *args, **options))

        return awaited

    @functools.wraps(course)
    def blocking(*args: Any, **options: Any) -> Any:
        return face._wire.run(course(face, *args, **options))

    return blocking
