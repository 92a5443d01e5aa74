"""``kvweave put``: read text, cut it, store it."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

from kvweave.cli import stdin
from kvweave.cli.command import UsageError
from kvweave.cli.show import Out
from kvweave.cli.target import target
from kvweave.errors import ContextTooLong, EmptyChunk, InvalidArgument, NameTaken


def put(args: Namespace) -> None:
    """Store text as chunks with their KV."""
    out = Out.of(args)
    if args.piece_tokens and args.cut == "none":
        raise UsageError("--piece-tokens without --cut", "add --cut paragraph or --cut tokens")
    texts = read_texts(args)
    where = target(args)
    try:
        names = where.store(texts)
    except NameTaken as error:
        error.hint = "remove it first, choose another name, or pass --replace"
        raise
    except ContextTooLong as error:
        error.hint = "cut it: --cut paragraph --piece-tokens 256"
        raise
    with where.files() as files:  # only now: closing a home moved the KV to disk
        entries = [files.stat(name) for name in names]
    out.done("stored", entries, dry_run=False)


def read_texts(args: Namespace) -> list[tuple[str, str]]:
    """Return name and text of each file. Raises UsageError, InvalidArgument, EmptyChunk, OSError."""
    files = args.files or ["-"]
    into = args.name.endswith("/")
    if into and "-" in files:
        raise UsageError(f"{args.name} needs files to take names from", "name it, or give files")
    if len(files) > 1 and not into:
        raise UsageError(f"{len(files)} files for one name", f"write {args.name}/ to name each")
    names = [args.name + Path(file).stem for file in files] if into else [args.name]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"two files would be {name}", "put them one by one")
    found = [(name, _read(file)) for name, file in zip(names, files, strict=True)]
    for name, text in found:
        if not text:
            raise EmptyChunk(name)
    return found


def _read(file: str) -> str:
    if file == "-" and stdin.is_terminal():
        print("reading from the terminal; end with Ctrl-D on a line of its own", file=sys.stderr)
    try:
        if file == "-":
            return stdin.whole_bytes().decode()
        with open(file, "rb") as opened:
            return stdin.all_of(opened, file).decode()
    except UnicodeDecodeError as error:
        raise InvalidArgument(
            file,
            f"it is not UTF-8 text: {error.reason}",
            "convert it first, for example with `iconv -t UTF-8`",
        ) from error
