"""The memory tool of agents (``memory_20250818``) over the items of a memory.

A file is an item: ``/memories/notes/plan.md`` is the chunk ``memory/files/notes/plan.md``. What goes
wrong is told to the model in a sentence that says what to do instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

from kvweave.chunk.identity import check_name
from kvweave.errors import InvalidArgument, InvalidName, KVWeaveError
from kvweave.memory.scheduler import Memory
from kvweave.memory.told import ToolReply

ROOT = "/memories"
MOST_LISTED = 200  # lines of a directory
LEVELS = 2  # of directories that are shown


class MemoryTool:
    """Answers the calls of one agent; ``below`` is the directory of its files among the items."""

    def __init__(self, memory: Memory, below: str = "files") -> None:
        self.memory, self.below = memory, below
        self._commands: dict[str, Callable[[Mapping[str, Any]], str]] = {
            "view": self._view,
            "create": self._create,
            "str_replace": self._str_replace,
            "insert": self._insert,
            "delete": self._delete,
            "rename": self._rename,
        }

    def __call__(self, call: Mapping[str, Any]) -> ToolReply:
        """Do what the input of a ``tool_use`` block asks for; nothing is changed by what fails."""
        try:
            if not isinstance(call, Mapping):
                raise InvalidArgument("call", "it is no object", "name a command in it")
            command = self._commands.get(str(call.get("command")))
            if command is None:
                known = ", ".join(self._commands)
                raise InvalidArgument("command", f"{call.get('command')!r} is none of {known}")
            return ToolReply(command(call))
        except KVWeaveError as error:
            return ToolReply(f"Error: {error}", is_error=True)

    # ---- commands

    def _view(self, call: Mapping[str, Any]) -> str:
        path = _path(call, "path")
        if self._is_file(path):
            return self._numbered(path, call.get("view_range"))
        files = self._files(path)
        if path and not files:
            raise self._missing(path)
        shown: dict[str, int] = {}
        for file in files:
            parts = file[len(path) :].strip("/").split("/")
            for depth in range(1, min(LEVELS, len(parts)) + 1):
                end = "/" if depth < len(parts) else ""
                key = "/".join(parts[:depth]) + end
                shown[key] = shown.get(key, 0) + len(self._text(file))
        lines = [f"{n:>8}  {_shown(path)}/{key}" for key, n in sorted(shown.items())]
        more = [f"... and {len(lines) - MOST_LISTED} more"] if len(lines) > MOST_LISTED else []
        head = f"{len(files)} files in {_shown(path)}, with characters:"
        return "\n".join([head, *lines[:MOST_LISTED], *more])

    def _create(self, call: Mapping[str, Any]) -> str:
        path, text = _path(call, "path", file=True), _string(call, "file_text")
        if self._is_file(path):
            reason = f"{_shown(path)} is there already"
            raise InvalidArgument("path", reason, "change it with str_replace, or delete it first")
        self._require_room(path)
        self.memory.write(self._name(path), text, replace=False)
        return f"Created {_shown(path)} ({len(text)} characters)."

    def _str_replace(self, call: Mapping[str, Any]) -> str:
        path, text = self._open(call)
        old, new = _string(call, "old_str"), _string(call, "new_str", "")
        if not old:
            raise InvalidArgument("old_str", "it is empty", "use insert to add text")
        n = text.count(old)
        if n == 0:
            near = get_close_matches(old.splitlines()[0], text.splitlines(), 1, 0.5)
            hint = f"the nearest line is {near[0]!r}" if near else "view the file first"
            raise InvalidArgument("old_str", f"it does not occur in {_shown(path)}", hint)
        if n > 1:
            lines = ", ".join(map(str, _lines_with(text, old)))
            reason = f"it occurs {n} times in {_shown(path)}, in lines {lines}"
            raise InvalidArgument("old_str", reason, "give more of the text around it")
        self.memory.write(self._name(path), text.replace(old, new))
        line = text[: text.index(old)].count("\n") + 1
        return f"Changed {_shown(path)} in line {line}."

    def _insert(self, call: Mapping[str, Any]) -> str:
        path, text = self._open(call)
        lines, at = text.splitlines(keepends=True), call.get("insert_line")
        if not isinstance(at, int) or isinstance(at, bool) or not 0 <= at <= len(lines):
            reason = f"{at!r} is not in 0..{len(lines)}, the lines of {_shown(path)}"
            raise InvalidArgument("insert_line", reason, "0 is in front of the first line")
        added = _string(call, "insert_text")
        if at < len(lines) and not added.endswith("\n"):
            added += "\n"
        if at and not lines[at - 1].endswith("\n"):
            lines[at - 1] += "\n"
        self.memory.write(self._name(path), "".join([*lines[:at], added, *lines[at:]]))
        return f"Inserted behind line {at} of {_shown(path)}."

    def _delete(self, call: Mapping[str, Any]) -> str:
        path = _path(call, "path", file=True)
        if self._is_file(path):
            self.memory.delete(self._name(path))
            return f"Deleted {_shown(path)}."
        files = self._files(path)
        if not files:
            raise self._missing(path)
        self.memory.delete(self._name(path) + "/**")
        return f"Deleted {_shown(path)} with {len(files)} files."

    def _rename(self, call: Mapping[str, Any]) -> str:
        old, new = _path(call, "old_path", file=True), _path(call, "new_path", file=True)
        is_file = self._is_file(old)
        if not is_file and not self._files(old):
            raise self._missing(old)
        if self._is_file(new) or self._files(new):
            reason = f"{_shown(new)} is there already"
            raise InvalidArgument("new_path", reason, "choose another, or delete it first")
        if f"{new}/".startswith(f"{old}/"):
            raise InvalidArgument("new_path", f"it is inside {_shown(old)}", "choose another")
        self._require_room(new)
        end = "" if is_file else "/"
        self.memory.rename(self._name(old) + end, self._name(new) + end)
        return f"Renamed {_shown(old)} to {_shown(new)}."

    # ---- files

    def _name(self, path: str) -> str:
        name = f"{self.below}/{path}" if path else self.below
        try:
            check_name(self.memory.items_below.full(name))
        except InvalidName as error:
            hint = "use letters, digits, spaces and ._@+:=~- in names"
            raise InvalidArgument("path", str(error.reason), hint) from None
        return name

    def _is_file(self, path: str) -> bool:
        items = self.memory.items_below
        return bool(path) and items.find(items.full(self._name(path))) is not None

    def _files(self, path: str) -> list[str]:
        """Return the paths of all files below a directory, without the leading slash."""
        items = self.memory.items_below
        start = items.full(self.below) + "/"
        inside = items.full(self._name(path)) + "/"
        names = items.table.names(items.namespace, inside)
        return [name[len(start) :] for name in names]

    def _text(self, path: str) -> str:
        return self.memory.read(self._name(path))

    def _open(self, call: Mapping[str, Any]) -> tuple[str, str]:
        path = _path(call, "path", file=True)
        if not self._is_file(path):
            raise self._missing(path)
        return path, self._text(path)

    def _require_room(self, path: str) -> None:
        """Refuse a file where a directory is, and one below a file."""
        if self._files(path):
            raise InvalidArgument("path", f"{_shown(path)} is a directory", "name a file in it")
        parts = path.split("/")
        for i in range(1, len(parts)):
            above = "/".join(parts[:i])
            if self._is_file(above):
                raise InvalidArgument("path", f"{_shown(above)} is a file", "choose another name")

    def _missing(self, path: str) -> InvalidArgument:
        near = get_close_matches(path, self._files(""), 1)
        hint = f"did you mean {_shown(near[0])}?" if near else f"view {ROOT} lists what there is"
        return InvalidArgument("path", f"there is no {_shown(path)}", hint)

    def _numbered(self, path: str, wanted: Any) -> str:
        lines = self._text(path).split("\n")
        first, last = 1, len(lines)
        if wanted is not None:
            try:
                first, last = (int(n) for n in wanted)
            except (TypeError, ValueError):
                raise InvalidArgument("view_range", f"{wanted!r} is no [first, last]") from None
            last = len(lines) if last == -1 else last
            if not 1 <= first <= last <= len(lines):
                reason = f"{wanted!r} is not within the {len(lines)} lines of {_shown(path)}"
                raise InvalidArgument("view_range", reason, "-1 is the last line")
        shown = enumerate(lines[first - 1 : last], first)
        return "\n".join([f"{_shown(path)}:", *(f"{i:>6}\t{line}" for i, line in shown)])


def _path(call: Mapping[str, Any], key: str, *, file: bool = False) -> str:
    """Return a path below ROOT without leading slash, "" for ROOT itself. Raises InvalidArgument."""
    given = _string(call, key)
    if given != ROOT and not given.startswith(ROOT + "/"):
        raise InvalidArgument(key, f"{given!r} is not below {ROOT}", f"begin it with {ROOT}/")
    path = given[len(ROOT) :].removeprefix("/").removesuffix("/")
    if any(part in ("", ".", "..") for part in path.split("/")) and path:
        raise InvalidArgument(key, f"{given!r} has an empty part, '.' or '..'", "write it out")
    if file and not path:
        raise InvalidArgument(key, f"{ROOT} itself cannot be changed", "name a file in it")
    return path


def _string(call: Mapping[str, Any], key: str, default: str | None = None) -> str:
    value = call.get(key, default)
    if not isinstance(value, str):
        raise InvalidArgument(key, f"{value!r} is no text", f"{call.get('command')} needs {key}")
    return value


def _shown(path: str) -> str:
    return f"{ROOT}/{path}" if path else ROOT


def _lines_with(text: str, part: str) -> list[int]:
    """Return the numbers of the lines in which ``part`` begins."""
    found, at = [], text.find(part)
    while at >= 0:
        found.append(text.count("\n", 0, at) + 1)
        at = text.find(part, at + len(part))
    return found
