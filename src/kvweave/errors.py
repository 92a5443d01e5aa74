"""Every exception kvweave raises on purpose.

::

    KVWeaveError                       .hint says what to do; .data is JSON-ready
    |-- ChunkError
    |   |-- ChunkNotFound              .name, .did_you_mean
    |   |-- NameTaken                  .name, .id
    |   |-- InvalidName                .name, .reason
    |   |-- ChunkPinned                .name, .id
    |   |-- ChunkInUse                 .name, .id, .contexts
    |   |-- EmptyChunk                 .name
    |   `-- ChunkLost                  .name
    |-- WeaveError
    |   |-- ModelMismatch              .field, .wanted, .found
    |   |-- ModelUnusable              .path, .reason
    |   |-- CannotMove                 .reason
    |   |   `-- CannotRun
    |   |-- HoleNotFilled              .hole
    |   |-- ContextTooLong             .n, .limit
    |   |-- ContextNotFound            .name, .did_you_mean
    |   |-- MemoryNotFound             .name
    |   |-- NotStored                  .what, .id
    |   |   `-- PreviousResponseNotFound
    |   |-- SummaryForgotten           .id
    |   |-- ContextBusy                .name
    |   |-- ContextChanged             .name, .wanted, .found (versions)
    |   `-- InvalidArgument            .argument, .reason
    |-- StoreError
    |   |-- OverBudget                 .needed, .budget, .evictable (bytes)
    |   |-- CorruptChunk               .path, .checksum
    |   |-- LoadFailed                 .id, .reason
    |   |-- NoSpace                    .path
    |   |-- HomeMoved                  .path
    |   `-- FormatTooNew               .path, .found, .supported
    `-- ServerError
        |-- Overloaded                 .retry_after (seconds)
        |-- OverQuota                  .what, .needed, .used, .quota
        |-- IdempotencyKeyReused       .key
        |-- Unreachable                .url, .reason
        `-- KeyRefused                 .url, .reason

Bad input is refused before any state changes: after one of these, what was there is still there.
"""

from __future__ import annotations

import difflib
import errno
import sqlite3
from collections.abc import Iterable


class KVWeaveError(Exception):
    """Base of all errors; ``hint`` is a sentence that says what to do.

    ``request_id`` names the request to a server that it came from; its log has that too.
    """

    request_id = ""

    def __init__(self, message: str, *, hint: str = "", **data: object) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.data = data

    def __getattr__(self, key: str) -> object:
        data: dict[str, object] = self.__dict__.get("data", {})
        if key in data:
            return data[key]
        raise AttributeError(key)

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message

    def to_dict(self) -> dict[str, object]:
        """Return a JSON-ready description: ``code``, ``message``, ``hint`` and the data."""
        return {
            "code": type(self).__name__,
            "message": self.message,
            "hint": self.hint,
            **{key: list(v) if isinstance(v, tuple) else v for key, v in self.data.items()},
        }


class ChunkError(KVWeaveError):
    """Something about one chunk or its name."""


class WeaveError(KVWeaveError):
    """A context or a model cannot do what was asked."""


class StoreError(KVWeaveError):
    """Bytes are missing, wrong, or too many."""


class ServerError(KVWeaveError):
    """The server cannot take the request now."""


def of_system(error: OSError, doing: str, path: object) -> StoreError:
    """Return a StoreError for what the system refused: ``doing`` what, to which file."""
    if is_full(error):
        return NoSpace(f"cannot {doing} {path}", str(path))
    hint = _HINTS.get(error.errno or 0, "look at the device, then try again; nothing was changed")
    why = error.strerror or str(error)
    return StoreError(f"cannot {doing} {path}: {why}", hint=hint, path=str(path))


def is_full(error: Exception) -> bool:
    """Tell whether a device, or the user's part of it, is full."""
    full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    code = getattr(error, "sqlite_errorcode", 0)
    ours = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE)  # no room for the -shm file
    return getattr(error, "errno", None) in full or code in ours or code & 0xFF in ours


_TOO_MANY = "too many files are open: raise the limit (`ulimit -n`), or close some"
MANY_OPEN = {errno.EMFILE: _TOO_MANY, errno.ENFILE: _TOO_MANY}
_RIGHTS = "give another path, or the right to use this one"
_HINTS = {
    **MANY_OPEN,
    errno.EACCES: _RIGHTS, errno.EPERM: _RIGHTS, errno.EROFS: _RIGHTS,
    errno.ENOENT: "give another path", errno.ENOTDIR: "give another path",
    errno.EISDIR: "give the path of a file",
    errno.ENAMETOOLONG: "give a shorter path",
    errno.ELOOP: "its links lead in a circle: mend them, or give another path",
    errno.EEXIST: "something else has that name: move it away, or give another path",
    errno.ENOLCK: "its file system keeps no locks, or too many: put it on a local disk; nothing was changed",
}  # fmt: skip


def nearest(name: str, known: Iterable[str], n: int = 3) -> tuple[str, ...]:
    """Return up to ``n`` known names that look like ``name``."""
    return tuple(difflib.get_close_matches(name, list(known), n=n, cutoff=0.6))


def check_options(options: Iterable[str], known: Iterable[str]) -> None:
    """Raise InvalidArgument for an option that is not known, with what is near."""
    known = list(known)
    for option in options:
        if option not in known:
            near = nearest(option, known)
            hint = f"known are {', '.join(known)}" if known else "it takes none"
            hint = f"did you mean {near[0]}?" if near else hint
            raise InvalidArgument(option, "no such option", hint)


class ChunkNotFound(ChunkError):
    def __init__(
        self, name: str, did_you_mean: tuple[str, ...] = (), n_parts: int | None = None
    ) -> None:
        """``n_parts``: it was looked for among the parts of a context."""
        what, hint = f"no chunk {name!r}", "`kvweave ls` lists what is there"
        if n_parts is not None:
            what = f"no part {name!r} in a context of {n_parts}"
            hint = "a part goes by its name, its chunk's #id, or its index from 0"
        if did_you_mean:
            hint = f"did you mean {' or '.join(map(repr, did_you_mean))}?"
        super().__init__(what, hint=hint, name=name, did_you_mean=did_you_mean)


class NameTaken(ChunkError):
    def __init__(self, name: str, id: int, of: str = "context") -> None:
        """``id`` 0: it is an open context's, or what ``of`` says."""
        what = f"{name!r} already names #{id}" if id else f"a {of} {name!r} is open already"
        hint = "remove it first, choose another name, or replace it where the verb can"
        hint = hint if id else "close it first, or choose another name"
        super().__init__(what, hint=hint, name=name, id=id)


class InvalidName(ChunkError):
    def __init__(self, name: str, reason: str) -> None:
        hint = "a name is a path such as docs/faq or chat/42/u-007"
        super().__init__(
            f"{name!r} is not a chunk name: {reason}", hint=hint, name=name, reason=reason
        )


class ChunkPinned(ChunkError):
    def __init__(self, name: str, id: int) -> None:
        super().__init__(f"{name!r} (#{id}) is pinned", hint="unpin it first", name=name, id=id)


class ChunkInUse(ChunkError):
    def __init__(self, name: str, id: int, contexts: tuple[str, ...]) -> None:
        contexts = tuple(dict.fromkeys(key.partition("\t")[0].split("|")[-1] for key in contexts))
        where = ", ".join(contexts)
        super().__init__(
            f"{name!r} (#{id}) is in use by {where}",
            hint="drop it from these contexts or close them first",
            name=name,
            id=id,
            contexts=contexts,
        )


class EmptyChunk(ChunkError):
    def __init__(self, name: str) -> None:
        super().__init__(f"{name!r} has no tokens", hint="give it some text", name=name)


class ChunkLost(ChunkError):
    def __init__(self, name: str) -> None:
        super().__init__(
            f"the rows of {name!r} are gone, and no tokens can compute them again",
            hint="put them again; place('disk') or pin() keeps rows that nothing else has",
            name=name,
        )


class ModelMismatch(WeaveError):
    def __init__(self, field: str, wanted: str, found: str) -> None:
        why = f"KV of another model: {field} is {found!r}, this engine has {wanted!r}"
        hint = "KV never crosses models; put the text again with this one"
        super().__init__(why, hint=hint, field=field, wanted=wanted, found=found)


class ModelUnusable(WeaveError):
    def __init__(self, path: str, reason: str, hint: str = "") -> None:
        usual = "give a directory with config.json, safetensors weights and a tokenizer, or owner/name on the hub"
        what = f"cannot load a model from {path!r}: {reason}"
        super().__init__(what, hint=hint or usual, path=path, reason=reason)


class CannotMove(WeaveError):
    _says = "this model's KV cannot be moved"
    _hint = "engine.can('move') tells which layers and why"

    def __init__(self, reason: str, hint: str = "") -> None:
        super().__init__(f"{self._says}: {reason}", hint=hint or self._hint, reason=reason)


class CannotRun(CannotMove):
    """What cannot be run cannot be moved either."""

    _says = "this model cannot be run"
    _hint = "engine.can('run') tells which layers and why; use plain transformers for it"


class HoleNotFilled(WeaveError):
    def __init__(self, hole: str) -> None:
        hint = f"pass {hole}=... or write {{{{{hole}}}}} for literal braces"
        super().__init__(f"nothing fills the hole {{{hole}}}", hint=hint, hole=hole)


class ContextTooLong(WeaveError):
    def __init__(self, n: int, limit: int) -> None:
        why = (  # agents know by the first sentence that they have to say less
            f"This model's maximum context length is {limit} tokens. However, your messages "
            f"resulted in {n} tokens."
        )
        hint = "drop some chunks, or ask for fewer new tokens"
        super().__init__(why, hint=hint, n=n, limit=limit)


class ContextNotFound(WeaveError):
    def __init__(self, name: str, did_you_mean: tuple[str, ...] = ()) -> None:
        hint = "`kvweave contexts` lists those of a server; open it first if it is new"
        if did_you_mean:
            hint = f"did you mean {' or '.join(map(repr, did_you_mean))}?"
        super().__init__(f"no context {name!r}", hint=hint, name=name, did_you_mean=did_you_mean)


class MemoryNotFound(WeaveError):
    def __init__(self, name: str) -> None:
        super().__init__(f"context {name!r} has no memory", hint="open one over it", name=name)


class NotStored(WeaveError):
    def __init__(self, what: str, id: str) -> None:
        hint = "it never was, was deleted, or is forgotten: send the items themselves"
        super().__init__(f"no {what} {id!r} is stored", hint=hint, what=what, id=id)


class SummaryForgotten(WeaveError):
    def __init__(self, id: str) -> None:
        why = f"what the summary {id!r} stands for was to be given instead of it, and is forgotten"
        hint = f"send the items themselves; POST /v1/compactions/{id}:redo has it given again"
        super().__init__(why, hint=hint, id=id)


class PreviousResponseNotFound(NotStored):
    def __init__(self, id: str) -> None:
        super().__init__("response", id)
        self.data["argument"] = "previous_response_id"


class ContextBusy(WeaveError):
    def __init__(self, name: str) -> None:
        super().__init__(
            f"an answer of {name} is under way", hint="wait for it, or cancel it first", name=name
        )


class ContextChanged(WeaveError):
    def __init__(self, name: str, wanted: int, found: int) -> None:
        hint = "somebody else edited it: read it again, then decide"
        why = f"{name} is at version {found}, not {wanted}"
        super().__init__(why, hint=hint, name=name, wanted=wanted, found=found)


class InvalidArgument(WeaveError):
    def __init__(self, argument: str, reason: str, hint: str = "") -> None:
        super().__init__(f"{argument}: {reason}", hint=hint, argument=argument, reason=reason)


class OverBudget(StoreError):
    def __init__(self, needed: int, budget: int, evictable: int) -> None:
        super().__init__(
            f"{needed:,} bytes of KV are needed, the budget is {budget:,} and "
            f"{evictable:,} of what is held can be let go",
            hint="raise budget=, close contexts, or unpin chunks",
            needed=needed,
            budget=budget,
            evictable=evictable,
        )


class CorruptChunk(StoreError):
    def __init__(self, path: str, checksum: str, hint: str = "") -> None:
        super().__init__(
            f"wrong bytes in {path}: {checksum}",
            hint=hint or "nothing of it was used; remove it and put the text again",
            path=path,
            checksum=checksum,
        )


class LoadFailed(StoreError):
    def __init__(self, id: int, reason: str) -> None:
        why = f"the KV of #{id} could not be loaded: {reason}"
        hint = "it is computed again when it is asked for"
        super().__init__(why, hint=hint, id=id, reason=reason)


class NoSpace(StoreError):
    def __init__(self, message: str, path: str) -> None:
        hint = "free some space, or raise the quota, then try again; nothing was changed"
        super().__init__(f"{message}: no space left", hint=hint, path=path)


class HomeMoved(StoreError):
    def __init__(self, path: str) -> None:
        why = f"{path} was moved, removed or replaced meanwhile"
        hint = "nothing was changed; see what is there now, then close the engine and open it again"
        super().__init__(why, hint=hint, path=path)


class FormatTooNew(StoreError):
    def __init__(self, path: str, found: int, supported: int, unknown: str = "") -> None:
        why = f"{path} has format {found}, this kvweave reads up to {supported}"
        if unknown:
            why = f"{path} has {unknown}, which this kvweave does not know"
        super().__init__(why, hint="upgrade kvweave", path=path, found=found, supported=supported)


class Overloaded(ServerError):
    def __init__(self, retry_after: float, why: str = "too many requests are waiting") -> None:
        super().__init__(why, hint=f"try again in {retry_after:g} s", retry_after=retry_after)


class OverQuota(ServerError):
    def __init__(self, what: str, needed: int, used: int, quota: int) -> None:
        super().__init__(
            f"{needed:,} {what} more than the {used:,} stored would be over the quota of {quota:,}",
            hint="remove chunks or close contexts first",
            what=what,
            needed=needed,
            used=used,
            quota=quota,
        )


class IdempotencyKeyReused(ServerError):
    def __init__(self, key: str) -> None:
        hint = "make a new key for every request that is not the same again"
        super().__init__(
            f"another request was sent with the idempotency key {key!r}", hint=hint, key=key
        )


class Unreachable(ServerError):
    def __init__(self, url: str, reason: str) -> None:
        super().__init__(
            f"no answer from {url}: {reason}",
            hint="is the server running, and the address right? `kvweave serve` starts one",
            url=url,
            reason=reason,
        )


class KeyRefused(ServerError):
    def __init__(self, url: str, reason: str) -> None:
        hint = "give one of its keys: key=, --key or KVWEAVE_KEY"
        super().__init__(f"{url} refuses the API key: {reason}", hint=hint, url=url, reason=reason)
