"""What may happen to stored chunks. Each tells whether it could happen."""

from __future__ import annotations

from oracle import MEMORY

from kvweave.errors import (
    ChunkInUse,
    ChunkNotFound,
    ChunkPinned,
    EmptyChunk,
    InvalidArgument,
    NameTaken,
)
from world.checks import require
from world.mirror import Stored
from world.models import text
from world.world import World

TIERS = (MEMORY, "disk", "disk", "disk", "none")
CODECS = (None, "raw", "int8", "int4+zstd", "int4+zstd")
LOSSY = ("int8", "int4+zstd")
MOST = 24  # names; then some have to go first


def put(world: World) -> bool:
    rng = world.rng
    name, tokens = f"d/{rng.randrange(12)}", world.some()
    replace = rng.random() < 0.5
    content: str | list[int] = text(tokens) if rng.random() < 0.3 else tokens
    world.note(f"put({name!r}, {tokens}, replace={replace})")
    if name in world.names and not replace:
        if world.names[name] != Stored(tuple(tokens), world.base):
            world.refused(NameTaken, lambda: world.engine.put(name, content))
        return True

    def call() -> object:
        return world.engine.put(name, content, replace=replace)

    if world.attempt(call, ChunkPinned, ChunkInUse) is not None:
        world.names[name] = Stored(tuple(tokens), world.base)
        stat = world.engine.files.stat(name)
        require(stat.n_tokens == len(tokens), f"{name} has {stat.n_tokens} tokens")
    return True


def put_many(world: World) -> bool:
    rng = world.rng
    free = [f"m/{i}" for i in range(8) if f"m/{i}" not in world.names]
    if len(world.names) > MOST or not free:
        return False
    items = [(name, world.some()) for name in rng.sample(free, min(len(free), rng.randint(1, 4)))]
    if rng.random() < 0.2:  # all of them or none
        world.note(f"put_many({items} and an empty one)")
        world.refused(EmptyChunk, lambda: world.engine.put_many([*items, ("m/none", [])]))
        return True
    world.note(f"put_many({items})")
    if world.attempt(lambda: world.engine.put_many(items)) is not None:
        world.names |= {name: Stored(tuple(tokens), world.base) for name, tokens in items}
    return True


def place(world: World) -> bool:
    name, rng = world.name(), world.rng
    if name is None:
        return False
    tier = rng.choice(TIERS)
    codec = rng.choice(CODECS) if tier == "disk" else None
    pattern = "**" if rng.random() < 0.3 else name
    world.note(f"place({pattern!r}, {tier!r}, codec={codec!r})")
    engine = world.engine
    if tier == "disk" and world.folder is None:
        if engine.files.stat(name).tier != "disk":
            world.refused(InvalidArgument, lambda: engine.place(name, "disk", codec=codec))
        return True
    matched = world.names if pattern == "**" else [name]
    is_pinned = any(engine.files.stat(each).pinned for each in matched)
    allowed = (ChunkPinned,) if is_pinned and tier == "none" else ()
    if codec in LOSSY:
        world.coarse |= {world.names[each] for each in matched}
    done = world.attempt(lambda: engine.place(pattern, tier, codec=codec), *allowed)
    if done is not None and pattern == name:
        found = engine.files.stat(name).tier
        require(found == tier, f"{name} was placed in {tier}, it is in {found}")
    return True


def place_base(world: World) -> bool:
    """The base that all others stand on may rest anywhere too, with loss."""
    found = [c for c in world.chats.values() if c.pieces and c.pieces[0].tokens == world.base]
    if not world.base or world.folder is None or not found:
        return False
    id, codec = found[0].context.parts[0].id, world.rng.choice(CODECS)
    world.note(f"place('#{id}', 'disk', codec={codec!r})  # the base")
    if codec in LOSSY:
        world.coarse.add(Stored(world.base, ()))
    world.attempt(lambda: world.engine.place(f"#{id}", "disk", codec=codec))
    return True


def remove(world: World) -> bool:
    name = world.name()
    if name is None:
        return False
    force = world.rng.random() < 0.7
    world.note(f"files.rm({name!r}, force={force})")
    chunk, stat = world.names[name], world.engine.files.stat(name)
    is_last = sum(other == chunk for other in world.names.values()) == 1
    done = world.attempt(lambda: world.engine.files.rm(name, force=force), ChunkPinned, ChunkInUse)
    if done is not None:
        require(not (is_last and stat.pinned), "a pinned chunk lost its last name")
        del world.names[name]
    return True


def rename(world: World) -> bool:
    name, rng = world.name(), world.rng
    if name is None or len(world.names) > MOST:
        return False
    new, keep, replace = f"r/{rng.randrange(6)}", rng.random() < 0.5, rng.random() < 0.5
    world.note(f"files.{'cp' if keep else 'mv'}({name!r}, {new!r}, replace={replace})")
    files = world.engine.files
    verb = files.cp if keep else files.mv
    if new in world.names and not replace and world.names[new] != world.names[name]:
        world.refused(NameTaken, lambda: verb(name, new))
        return True
    if world.attempt(lambda: verb(name, new, replace), ChunkPinned, ChunkInUse) is not None:
        world.names[new] = world.names[name]
        if not keep and new != name:
            del world.names[name]
    return True


def pin(world: World) -> bool:
    name = world.name()
    if name is None:
        return False
    is_on = world.rng.random() < 0.3
    world.note(f"files.{'pin' if is_on else 'unpin'}({name!r})")
    (world.engine.files.pin if is_on else world.engine.files.unpin)(name)
    return True


def denoise(world: World) -> bool:
    world.note("denoise()")
    if world.attempt(world.engine.denoise) is not None and world.budget is None:
        left = [entry.name for entry in world.engine.files.find("**", tier="none")]
        require(not left, f"no KV after denoise: {left}")
    return True


def wrong(world: World) -> bool:
    """Calls that make no sense are refused."""
    engine = world.engine
    calls: list[tuple[str, type[Exception], object]] = [
        ("put('d/none', [])", EmptyChunk, lambda: engine.put("d/none", [])),
        ("files.rm('nothing')", ChunkNotFound, lambda: engine.files.rm("nothing")),
        ("place('nothing', MEMORY)", ChunkNotFound, lambda: engine.place("nothing", MEMORY)),
        ("share=-.5", InvalidArgument, lambda: engine.context("no", share=-0.5)),
        ("share=1.5", InvalidArgument, lambda: engine.context("no", share=1.5)),
        ("prune='evictt'", InvalidArgument, lambda: engine.context("no", prune="evictt")),
        ("positions='kept'", InvalidArgument, lambda: engine.context("no", positions="kept")),
        ("repair='magic'", InvalidArgument, lambda: engine.context("no", repair="magic")),
    ]
    says, error, call = world.rng.choice(calls)
    world.note(f"{says} is refused")
    world.refused(error, call)  # type: ignore[arg-type]
    return True
