"""What may happen to contexts, without reading them. Each tells whether it could happen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kvweave import Engine, KVWeaveError
from kvweave.errors import (
    ChunkNotFound,
    ContextBusy,
    ContextTooLong,
    HoleNotFilled,
    InvalidArgument,
)
from kvweave.weave.parts import Snapshot
from world.checks import require
from world.mirror import Chat, Piece, Stored, Tokens, flat, whole
from world.models import END, LIMIT, ROLES, text
from world.rows import checksum
from world.world import RECORD, SHARES, STRATEGIES, World

MOST = 4  # contexts at once
LONG = 150  # tokens; contexts this long only get shorter
KEEPS = (
    "h2o:24,every=2", "snapkv:12,int8=0.3,window=4", "keydiff:0.3,below=rest", "ttkv:12,k4v2=rest,every=1",
    "diffkv,window=8", "flexicache:12,page=4,overlap=0,every=3", "kvzip:20", "knorm:500",
)  # fmt: skip


def _options(world: World) -> dict[str, Any]:
    rng = world.rng
    options: dict[str, Any] = {}
    if rng.random() < 0.6:
        options["repair"] = rng.choice(("full", *STRATEGIES))
    if rng.random() < 0.5:
        options["share"] = rng.choice(SHARES)
    return options


def open_context(world: World) -> bool:
    if len(world.chats) >= MOST:
        return False
    rng = world.rng
    world.n_contexts += 1
    name, options = f"c{world.n_contexts}", _options(world)
    options["prune"] = rng.choice(("forget", "forget", "evict"))
    options["positions"] = rng.choice(("compact", "compact", "compact", "keep"))
    options["denoise"] = rng.random() < 0.7
    thins = options["prune"] == "forget" and options["positions"] == "compact" and not world.lossy
    if thins := thins and rng.random() < 0.25:
        options["keep"] = rng.choice(KEEPS)
        options["repair"] = rng.choice([each for each in STRATEGIES if each not in RECORD])
    system = world.words(rng.randint(1, 5)) if rng.random() < 0.3 else None
    says = None if system is None else text(system)
    world.note(f"{name} = context({name!r}, system={says!r}, **{options})")
    context = world.attempt(lambda: world.engine.context(name, system=says, **options))
    if context is None:
        return True
    base = world.base if system is None else (ROLES["system"], *system, END)
    chat = Chat(context, [whole(base, ())] if base else [], base)
    chat.thins = thins
    chat.evicts, chat.keeps_positions = options["prune"] == "evict", options["positions"] == "keep"
    if system is not None:
        world.names[context.parts[0].name] = Stored(base, ())
    world.chats[name] = chat
    return True


def compose(world: World) -> bool:
    """A template of texts and chunks in any order; documents last too."""
    if len(world.chats) >= MOST:
        return False
    rng = world.rng
    template = ""
    holes: dict[str, Any] = {}
    pieces = [whole(world.base, ())] if world.base else []
    was_text = False
    for i in range(rng.randint(1, 5)):
        name = world.name()
        if name is None or rng.random() < 0.5:
            if not was_text:  # neighbouring texts read as one
                one, two = world.words(rng.randint(1, 8)), world.words(rng.randint(0, 3))
                template += f"{text(one)} {{t{i}}}"
                holes[f"t{i}"] = text(two)
                pieces.append(whole([*one, *two], world.base))
            was_text = True
        elif rng.random() < 0.5:
            template, was_text = template + f"{{{name}}}", False
            pieces.append(world.piece(name))
        else:
            names = [rng.choice(sorted(world.names)) for _ in range(rng.randint(1, 3))]
            template, was_text = template + f"{{docs{i}}}", False
            holes[f"docs{i}"] = names
            pieces += map(world.piece, names)
    options = _options(world)
    return _composed(world, template, holes, pieces, options)


def _composed(
    world: World, template: str, holes: Any, pieces: list[Piece], options: dict[str, Any]
) -> bool:
    world.n_contexts += 1
    name = f"c{world.n_contexts}"
    world.note(f"{name} = compose({template!r}, name={name!r}, **{holes}, **{options})")

    def call() -> Any:
        return world.engine.compose(template, holes, name=name, **options)

    if world.rng.random() < 0.1:
        bad = template + "{nothing/of/it}"
        world.refused(HoleNotFilled, lambda: world.engine.compose(bad, holes, name=name))
    if len(flat(pieces)) > LIMIT:
        world.refused(ContextTooLong, call)
        return True
    context = world.attempt(call)
    if context is not None:
        world.chats[name] = Chat(context, pieces, world.base)
    return True


def fork(world: World) -> bool:
    chat = world.idle()
    if chat is None or len(world.chats) >= MOST:
        return False
    world.n_contexts += 1
    name = f"c{world.n_contexts}"
    world.note(f"{name} = fork({chat.context.name}, {name!r})")
    context = world.attempt(lambda: world.engine.fork(chat.context, name))
    if context is None:
        return True
    twin = replace(
        chat, context=context, pieces=list(chat.pieces), saved=[], answered=None, uids={}
    )
    twin.was_woven = False
    world.chats[name] = twin
    same = checksum(world.rows_of(twin)) == checksum(world.rows_of(chat))
    require(same, "a fork has other rows")
    a, b = chat.context.preview().strategy, context.preview().strategy
    require(a == b, f"a fork repairs with {b}, what it was forked from with {a}")
    require(context.settings == chat.context.settings, "a fork has other settings")
    return True


def close(world: World) -> bool:
    """Also while an answer is under way: that is refused, or ends it."""
    if not world.chats:
        return False
    name = world.rng.choice(sorted(world.chats))
    chat = world.chats[name]
    if chat.open is not None and chat.open.chat:  # what it said gets a name, or not
        return False
    world.note(f"close_context({name!r})" + (" while it answers" if chat.open else ""))
    allowed = (KVWeaveError,) if chat.open is not None else ()

    def call() -> bool:
        world.engine.close_context(name)
        return True

    if world.attempt(call, *allowed):
        del world.chats[name]
    return True


def _edit(
    world: World, chat: Chat, says: str, call: Callable[[], object], after: list[Piece]
) -> bool:
    """Do an edit whose outcome is known; one that makes the context too long is refused."""
    world.note(f"{chat.context.name}.{says}")
    mirror = replace(chat, pieces=after)
    if mirror.end > LIMIT:
        world.refused(ContextTooLong, call)
    elif world.attempt(call) is not None:
        chat.pieces = after
    return True


def _draw(world: World, chat: Chat) -> tuple[int, Callable[..., Any], tuple[Any, ...], Piece, str]:
    """Draw something to add, and where: index, verb, arguments, the new piece."""
    rng, context = world.rng, chat.context
    name = world.name()
    at = rng.randint(chat.first, len(chat.pieces))
    if name is None or rng.random() < 0.4:
        tokens = world.some(15)
        content: Any = text(tokens) if rng.random() < 0.3 else tokens
        return at, context.insert, (content,), whole(tokens, chat.base), f"{tokens}"
    piece = world.piece(name)
    n = len(piece.tokens)
    if rng.random() < 0.3 and n > 1:
        start = rng.randrange(n)
        stop = rng.randint(start + 1, n)
        piece = replace(piece, start=start, stop=stop)
        return at, context.insert_slice, (name, start, stop), piece, f"{name!r}, {start}, {stop}"
    return at, context.insert_chunk, (name,), piece, repr(name)


def append(world: World) -> bool:
    chat = world.idle()
    return chat is not None and chat.end <= LONG and add(world, chat)


def add(world: World, chat: Chat) -> bool:
    """Append text, a chunk or a slice of one."""
    _, verb, arguments, piece, says = _draw(world, chat)
    verb = getattr(chat.context, verb.__name__.replace("insert", "append"))
    after = [*chat.pieces, piece]
    return _edit(world, chat, f"{verb.__name__}({says})", lambda: verb(*arguments), after)


def append_named(world: World) -> bool:
    """Text that is stored by a name too."""
    chat = world.idle()
    if chat is None or chat.end > LONG:
        return False
    tokens, name = world.some(15), f"n/{world.rng.randrange(1000)}"
    if name in world.names:
        return False
    piece = whole(tokens, chat.base)
    if chat.end + len(tokens) <= LIMIT:
        _edit(
            world, chat, f"append({tokens}, name={name!r})",
            lambda: chat.context.append(tokens, name=name), [*chat.pieces, piece],
        )  # fmt: skip
        if chat.pieces and chat.pieces[-1] is piece:
            world.names[name] = piece.chunk
    return True


def insert(world: World) -> bool:
    chat = world.idle()
    if chat is None or chat.end > LONG:
        return False
    at, verb, arguments, piece, says = _draw(world, chat)
    after = [*chat.pieces[:at], piece, *chat.pieces[at:]]
    if chat.keeps_positions and at < len(chat.pieces):
        world.note(f"{chat.context.name}.{verb.__name__}({at}) keeps positions")
        world.refused(InvalidArgument, lambda: verb(at, *arguments))
        return True
    says = f"{verb.__name__}({at}, {says})"
    return _edit(world, chat, says, lambda: verb(at, *arguments), after)


def _ref(world: World, chat: Chat, index: int) -> Any:
    """Draw a way to speak of a part."""
    part = chat.context.parts[index]
    names = [p.name for p in chat.context.parts]
    by_name = part.name if names.count(part.name) == 1 else part
    return world.rng.choice((index, index - len(names), part, by_name))


def replace_part(world: World) -> bool:
    chat = world.idle(filled=True)
    if chat is None:
        return False
    at, tokens = world.rng.randrange(len(chat.pieces)), world.some(15)
    is_base = at == 0 and chat.first == 1
    piece = whole(tokens, () if is_base else chat.base)
    after = [*chat.pieces[:at], piece, *chat.pieces[at + 1 :]]
    ref = _ref(world, chat, at)
    says = f"replace({at}, {tokens})"
    if chat.keeps_positions:
        world.note(f"{chat.context.name}.{says} keeps positions")
        world.refused(InvalidArgument, lambda: chat.context.replace(ref, tokens))
        return True
    _edit(world, chat, says, lambda: chat.context.replace(ref, tokens), after)
    if is_base and chat.pieces is after:
        chat.base = tuple(tokens)
    return True


def reorder(world: World) -> bool:
    chat = world.idle(filled=True)
    if chat is None or len(chat.pieces) < 2:
        return False
    order = list(range(chat.first, len(chat.pieces)))
    world.rng.shuffle(order)
    order = [*range(chat.first), *order]
    context = chat.context
    if world.rng.random() < 0.1:
        world.note(f"{context.name}.reorder({order[1:]}) is refused")
        world.refused(InvalidArgument, lambda: context.reorder(order[1:]))
        return True
    if chat.keeps_positions:
        world.note(f"{context.name}.reorder({order}) keeps positions")
        world.refused(InvalidArgument, lambda: context.reorder(order))
        return True

    def call() -> bool:
        context.reorder(order)
        return True

    return _edit(world, chat, f"reorder({order})", call, [chat.pieces[i] for i in order])


def drop(world: World) -> bool:
    chat, rng = world.idle(filled=True), world.rng
    if chat is None:
        return False
    context = chat.context
    if chat.first and len(chat.pieces) > 1 and rng.random() < 0.1:
        world.note(f"{context.name}.drop(0) would take the base")
        world.refused(InvalidArgument, lambda: context.drop(0))
        return True
    first = chat.first if len(chat.pieces) > 1 else 0
    n_most = min(2, len(chat.pieces) - first)
    gone = rng.sample(range(first, len(chat.pieces)), rng.randint(1, n_most))
    mode = rng.choice((None, "forget", "evict"))
    refs = [_ref(world, chat, i) for i in gone]
    world.note(f"{context.name}.drop({gone}, mode={mode!r})")
    if mode == "evict" and not chat.evicts:
        world.refused(InvalidArgument, lambda: context.drop(*refs, mode=mode))
        return True

    def call() -> bool:
        context.drop(*refs, mode=mode)
        return True

    if world.attempt(call):
        chat.drop(gone)
        chat.base = chat.base if chat.pieces else ()
    return True


def batch(world: World) -> bool:
    """Several edits at once: all of them, or none when one fails."""
    chat = world.idle()
    name = world.name()
    if chat is None or name is None or chat.end > LONG - 40:
        return False
    context, tokens = chat.context, world.words(5)
    if world.rng.random() < 0.4:
        world.note(f"{context.name}: append, append_chunk({name!r}), append_chunk('nothing')")

        def fails() -> None:
            with context.edit():
                context.append(tokens)
                context.append_chunk(name)
                context.append_chunk("nothing")

        world.refused(ChunkNotFound, fails)
        return True

    def call() -> bool:
        with context.edit():
            context.append_chunk(name)
            context.append(tokens)
            context.append_chunk(name)
        return True

    piece = world.piece(name)
    after = [*chat.pieces, piece, whole(tokens, chat.base), piece]
    return _edit(world, chat, f"edit: {name!r}, {tokens}, {name!r}", call, after)


def snapshot(world: World) -> bool:
    chat = world.idle()
    if chat is None:
        return False
    world.note(f"{chat.context.name}.snapshot()")
    chat.saved = [*chat.saved, (chat.context.snapshot(), list(chat.pieces), chat.base)][-2:]
    return True


def restore(world: World) -> bool:
    """Also of another context, which may keep positions, or what its parts saw, where this does not."""
    chat = world.idle()
    if chat is None:
        return False
    found = [(other, each) for other in world.chats.values() for each in other.saved]
    if world.rng.random() < 0.6:
        found = [(chat, each) for each in chat.saved]
    if not found:
        return False
    other, (saved, pieces, base) = world.rng.choice(found)
    says = f"{other.context.name}'s {len(pieces)} parts"
    bring_back(world, chat, saved, (pieces, base), says, is_own=other is chat)
    return True


def bring_back(
    world: World,
    chat: Chat,
    saved: Snapshot,
    was: tuple[list[Piece], Tokens],
    says: str,
    is_own: bool,
) -> None:
    """Restore a snapshot; those of other contexts come as if they had been appended here."""
    context, (pieces, base) = chat.context, was
    world.note(f"{context.name}.restore({says})")
    plan = context.plan if chat.was_woven else None

    def call() -> bool:
        context.restore(saved)
        return True

    allowed = () if all(_exists(world, f"#{p.id}") for p in saved.parts) else (ChunkNotFound,)
    if world.attempt(call, *allowed):
        chat.pieces, chat.base = list(pieces), base
        if not is_own and not chat.keeps_positions:
            chat.pieces = [replace(piece, position=None) for piece in pieces]
        require(
            not is_own or context.parts == saved.parts, "other parts than those of the snapshot"
        )
        require(plan is None or context.plan == plan, "another plan after restore")


def from_elsewhere(world: World) -> bool:
    """A snapshot of another engine: its ids mean other chunks here, and are refused where they do."""
    chat, rng = world.idle(), world.rng
    if chat is None:
        return False
    world.note("a snapshot of another engine is restored")
    base = rng.choice((world.base_text, world.base_text, "t9 t10"))
    texts = [world.some(8) for _ in range(rng.randint(0, 4))]
    with Engine(world.runner, base=base) as other:
        there = other.context("there")
        for tokens in texts:
            there.append(tokens)
        saved, wanted = there.snapshot(), there.tokens()
        same = not texts and base == world.base_text and world.folder is None  # ids of homes go on

        def call() -> bool:
            chat.context.restore(saved)
            return True

        if world.attempt(call, ChunkNotFound):
            require(chat.context.tokens() == wanted, "ids of another engine mean other chunks here")
            own = other.maker.bos() if base != "" else []
            first = (*own, *world.ids(base or "")) if base != "" else ()
            chat.base = first
            chat.pieces = [whole(first, ())] if first else []
            chat.pieces += [whole(tokens, first) for tokens in texts]
        else:
            require(not same, "a snapshot of chunks that are here too was refused")
    return True


def _exists(world: World, ref: str) -> bool:
    try:
        world.engine.files.stat(ref)
    except ChunkNotFound:
        return False
    return True


def while_answering(world: World) -> bool:
    """What would change a context is refused while an answer of it is under way."""
    found = [chat for chat in world.chats.values() if chat.open is not None]
    if not found:
        return False
    context = world.rng.choice(found).context
    calls: list[tuple[str, Callable[[], object]]] = [
        ("append", lambda: context.append(world.words(3))),
        ("drop", lambda: context.drop(0)),
        ("weave", lambda: context.weave()),
        ("generate", lambda: context.generate(2)),
    ]
    says, call = world.rng.choice(calls)
    world.note(f"{context.name}.{says} is refused: an answer is under way")
    world.refused(ContextBusy, call)
    return True
