"""The home directory: which model it belongs to, and opening it with or without that model.

::

    ~/.kvweave/config.json      {"model": path or hub id}   what `put` was given, so that `run` finds it;
                                "tiers": what `serve --tier` was given
               model.json       the model's fingerprint     the engine's; KV of no other model enters
               index.sqlite     names, ids, tokens
               responses.sqlite what a server keeps of responses: `kvweave.serve.responses.saved`
               kv/              KV on disk: `kvweave.store.tier.disk`
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import kvweave
from kvweave.chunk.identity import OLDER
from kvweave.chunk.place import is_inside
from kvweave.chunk.rebuild import write_json
from kvweave.chunk.table import Table
from kvweave.cli.command import UsageError
from kvweave.cli.show import Out
from kvweave.cli.start import uncollected
from kvweave.cli.values import path_of
from kvweave.errors import ChunkNotFound, ModelMismatch, ModelUnusable, StoreError, of_system

BUNDLED = Path(kvweave.__file__).parent / "demo" / "model"


def home_of(args: Namespace) -> Path:
    """Return the home directory; it need not exist."""
    return path_of(args.home or os.environ.get("KVWEAVE_HOME") or "~/.kvweave")


@contextmanager
def private() -> Iterator[None]:
    """Let only their owner read the files that are made meanwhile, by any thread."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


@contextmanager
def open_table(args: Namespace, *, change: bool = False) -> Iterator[Table]:
    """Open the index alone, which needs no model; a home that is not there is empty.

    One that cannot be written is read, unless something is to ``change``.
    """
    home = home_of(args)
    if not has_index(home):
        Out.of(args).note(f"nothing is stored in {home} yet; `kvweave put NAME FILE` does")
        yield Table()
        return

    freed: list[int] = []
    with private(), _readable(home, change) as index, Table(index) as table:
        keys = {int(record.id): record.digest.hex() for record in table}
        table.on_free = freed.append
        tiers = _require_deletable(home) if change else []
        try:
            yield table
        except ChunkNotFound as error:
            if any(name.startswith(f"{error.name}/") for name in table.names()):
                error.hint = below(str(error.name))
            raise
        finally:
            _delete(home, table.uuid, tiers, {keys[id] for id in freed})


def has_index(home: Path) -> bool:
    """Tell whether a home was begun. Raises StoreError for one that is a file, or has lost its index."""
    if home.exists() and not home.is_dir():
        hint = "a home is a directory: give another --home"
        raise StoreError(f"{home} is a file", hint=hint, path=str(home))
    index = home / "index.sqlite"
    if index.exists():
        return True
    if (home / "kv").is_dir():
        hint = f"put a copy of it back, or `kvweave fsck {home} --repair` begins a new one"
        raise StoreError(f"{index} is gone, and with it all names", hint=hint, path=str(index))
    return False


@contextmanager
def _readable(home: Path, change: bool) -> Iterator[Path]:
    """Yield the index of a home: of one that cannot be written a copy, as to open it writes."""
    index = home / "index.sqlite"
    if change or os.access(home, os.W_OK):
        yield index
        return
    with tempfile.TemporaryDirectory(prefix="kvweave-") as directory:
        for file in home.glob(f"{index.name}*"):
            if file.suffix != ".lock":
                shutil.copyfile(file, Path(directory) / file.name)
        yield Path(directory) / index.name


def _require_deletable(home: Path) -> list[str]:
    """Return the home's tiers. Raises StoreError where KV could not be deleted, before a name goes."""
    kv = home / "kv"
    if kv.is_dir() and not os.access(kv, os.R_OK | os.W_OK | os.X_OK):
        raise of_system(PermissionError(errno.EACCES, "Permission denied"), "delete from", kv)
    return tiers_of(home)


def _delete(home: Path, uuid: str, tiers: list[str], digests: set[str]) -> None:
    """Delete the KV of chunks from the home's directories. Raises StoreError where some stayed."""
    if not digests:
        return
    from kvweave.store.fsck import directories
    from kvweave.store.record.transfer import digest_of
    from kvweave.store.tier.disk import Disk
    from kvweave.store.tier.owner import owner_of

    for directory in directories(home, tiers):
        if not is_inside(directory, home) and owner_of(directory) != uuid:
            continue
        tier = Disk(directory)
        gone = tier.discard([key for key in tier.keys() if digest_of(key) in digests])
        tier.close()
        for outcome in gone:
            if not outcome.ok:
                hint = "the names are gone; the next command that loads the model tries again"
                raise StoreError(f"KV is left in {directory}: {outcome.why}", hint=hint)


def tiers_of(home: Path, given: list[str] | None = None) -> list[str]:
    """Return the specs of tiers that were given, or that the home was served with.

    Raises StoreError for a config that cannot be read.
    """
    if given is not None or not (home / "config.json").exists():
        return given or []
    file = home / "config.json"
    tiers = read(file).get("tiers") or []
    if not isinstance(tiers, list):
        raise _unreadable(file, "its tiers are no list")
    return [str(tier) for tier in tiers]


def below(name: str) -> str:
    """Return the hint for who took a directory for a name."""
    return f"did you mean {name + '/'!r}, all below it?"


def model_of(args: Namespace) -> str:
    """Return the model to load: the one given, the home's, or the bundled one.

    Raises StoreError for an unreadable config, ModelUnusable for a directory that is not there.
    """
    home = home_of(args)
    known = read(home / "config.json").get("model") if (home / "config.json").exists() else None
    model = str(args.model or known or BUNDLED)
    path = path_of(model)
    if path.exists():
        return str(path.resolve())
    if model.startswith(("/", ".", "~")) or model.count("/") > 1:
        raise ModelUnusable(model, "there is no such directory")
    return model


def offline_vllm() -> Any:
    """Return `kvweave.connect.vllm.offline`. Raises UsageError where vLLM is not installed."""
    try:
        return import_module("kvweave.connect.vllm.offline")
    except ImportError as error:
        raise UsageError(
            f"vLLM is not here: {error}", "docs/vllm.md says how to install it"
        ) from error


@contextmanager
def open_engine(args: Namespace, *, make: bool = False, **options: Any) -> Iterator[kvweave.Engine]:
    """Load the model and open the home with it, if there is one; ``make`` makes one.

    ``options`` are the engine's. A home that is made here and gets no chunk is not bound to the model. Raises ModelMismatch.
    """
    with private(), _opened(args, make, options) as engine:
        yield engine


@contextmanager
def _opened(args: Namespace, make: bool, options: dict[str, Any]) -> Iterator[kvweave.Engine]:
    home = home_of(args)
    model = model_of(args)
    if args.model is None and model == str(BUNDLED) and not (home / "config.json").exists():
        Out.of(args).note("note: no --model given, using the tiny bundled one (it knows few words)")
    quieten(args)
    bound = (home / "model.json").exists()
    if bound:
        read(home / "model.json")
    tiers = options.pop("tiers", None) or tiers_of(home) or None
    if tiers is not None:
        options["tiers"] = tuple(str(tier) for tier in tiers)
    with uncollected():
        make_engine = kvweave.Engine
    try:
        engine = make_engine(model, home=home if bound or make else None, **options)
    except ModelMismatch as error:
        if error.hint != OLDER:
            error.hint = (
                f"{home} was made with another model: pass that with --model, or another --home"
            )
        raise
    kept = bound or not make
    try:
        with engine:
            try:
                yield engine
            finally:  # whatever fails now or in closing: what was stored is of this model
                kept = kept or any(map(engine.table.names, engine.table.namespaces()))
    finally:
        if not kept:
            (home / "model.json").unlink(missing_ok=True)
        elif make:
            words = {} if tiers is None else {"tiers": list(tiers)}
            write_json(home / "config.json", {"model": model, **words})


def read(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file of the home. Raises StoreError when there is none."""
    try:
        value = json.loads(file.read_text())
        if not isinstance(value, dict):
            raise ValueError("it is no JSON object")
    except ValueError as error:
        raise _unreadable(file, str(error)) from error
    return value


def _unreadable(file: Path, why: str) -> StoreError:
    hint = "put it right, or use another --home; chunks can be put again from their text"
    return StoreError(f"cannot read {file}: {why}", hint=hint, path=str(file))


def quieten(args: Namespace) -> None:
    """Keep the loaders' progress bars off a pipe, and their warnings out of JSON; they read these
    variables when imported."""
    if args.quiet or args.json:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if args.quiet or args.json or not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
