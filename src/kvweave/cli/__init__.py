"""The ``kvweave`` command: the verbs of the Python API in a shell."""

from kvweave.cli.app import main

__all__ = ["main"]
