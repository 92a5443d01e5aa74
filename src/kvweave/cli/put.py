"""``kvweave put``: read text, cut it, store it."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

import kvweave
from kvweave.chunk.cut import by_paragraph, by_tokens, cut
from kvweave.chunk.files import Files
from kvweave.cli.home import open_engine, open_table
from kvweave.cli.parser import UsageError
from kvweave.cli.show import Out
from kvweave.errors import ContextTooLong, EmptyChunk, InvalidArgument, NameTaken

LONGEST_PIECE = 256  # tokens; a few paragraphs


def put(args: Namespace) -> None:
    """Store text as chunks with their KV."""
    out = Out.of(args)
    if args.max_tokens and args.cut == "none":
        raise UsageError("--max-tokens without --cut", "add --cut paragraph or --cut tokens")
    texts = read_texts(args)
    with open_engine(args, make=True) as engine:
        items: list[tuple[str, list[int]]] = []
        for name, text in texts:
            items += _pieces(engine, args, name, engine.maker.tokens(text))
        try:
            with out.progress("tokens", sum(len(tokens) for _, tokens in items)) as progress:
                engine.put_many(items, kind=args.kind, replace=args.replace, progress=progress)
        except NameTaken as error:
            error.hint = "remove it first, choose another name, or pass --replace"
            raise
        except ContextTooLong as error:
            error.hint = "cut it: --cut paragraph --max-tokens 256"
            raise
        if args.cut != "none" and args.replace:
            new = {name for name, _ in items}
            for name, _ in texts:
                _remove_old_pieces(engine, name, new)
    with open_table(args) as table:  # again, since closing the engine moved the KV to disk
        entries = [Files(table).stat(name) for name, _ in items]
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
    if file == "-" and sys.stdin.isatty():
        print("reading from the terminal; end with Ctrl-D on a line of its own", file=sys.stderr)
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidArgument(file, f"it is not UTF-8 text: {error.reason}") from error


def _pieces(
    engine: kvweave.Engine, args: Namespace, name: str, tokens: list[int]
) -> list[tuple[str, list[int]]]:
    if args.cut == "none":
        return [(name, tokens)]
    longest = args.max_tokens or LONGEST_PIECE
    tokenizer = engine.runner.tokenizer
    if args.cut == "tokens" or tokenizer is None:
        cutter = by_tokens(longest)
    else:
        cutter = by_paragraph(lambda token: str(tokenizer.decode([token])), longest)
    pieces = cut(tokens, cutter)
    width = max(3, len(str(len(pieces) - 1)))
    return [(f"{name}/{i:0{width}d}", piece) for i, piece in enumerate(pieces)]


def _remove_old_pieces(engine: kvweave.Engine, name: str, new: set[str]) -> None:
    for entry in engine.files.ls(f"{name}/*"):
        if entry.name not in new and entry.name.rpartition("/")[2].isdecimal():
            engine.files.rm(entry.name)
