"""Parse, dispatch, and turn errors into one line and an exit status.

::

    0  done        1  an error, said in one line        2  wrong usage
    130  Ctrl-C, 143 SIGTERM, 129 SIGHUP    141  the reader of a pipe went away
"""

from __future__ import annotations

import errno
import json
import logging
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from io import TextIOWrapper

from kvweave.cli.parser import COMMANDS, UsageError, parse
from kvweave.cli.signals import Ended, interrupt_of, status_of, taken
from kvweave.cli.start import uncollected
from kvweave.errors import KVWeaveError, StoreError, of_system

BROKEN_PIPE = 141
OF_STDOUT = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, by default the process's, and return its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    as_json = "--json" in words
    _streams()
    _log()
    try:
        args = parse(words)
        module, function = COMMANDS[args.command].where.split(":")
        with taken():
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
        failed, signal = _fail(error, as_json), interrupt_of(error)
        return failed if signal is None else status_of(signal)
    except KeyboardInterrupt as error:
        if not isinstance(error, Ended):
            print(file=sys.stderr)
        return status_of(error)
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
