"""Parse, dispatch, and turn errors into one line and an exit status.

::

    0  done        1  an error, said in one line        2  wrong usage
    130  Ctrl-C    141  the reader of a pipe went away
"""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from io import TextIOWrapper
from threading import Timer, main_thread
from types import FrameType
from typing import TYPE_CHECKING

from kvweave.cli.parser import COMMANDS, UsageError, parse
from kvweave.cli.start import uncollected
from kvweave.errors import KVWeaveError, StoreError, of_system

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

INTERRUPTED, BROKEN_PIPE = 130, 141
OF_STDOUT = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
TOGETHER = 0.2  # seconds; nobody presses Ctrl-C twice in so short a time


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; without ``argv`` the process's, which ends then."""
    if argv is not None:
        return _status(argv)
    try:
        return _status(sys.argv[1:])
    finally:  # what is left is the interpreter's own end, of which a Ctrl-C would print a traceback
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def _status(argv: Sequence[str]) -> int:
    words = list(argv)
    as_json = "--json" in words
    _streams()
    _log()
    try:
        args = parse(words)
        module, function = COMMANDS[args.command].where.split(":")
        with _one_interrupt():
            # a verb's module is imported only now: most verbs need neither torch nor rich
            with uncollected():
                verb = getattr(import_module(module), function)
            status = int(verb(args) or 0)
        sys.stdout.flush()
        return status
    except UsageError as error:
        _complain({"code": "UsageError", "message": error.message, "hint": error.hint}, as_json)
        return 2
    except KVWeaveError as error:
        return _fail(error, as_json)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        _unsaid()
        return BROKEN_PIPE
    except OSError as error:
        if error.filename is None and error.errno in OF_STDOUT:  # files are named, or StoreError
            return _fail(_unsaid() or _cannot_say(error), as_json)
        return _fail(of_system(error, "use", error.filename or "what it needs"), as_json)
    except SystemExit as error:  # --help, --version
        if not error.code and (unsaid := _unsaid()) is not None:
            return _fail(unsaid, as_json)
        raise


@contextmanager
def _one_interrupt() -> Iterator[None]:
    """Take SIGINTs that come together as one, and none as none.

    Who signals a process and its group sends two; the second would break off the cleaning up after
    the first, and can leave a lock taken that is then waited for. What is raised in a destructor or
    a callback Python drops: then it is raised once more.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    last = -TOGETHER
    show, dropped = sys.unraisablehook, Timer(TOGETHER, _interrupt_main)

    def interrupt(sig: int, frame: FrameType | None) -> None:
        nonlocal last
        before, last = last, time.monotonic()
        if last - before >= TOGETHER:
            raise KeyboardInterrupt

    def unraisable(ignored: UnraisableHookArgs) -> None:
        nonlocal dropped
        if not issubclass(ignored.exc_type, KeyboardInterrupt):
            show(ignored)
        elif not dropped.is_alive():
            dropped = Timer(TOGETHER, _interrupt_main)
            dropped.daemon = True
            dropped.start()

    try:
        signal.signal(signal.SIGINT, interrupt)
    except ValueError:  # not in the main thread, so no signal comes here
        yield
        return
    sys.unraisablehook = unraisable
    try:
        yield
        if dropped.is_alive():
            raise KeyboardInterrupt
    finally:
        dropped.cancel()
        sys.unraisablehook = show
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _interrupt_main() -> None:
    main = main_thread().ident
    if main is not None:
        signal.pthread_kill(main, signal.SIGINT)  # wakes it from what it waits for


def _streams() -> None:
    """Have something at 0, 1 and 2: a file of ours that is opened where one is closed would be it.

    What stdout's encoding has no character for is written as ``\\u2713``, as it is on stderr.
    """
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), "w" if fd else "r"))
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def _unsaid() -> StoreError | None:
    """Return what keeps stdout from taking what waits for it, which is lost then."""
    try:
        sys.stdout.flush()
    except OSError as error:
        # Python flushes stdout once more at exit, which would complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _cannot_say(error)
    return None


def _cannot_say(error: OSError) -> StoreError:
    hint = "what was done is done; give stdout another place"
    return StoreError(f"cannot write to stdout: {error.strerror}", hint=hint, path="stdout")


def _fail(error: KVWeaveError, as_json: bool) -> int:
    logging.getLogger("kvweave").debug("where it came from", exc_info=error)
    _complain(error.to_dict(), as_json)
    return 1


def _complain(error: dict[str, object], as_json: bool) -> None:
    if as_json:
        print(json.dumps({"error": error}, default=str), file=sys.stderr)
        return
    print(f"error: {error['message']}", file=sys.stderr)
    if error["hint"]:
        print(f"hint: {error['hint']}", file=sys.stderr)


def _log() -> None:
    """Log to stderr at the level KVWEAVE_LOG names; ``debug`` shows where errors come from."""
    level = os.environ.get("KVWEAVE_LOG", "").upper()
    if level in logging.getLevelNamesMapping():
        logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
        logging.getLogger("kvweave").setLevel(level)
