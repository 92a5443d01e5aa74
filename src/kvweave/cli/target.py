"""Whose chunks a command works on: a home on this machine, or a server (``--url``).

The one place that knows the difference. Both targets have the same verbs, and what they open has
those of `Files` and of `Engine`.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kvweave.chunk.cut import by_paragraph, by_tokens, cut
from kvweave.chunk.files import Entry, Files
from kvweave.cli.command import UsageError
from kvweave.cli.home import BUNDLED, below, home_of, model_of, open_engine, open_table, quieten
from kvweave.cli.show import Out
from kvweave.cli.start import uncollected
from kvweave.cli.values import path_of
from kvweave.errors import ChunkNotFound

if TYPE_CHECKING:
    import kvweave
    from kvweave.client import Client, RemoteFiles

LONGEST_PIECE = 256  # tokens; a few paragraphs
_Named = tuple[str, str]  # a name and a text


def target(args: Namespace) -> Here | There:
    """Return what --url or KVWEAVE_URL says; a --home or --model beats the variable, and a command that
    takes no --url is done here.

    Raises UsageError for both on the command line.
    """
    if not hasattr(args, "url"):
        return Here(args)
    local = [f"--{name}" for name in ("home", "model") if getattr(args, name) is not None]
    if args.url and local:
        raise UsageError(f"--url takes no {local[0]}: both are the server's", "leave one away")
    url = args.url or ("" if local else os.environ.get("KVWEAVE_URL", ""))
    return There(args, url) if url else Here(args)


def is_bundled(args: Namespace) -> bool:
    """Tell whether the model that answers is the bundled one, as far as this machine knows."""
    if getattr(args, "gguf", None):
        return False
    return isinstance(target(args), Here) and model_of(args) == str(BUNDLED)


def key_of(args: Namespace) -> str | None:
    """Return the API key: the file's, the one given, or None. Raises UsageError, StoreError."""
    if args.key_file is None:
        return str(args.key) if args.key else None
    if args.key:
        raise UsageError("--key and --key-file", "give one of them")
    try:
        key = path_of(args.key_file).read_text("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise UsageError(f"{args.key_file} is no text", "it holds one key") from error
    if len(key.split()) != 1:
        raise UsageError(f"{args.key_file} holds no key, or several", "write one key into it")
    return key


def require_here(args: Namespace, what: str) -> None:
    """Raise UsageError if a server was asked for what only works on this machine."""
    if isinstance(target(args), There):
        hint = "leave --url away, and unset KVWEAVE_URL or give --home or --model"
        raise UsageError(f"{what} works on this machine only", hint)


def server(args: Namespace, what: str) -> There:
    """Return the server that was asked for. Raises UsageError where there is none."""
    where = target(args)
    if isinstance(where, There):
        return where
    raise UsageError(
        f"{what} is of a server: what runs here ends with the command",
        "start one with `kvweave serve`, then give --url or KVWEAVE_URL",
    )


class LocalFiles(Files):
    """The file verbs, and what the shell's `stat` tells besides."""

    def about(self, ref: str) -> dict[str, Any]:
        """Return the entry as a dict, with all names, the base's id and the digest."""
        entry = self.stat(ref)
        record = self.table.get(entry.id)
        more = {"names": list(record.names), "base": record.base, "digest": record.digest.hex()}
        return entry.to_dict() | more


class Here:
    """A home on this machine."""

    def __init__(self, args: Namespace) -> None:
        self.args, self.out = args, Out.of(args)

    @contextmanager
    def files(self, *, change: bool = False) -> Iterator[LocalFiles]:
        """Open the file verbs, those that change something too or not; they need no model."""
        with open_table(self.args, change=change) as table:
            yield LocalFiles(table)

    def text(self, ref: str) -> dict[str, Any]:
        """Return the tokens and the text of a chunk; of the model only the tokenizer is loaded."""
        with self.files() as files:
            tokens = [int(token) for token in files.table.tokens(files.stat(ref).id)]
        quieten(self.args)
        with uncollected():
            from kvweave.run.load import load_tokenizer
            from kvweave.run.sample import text_of
        tokenizer = load_tokenizer(model_of(self.args))
        text = None if tokenizer is None else text_of(tokenizer, tokens)
        return {"tokens": tokens, "text": text}

    @contextmanager
    def weaver(self, *, make: bool = False) -> Iterator[kvweave.Engine]:
        """Load the model and open the home with it; ``make`` makes one."""
        with open_engine(self.args, make=make) as engine:
            yield engine

    def place(self) -> list[Entry]:
        """Move KV to a tier; return the entries."""
        args = self.args
        if args.tier == "ram":
            self.out.note("note: ram lasts as long as this process, then the KV goes to disk")
        if not (home_of(args) / "model.json").exists():
            with self.files() as files:  # says that nothing is there, or what is not found
                files.ls(args.pattern)
            return []
        with self.weaver() as engine:
            return engine.place(args.pattern, args.tier, codec=args.codec, dry_run=args.dry_run)

    def store(self, texts: Sequence[_Named]) -> list[str]:
        """Store texts as chunks, cut as asked; return the names."""
        args = self.args
        with self.weaver(make=True) as engine:
            items: list[tuple[str, list[int]]] = []
            for name, text in texts:
                items += self._pieces(engine, name, engine.maker.tokens(text))
            with self.out.progress("tokens", sum(len(tokens) for _, tokens in items)) as progress:
                engine.put_many(items, kind=args.kind, replace=args.replace, progress=progress)
            new = {name for name, _ in items}
            for name, _ in texts if args.cut != "none" and args.replace else ():
                for entry in engine.files.ls(f"{name}/*"):
                    if entry.name not in new and entry.name.rpartition("/")[2].isdecimal():
                        engine.files.rm(entry.name)
        return [name for name, _ in items]

    def _pieces(
        self, engine: kvweave.Engine, name: str, tokens: list[int]
    ) -> list[tuple[str, list[int]]]:
        if self.args.cut == "none":
            return [(name, tokens)]
        longest = self.args.piece_tokens or LONGEST_PIECE
        tokenizer = engine.runner.tokenizer
        if self.args.cut == "tokens" or tokenizer is None:
            cutter = by_tokens(longest)
        else:
            cutter = by_paragraph(lambda token: str(tokenizer.decode([token])), longest)
        pieces = cut(tokens, cutter)
        width = max(3, len(str(len(pieces) - 1)))
        return [(f"{name}/{i:0{width}d}", piece) for i, piece in enumerate(pieces)]


class There:
    """A server."""

    def __init__(self, args: Namespace, url: str) -> None:
        self.args, self.url, self.out = args, url, Out.of(args)

    @contextmanager
    def files(self, *, change: bool = False) -> Iterator[RemoteFiles]:
        """Open the file verbs; ``change`` has no meaning here."""
        with self.weaver() as client:
            try:
                yield client.files
            except ChunkNotFound as error:
                name = str(error.name)
                if (
                    not name.startswith("#")
                    and not name.endswith("/")
                    and client.files.ls(f"{name}/**", limit=1)
                ):
                    error.hint = below(name)
                raise

    def text(self, ref: str) -> dict[str, Any]:
        """Return the tokens and the text of a chunk."""
        with self.files() as files:
            return files.text(ref)

    @contextmanager
    def weaver(self, *, make: bool = False) -> Iterator[Client]:
        """Open a client; ``make`` has no meaning here."""
        from kvweave.client import Client

        with Client(self.url, key_of(self.args)) as client:
            yield client

    def place(self) -> list[Entry]:
        """Move KV to a tier; return the entries."""
        args = self.args
        with self.weaver() as client:
            return client.place(args.pattern, args.tier, codec=args.codec, dry_run=args.dry_run)

    def store(self, texts: Sequence[_Named]) -> list[str]:
        """Store texts as chunks; return the names. Raises UsageError for --cut."""
        args = self.args
        if args.cut != "none":
            raise UsageError(
                "--cut needs the tokenizer, and that is with the server",
                "cut the text into files, and put them with NAME/",
            )
        with self.weaver() as client:
            client.put_many(texts, kind=args.kind, replace=args.replace)
        return [name for name, _ in texts]
