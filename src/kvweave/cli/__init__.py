"""The ``kvweave`` command: the verbs of the Python API in a shell."""

import signal
from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; without ``argv`` the process's, which ends then.

    Of the process's own, all that is no verb dies of Ctrl-C as other programs do: what is imported
    before, and the interpreter's end, of which Python would print a traceback.
    """
    if argv is None and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from kvweave.cli.app import main as run

    return run(argv)
