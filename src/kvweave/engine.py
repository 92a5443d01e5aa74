"""The facade: wires model, index, shelf and contexts; the verbs of the shell and of HTTP."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from kvweave.chunk.files import Entry, Files
from kvweave.chunk.identity import ChunkId, Kind, Namespace, TierName, check_name
from kvweave.chunk.record import Record
from kvweave.chunk.table import Table
from kvweave.config import Config
from kvweave.errors import ContextTooLong, InvalidArgument, check_options
from kvweave.interrupts import HELD, let_in
from kvweave.keep import POLICIES
from kvweave.keep.tokens.spec import Keep
from kvweave.run.apart import apart
from kvweave.run.base import Backend, Capability
from kvweave.run.loop import Loop, Task
from kvweave.run.model import Runner
from kvweave.store.codec import parse
from kvweave.store.home import Home
from kvweave.store.kv import KV
from kvweave.store.spec import open_shelf
from kvweave.verbs import FromZero, checked
from kvweave.weave.answer import Answer, request_from
from kvweave.weave.calibration import calibration_of, check_bound
from kvweave.weave.context import Context
from kvweave.weave.contexts import Contexts, begin_all
from kvweave.weave.maker import Maker
from kvweave.weave.parts import TextOrTokens
from kvweave.weave.putting import NewChunk, naming, putting
from kvweave.weave.repair import strategy
from kvweave.weave.settings import settings_from
from kvweave.weave.shadow import Audit, Shadow
from kvweave.weave.template import Template
from kvweave.weave.ties import Ties
from kvweave.weave.turn import run_all
from kvweave.weave.weaver import Weaver

LOADING = ("dtype", "device", "max_positions")  # options of Runner.load


@checked
class Engine:
    """One model, its chunks and its contexts. Threads may share it: their verbs wait for each other.

    Args:
        model: a checkpoint directory, a hub id, a `Runner`, or another `Backend`.
        home: directory for the index and KV on disk; None keeps everything in memory.
        base: text (or token ids) every chunk's canonical KV is computed after; by default the BOS token,
            if the tokenizer has one. Without any (``base=""``) each chunk brings its own attention sink.
        options: the fields of `Config`, and ``dtype``, ``device``, ``max_positions`` of the model.

    Raises ModelUnusable, ModelMismatch (``home`` belongs to another model), InvalidArgument.
    """

    def __init__(
        self,
        model: str | Path | Backend,
        *,
        home: str | Path | None = None,
        base: TextOrTokens | None = None,
        config: Config | None = None,
        **options: object,
    ) -> None:
        check_options(options, [*(f.name for f in fields(Config)), *LOADING])
        loading = {k: options.pop(k) for k in LOADING if k in options}
        self.config = replace(config or Config(), **options)  # type: ignore[arg-type]
        if self.config.policy not in POLICIES:
            raise InvalidArgument(
                "policy", f"no policy {self.config.policy!r}", f"one of {', '.join(POLICIES)}"
            )
        strategy(self.config.repair), Keep.parse(self.config.keep or "full")
        loads = isinstance(model, str | Path)
        self.runner: Backend = Runner.load(str(model), **loading) if loads else model  # type: ignore[arg-type,assignment]
        if isinstance(self.runner, Runner) and self.runner.can_run:
            self.runner.watch_weights()
        self._home = None if home is None else Home(Path(home), self.runner.fingerprint)
        self.home = None if self._home is None else self._home.path
        where, index = (self._home.path, self._home.index) if self._home else (None, None)
        with contextlib.ExitStack() as opened, HELD, apart():  # what fails leaves no lock behind
            self.table = Table(self.config.index or index)
            opened.callback(self.table.close)
            ties = self._open(where, opened)
            places = [where, Path(str(model)) if loads else None]
            found = calibration_of(self.runner.fingerprint, self.config.calibration, places)
            check_bound(self.config.max_drift, found, self.config.repair, self.config.share)
            promises = "" if found is None else found.digest
            self.shadow = Shadow(self.runner, self.shelf, self.config.audit, where, promises)
            self.weaver = Weaver(
                self.runner, self.shelf, self.table, found, self.config.rows, self.shadow
            )
            ties.mend(self._home is not None and self._home.is_partial)
            self._base = self.maker.base(base) if self.runner.can_run else None
            let_in()
            opened.pop_all()

    def _open(self, where: Path | None, opened: contextlib.ExitStack) -> Ties:
        """Open what lies below the contexts; `Ties.mend` comes when all of it stands."""
        ties = Ties(self.table, self.runner)
        model = self.runner.fingerprint.digest().hex(), self.runner.device
        mine = (self.table.uuid, *self.table.was) if where or self.config.index else None
        self.shelf = open_shelf(self.config, where, mine, model, ties.about, ties.is_pinned)
        opened.callback(self.shelf.close)
        ties.bind(self.shelf)
        self.table.on_free = self._let_go
        self.loop = Loop(self.runner, self.config.max_batch, self.config.max_rows)
        self.closed, self.gate = False, self.loop.gate
        self.maker = Maker(self.runner, self.shelf, self.table)
        self.files = Files(self.table, gate=self.gate)
        self._contexts = Contexts()
        return ties

    # ---- life

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all contexts; with a home, write KV in memory to disk and close the index.

        Everything is let go of whatever fails; the first failure is raised then. KV that could not
        be written is computed again one day.
        """
        if self.closed:
            return
        if self.table.is_changing:
            raise InvalidArgument("close", "an edit is under way", "let its block end first")
        with contextlib.ExitStack() as last:
            last.callback(setattr, self, "closed", True)
            last.callback(self.table.close)
            last.callback(self.shelf.close)
            for context in list(self._contexts):
                self.close_context(context.name, context.namespace)
            self.shadow.close()
            self.shelf.sink(int(r.id) for r in list(self.table) if r.names)

    def can(self, what: str) -> Capability:
        """Tell whether the model can ``run`` here, and ``move`` (chunks at any position); if not, why."""
        if what not in ("run", "move"):
            raise InvalidArgument("can", f"nothing is known about {what!r}", "'run' or 'move'")
        return self.runner.can_run if what == "run" else self.runner.can_move

    # ---- chunks

    def put(
        self,
        name: str,
        text: TextOrTokens,
        *,
        kind: Kind = "document",
        namespace: Namespace = "",
        replace: bool = False,
        progress: Callable[[int], None] = lambda n: None,
    ) -> Entry:
        """Store a chunk with its canonical KV under ``name``.

        ``progress`` is told tokens computed. Raises NameTaken, InvalidName, EmptyChunk,
        ContextTooLong, OverBudget, CannotRun, and ChunkPinned (`replace` of a last name); then
        nothing is stored.
        """
        how: dict[str, Any] = {"kind": kind, "replace": replace, "progress": progress}
        return self.put_many([(name, text)], namespace=namespace, **how)[0]

    def put_many(
        self,
        items: Iterable[tuple[str, TextOrTokens]],
        *,
        kind: Kind = "document",
        namespace: Namespace = "",
        replace: bool = False,
        progress: Callable[[int], None] = lambda n: None,
    ) -> list[Entry]:
        """Store several chunks; short ones are computed together. All of them or none."""
        self._require_run()
        of = self.maker.tokens
        new = [NewChunk(name, of(text), kind) for name, text in items]
        within = self.table.transaction() if self.table.is_changing else contextlib.nullcontext()
        with within, naming(self.maker, new, self._base, namespace, replace) as made:
            self.maker.canonicalise(made, progress)
        return [Files(self.table, namespace).stat(item.name) for item in new]

    def putting(
        self,
        items: Sequence[NewChunk],
        *,
        namespace: Namespace = "",
        replace: bool = False,
        then: Callable[[Sequence[ChunkId]], None] = lambda ids: None,
    ) -> Task[list[Entry]]:
        """As `put_many`, as a task of the loop; see `kvweave.weave.putting`."""
        self._require_run()
        yield from putting(self.maker, items, self._base, namespace, replace, then)
        return [Files(self.table, namespace).stat(item.name) for item in items]

    def put_rows(
        self, name: str, kv: KV, *, kind: Kind = "memory", namespace: Namespace = ""
    ) -> Entry:
        """Store rows that no token made (a learned prefix, say) under ``name``; keys unrotated.

        They are placed as they are, wherever they stand, and never computed: what is lost of them
        is lost. Raises NameTaken, InvalidName, InvalidArgument, OverBudget, CannotMove.
        """
        self._require_run()
        with self.table.transaction():
            id = self.maker.add_rows(kv, kind=kind, namespace=namespace)
            self.table.bind(name, id, namespace=namespace)
        return Files(self.table, namespace).stat(name)

    def compress(
        self, ref: str, keep: str, *, to: str | None = None, namespace: Namespace = "",
        dry_run: bool = False,
    ) -> Entry:  # fmt: skip
        """Leave of a chunk's KV what a token policy keeps (``kvzip:0.3``), under the name ``to``, by
        default its own; ``full`` computes all of it again. ``dry_run`` computes nothing, so it has no
        bytes and an id that nobody has. Raises ChunkNotFound, InvalidArgument, NameTaken, ChunkPinned,
        ContextTooLong, OverBudget, CannotMove.
        """
        self._require_run()
        return self.maker.compress(ref, Keep.parse(keep), to, namespace, dry_run=dry_run)

    def place(
        self,
        pattern: str,
        tier: TierName,
        *,
        codec: str | None = None,
        namespace: Namespace = "",
        dry_run: bool = False,
    ) -> list[Entry]:
        """Move the canonical KV of matching chunks to ram, disk, remote or none (tokens only).

        ``codec`` (`kvweave.store.codec`) instead of the tier's own. Raises InvalidArgument.
        """
        choice = None if codec is None else parse(codec)
        self.shelf.level(tier)

        def move(record: Record, where: TierName) -> int:
            if where != "none":
                self.maker.canonicalise([record.id])
            return self.shelf.place(record.id, where, choice)

        again, files = choice is not None, Files(self.table, namespace)
        return files.place(pattern, tier, move, again=again, dry_run=dry_run)

    def denoise(self) -> int:
        """Compute canonical KV that is missing, also after open contexts' bases; return the tokens."""
        with self.weaver.sources.bases.rebasing(context.parts for context in self._contexts):
            mine = (r for r in list(self.table) if not self.table.is_virtual(r.id))
            return self.maker.canonicalise(r.id for r in mine if self.shelf.tier(r.id) == "none")

    def audit(self, n: FromZero = 1) -> list[Audit]:
        """Hold up to ``n`` of the answers put aside (`Config.audit`) against a full prefill, now."""
        n = min(n, len(self.shadow))
        made = (self.loop.finish(self.shadow.audit(self.loop)) for _ in range(n) if self.shadow)
        return [audit for audit in made if audit is not None]

    # ---- contexts

    @property
    def contexts(self) -> dict[str, Context]:
        """The open contexts of the default namespace by name."""
        return dict(self._contexts.of(""))

    def contexts_of(self, namespace: Namespace) -> dict[str, Context]:
        """Return the open contexts of one namespace by name."""
        return dict(self._contexts.of(namespace))

    def context(self, name: str, *, system: str | None = None, **options: object) -> Context:
        """Open a conversation that begins with the message ``system``: all other chunks' canonical KV
        is computed after it.

        ``options``: the fields of `kvweave.weave.settings.Settings`; of another ``namespace`` are its
        name and all its chunks. Raises NameTaken, InvalidName, InvalidArgument, CannotRun,
        CannotMove (what would close up).
        """
        context = self._new_context(name, options)
        try:
            if system is not None:
                with context.edit():
                    self.maker.canonicalise([context.message("system", system).id])
            elif self._base is not None:
                context.set_base(self._base, "base")
        except BaseException:
            context.close()
            raise
        self._contexts.add(context)
        return context

    def opening(self, name: str, *, system: str, **options: object) -> Task[Context]:
        """As `context`, as a task of the loop: the first message is computed beside others."""
        return self._contexts.opening(self._new_context(name, options), system)

    def _new_context(self, name: str, options: Mapping[str, object]) -> Context:
        self._require_run()
        settings = settings_from(self.config, options)
        return self._contexts.new(check_name(name), settings, self.weaver, self.maker, self.loop)

    def compose(
        self,
        template: str | Template,
        values: Mapping[str, object] | None = None,
        *,
        name: str | None = None,
        namespace: Namespace = "",
        repair: str | None = None,
        share: float | None = None,
        max_drift: float | None = None,
        keep: str | None = None,
        bases: str | None = None,
        **holes: object,
    ) -> Context:
        """Make a context from text with ``{holes}``.

        A list fills a hole with stored chunks, a string with text; a hole that names a chunk needs
        no value. ``values`` is for holes whose names cannot be keywords. All chunks are those of
        ``namespace``. The text between chunks is always prefilled here, also when the same text is
        stored. Raises HoleNotFilled, ChunkNotFound, ContextTooLong, InvalidArgument.
        """
        made = Template.of(template)
        known = lambda ref: self.table.lookup(ref, namespace) is not None  # noqa: E731
        pieces = made.fill({**(values or {}), **holes}, known)
        if len(pieces) > self.runner.limit:  # each has a token at least
            raise ContextTooLong(len(pieces), self.runner.limit)
        name = name or self._contexts.next_composed(namespace)
        given = [("repair", repair), ("share", share), ("max_drift", max_drift), ("keep", keep)]
        options: dict[str, Any] = {k: v for k, v in [*given, ("bases", bases)] if v is not None}
        context = self.context(name, namespace=namespace, **options)
        try:
            context.append_pieces(pieces)
        except BaseException:
            self.close_context(context.name, namespace)
            raise
        return context

    def get_context(self, name: str, namespace: Namespace = "") -> Context:
        """Return an open context. Raises ContextNotFound."""
        return self._contexts.get(name, namespace)

    def fork(self, context: Context, name: str) -> Context:
        """Return a copy of ``context`` under another name, in the same namespace."""
        name = check_name(name)
        self._contexts.require_own(context)
        self._contexts.require_free(name, context.namespace)
        twin = context.fork(name, self._contexts.new_key(name, context.namespace))
        self._contexts.add(twin)
        return twin

    def rename_context(self, name: str, to: str, namespace: Namespace = "") -> Context:
        """Give a context another name, its next messages too. Raises ContextNotFound, NameTaken, InvalidName."""
        context = self._contexts.get(name, namespace)
        self._contexts.rename(context, check_name(to))
        return context

    def close_context(self, name: str, namespace: Namespace = "") -> None:
        """Free a context's rows and let go of its chunks. Raises ContextNotFound."""
        self._contexts.get(name, namespace).close()

    def generate_many(
        self, contexts: Sequence[Context], max_tokens: int = 256, **options: object
    ) -> list[Answer]:
        """Continue several contexts together, one packed model pass a step."""
        request = request_from(max_tokens, options)
        self._contexts.require_own(*contexts)
        self.shelf.upcoming(int(part.id) for context in contexts for part in context.parts)
        try:
            turns = begin_all(contexts, *request)
        finally:
            self.shelf.upcoming(())
        return run_all(turns)

    def check_integrity(self) -> None:
        """Raise AssertionError when index, shelf and contexts disagree."""
        self.table.check_integrity()
        self.shelf.check_integrity()
        for context in self._contexts:
            context.check_integrity()

    def _require_run(self) -> None:
        """Raise CannotRun; from here on the home is this model's."""
        self.runner.require_run()
        if self._home is not None:
            self._home.claim()

    def _let_go(self, id: int) -> None:
        self.shelf.drop(id)
        self.weaver.dependence.drop(id)
        self.weaver.sources.bases.drop(ChunkId(id))
