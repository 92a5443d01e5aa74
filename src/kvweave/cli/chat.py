"""``kvweave chat``: a conversation whose turns can be dropped one by one."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import TYPE_CHECKING

import kvweave
from kvweave.cli import stdin
from kvweave.cli.asking import answer_to
from kvweave.cli.command import UsageError
from kvweave.cli.show import Out, aligned
from kvweave.cli.signals import Ended, interrupt_of
from kvweave.cli.target import server, target
from kvweave.cli.text import sampling_of
from kvweave.cli.values import part_of
from kvweave.errors import InvalidArgument, KVWeaveError, NameTaken, nearest
from kvweave.weave.parts import Part

if TYPE_CHECKING:
    from kvweave.client import RemoteContext

HELP = """\
/parts           what the context holds
/drop NAME...    remove parts, by name, #id or number
/add NAME        append a stored chunk
/plan            how the last answer's KV came about
/check           compare with a full prefill
/quit            end (so does Ctrl-D)"""


def chat(args: Namespace) -> int:
    """Talk to the model until the input ends; 1 when it was a pipe and something failed."""
    out = Out.of(args)
    stays = args.context is not None
    where = server(args, "--context") if stays else target(args)
    with where.weaver(make=args.keep_turns) as weaver:
        sampling = sampling_of(args, stop=[])
        context = _opened(weaver, args, out)
        try:
            n_failed = Chat(weaver, context, sampling, out, args.limit).talk()
        finally:
            if not stays:
                try:
                    if not args.keep_turns:  # before somebody else may have the name
                        _forget(weaver, context.name)
                finally:
                    weaver.close_context(context.name)
    return 1 if n_failed and not stdin.is_terminal() else 0


def _opened(
    weaver: kvweave.Engine | kvweave.Client, args: Namespace, out: Out
) -> kvweave.Context | RemoteContext:
    """Open a new context, or the one that was named."""
    given = {
        name: getattr(args, name)
        for name in ("system", "repair", "share", "max_drift", "keep", "bases")
    }
    given = {name: value for name, value in given.items() if value is not None}
    if args.context is None:
        try:
            return weaver.context(_free_name(weaver), **given)
        except NameTaken:  # by another chat that began at the same time
            return _opened(weaver, args, out)
    if args.context not in weaver.contexts:
        return weaver.context(args.context, **given)
    if given:
        option = f"--{next(iter(given)).replace('_', '-')}"
        raise UsageError(f"{args.context} is open, so {option} comes too late", "leave it away")
    context = weaver.get_context(args.context)
    out.note(f"{context.name}: {len(context.parts)} parts, {context.n_tokens} tokens")
    return context


class Chat:
    """One conversation at the prompt."""

    def __init__(
        self,
        weaver: kvweave.Engine | kvweave.Client,
        context: kvweave.Context | RemoteContext,
        sampling: kvweave.Sampling,
        out: Out,
        limit: int | None,
    ) -> None:
        self.weaver = weaver
        self.context, self.sampling, self.out, self.limit = context, sampling, out, limit
        self.commands: dict[str, Callable[[list[str]], None]] = {
            "/parts": self._parts,
            "/drop": self._drop,
            "/add": self._add,
            "/plan": self._plan,
            "/check": self._check,
            "/help": self._help,
        }

    def talk(self) -> int:
        """Answer line by line; return how many lines failed."""
        n_failed = 0
        for given in _lines():
            try:
                line = given if isinstance(given, str) else stdin.text_of_line(given)
                words = line.split()
                if not words:
                    continue
                if words[0] in ("/quit", "/exit"):
                    break
                if words[0].startswith("/"):
                    self._command(words)
                else:
                    self.answer(line)
            except KVWeaveError as error:
                if isinstance(interrupt_of(error), Ended):  # what could not be taken back stays
                    raise
                n_failed += 1
                self.out.error(error)
        return n_failed

    def answer(self, line: str) -> None:
        """Print the answer to one message as it comes; Ctrl-C ends it early."""
        try:
            answer = answer_to(self.weaver, self.context, line, self.sampling, self.out.piece)
        except KeyboardInterrupt as error:
            if type(error) is not KeyboardInterrupt:  # those of it end the chat
                raise
            self.out.note("\ninterrupted: neither message nor answer is in the context")
            return
        dropped = self._shrink()
        if self.out.as_json:
            found = {"text": answer.text, "finish": answer.finish, "usage": answer.usage}
            self.out.data(found | {"dropped": [part.name for part in dropped]})
            return
        print(flush=True)
        if dropped:
            n_tokens = sum(part.n for part in dropped)
            self.out.note(f"dropped {', '.join(p.name for p in dropped)} ({n_tokens} tokens)")

    def _shrink(self) -> list[Part]:
        """Drop the oldest turns while over the limit, never the latest; return their parts."""
        context, dropped = self.context, list[Part]()
        while self.limit is not None and context.n_tokens > self.limit:
            first = context.index(context.oldest())
            starts = [i for i, p in enumerate(context.parts) if "/u-" in p.name and i > first]
            if not starts:
                break
            turn = context.parts[first : starts[0]]
            context.drop(*turn)
            dropped += turn
        return dropped

    def _command(self, words: list[str]) -> None:
        name, *rest = words
        if name not in self.commands:
            near = nearest(name, [*self.commands, "/quit"], 1)
            hint = f"did you mean {near[0]}?" if near else "/help lists the commands"
            raise InvalidArgument("command", f"there is no {name}", hint)
        self.commands[name](rest)

    def _parts(self, _: list[str]) -> None:
        parts = self.context.parts
        if self.out.as_json:
            self.out.data([{"name": p.name, "id": p.id, "n_tokens": p.n} for p in parts])
            return
        rows = [(str(i), p.name, f"#{p.id}", str(p.n)) for i, p in enumerate(parts)]
        total = ("", "total", "", str(self.context.n_tokens))
        print("\n".join(aligned([("", "part", "id", "tokens"), *rows, total], left=3)))

    def _drop(self, refs: list[str]) -> None:
        if not refs:
            raise InvalidArgument("/drop", "which part?", "/parts lists them")
        self.context.drop(*map(part_of, refs))
        self.out.note(f"dropped {', '.join(refs)}; {self.context.n_tokens} tokens are left")

    def _add(self, refs: list[str]) -> None:
        if len(refs) != 1:
            raise InvalidArgument("/add", "give one name", "`kvweave ls` lists them")
        part = self.context.append_chunk(refs[0])
        self.out.note(f"added {part.name}, {part.n} tokens")

    def _plan(self, _: list[str]) -> None:
        plan = self.context.plan
        if self.out.as_json:
            self.out.data(plan.to_dict())
        else:
            print(plan.explain())

    def _check(self, _: list[str]) -> None:
        check = self.context.check()
        if self.out.as_json:
            self.out.data(check.to_dict())
        else:
            print(check)

    def _help(self, _: list[str]) -> None:
        self.out.note(HELP)


def _lines() -> Iterator[str | bytes]:
    """Yield the lines of stdin, with a prompt and line editing on a terminal."""
    if not stdin.is_terminal():
        yield from stdin.lines()
        return
    import_module("readline")  # gives input() its history and editing
    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return


def _free_name(weaver: kvweave.Engine | kvweave.Client) -> str:
    known = [*weaver.contexts, *(entry.name for entry in weaver.files.ls("chat/**"))]
    taken = {name.split("/")[1] for name in known if name.startswith("chat/")}
    return next(f"chat/{i}" for i in range(1, len(taken) + 2) if str(i) not in taken)


def _forget(weaver: kvweave.Engine | kvweave.Client, name: str) -> None:
    for entry in weaver.files.ls(f"{name}/*"):
        if not entry.pinned:
            weaver.files.rm(entry.name, force=True)
