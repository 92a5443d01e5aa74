"""What reads a context: weaves and answers, each checked against the twin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvweave import Answer, Plan, Sampling
from kvweave.errors import ContextTooLong, InvalidArgument
from world.checks import (
    KL,
    Woven,
    adds_up,
    drift_as_claimed,
    exact_as_claimed,
    forgotten,
    generated,
    require,
    said,
)
from world.mirror import Chat, Open, whole
from world.models import END, LIMIT, ROLES, THINK, shown, text
from world.rows import checksum
from world.twin import divergence
from world.world import CALIBRATED, RECORD, SHARES, STRATEGIES, World

LONGEST = 6  # tokens of an answer


def _sampling(world: World) -> tuple[int, dict[str, Any]]:
    """Draw how to answer: the most tokens, and the rest."""
    rng = world.rng
    options: dict[str, Any] = {"ignore_eos": rng.random() < 0.7}
    if rng.random() < 0.3:
        options |= {"temperature": rng.choice((0.5, 1.0)), "seed": rng.randrange(100)}
        options |= rng.choice(({}, {"top_k": 5}, {"top_p": 0.9}))
    if rng.random() < 0.2:
        options["stop_tokens"] = tuple(world.words(3))
    return rng.randint(1, LONGEST), options


def _refused_bound(world: World, chat: Chat) -> bool:
    """Whether no bound of the drift can be kept in this context."""
    repair = chat.repair or chat.context.settings.repair
    is_auto = repair == "auto"  # another draft is another calibration
    may = world.is_calibrated and is_auto and not chat.evicts
    return world.lossy or chat.thins or not (may and chat.context.settings.share == CALIBRATED)


# ---- checks


def _loses(world: World, chat: Chat, plan: Plan) -> bool:
    """Whether rows are not what they were, or are gone."""
    return world.lossy or (chat.thins and plan.drift != 0)


def woven(world: World, chat: Chat, plan: Plan, preview: Plan | None, strategy: str) -> None:
    """Check a weave of all there is."""
    chat.was_woven = True
    adds_up(plan, chat.pieces)
    found = Woven(world.twin, chat.pieces, (), world.rows_of(chat))
    require(found.n_rows == found.n, f"{found.n_rows} rows of {found.n} tokens")
    _as_claimed(world, chat, found, (plan, preview, strategy))


def _as_claimed(
    world: World, chat: Chat, found: Woven, says: tuple[Plan, Plan | None, str]
) -> None:
    plan, preview, strategy = says
    exact_as_claimed(found, plan)
    if preview is not None:
        adds_up(preview, found.pieces)
        if not (chat.thins and found.out):  # it knows of no answer that makes rows go
            exact_as_claimed(found, preview, "the preview")
    drift_as_claimed(found, plan, world.lossy)
    if _loses(world, chat, plan):
        return
    if strategy == "full":
        error = found.error(0, min(found.n_rows, len(found.tokens)))
        require(error <= 1e-8, f"with full repair rows are {error:.1e} off\n{plan.explain()}")
        require(found.kl <= KL, f"with full repair the drift is {found.kl:.1e}")
    if not chat.evicts:
        forgotten(found, plan, [(), world.base, chat.base], world.coarse)


def answered(world: World, chat: Chat, open: Open, answer: Answer) -> None:
    """Check an answer over ``open.pieces``, and take what stays of it into the mirror."""
    chat.open = None
    world.touch(chat)
    plan, out = answer.plan, list(answer.tokens)
    kept = out[:-1] if answer.finish == "stop" else out
    cancelled = answer.finish == "cancelled"
    require(answer.finish in ("stop", "length", "cancelled"), f"it finished by {answer.finish!r}")
    require(bool(out) or cancelled, "an answer without a token")
    require(len(out) <= open.n_most, f"{len(out)} tokens, {open.n_most} were asked for")
    require(cancelled or answer.finish == "stop" or len(out) == open.n_most, "it ended too soon")
    _take(world, chat, open, kept, nothing=cancelled and not out)
    require(chat.context.tokens() == chat.tokens, f"tokens after an answer of {kept}")
    if not out:
        return
    chat.was_woven = True
    parts = chat.context.parts
    adds_up(plan, open.pieces)
    require(str(answer) == shown(kept), f"text {answer.text!r} of tokens {kept}")
    require(answer.usage["completion_tokens"] == len(out), "usage")
    require([c.token for c in answer.choices] == out, "choices")
    found = Woven(world.twin, open.pieces, out, world.rows_of(chat))
    if kept or open.chat:
        chat.answered = parts, found.n - 1, max(1, len(kept))
    require(found.n_rows >= found.n, f"{found.n_rows} rows, the prompt has {found.n} tokens")
    _as_claimed(world, chat, found, (plan, open.preview, open.strategy))
    if _loses(world, chat, plan):
        return
    logprobs, greedy = [c.logprob for c in answer.choices], open.is_greedy
    said(found, logprobs, greedy)
    generated(found)
    if plan.drift == 0 or open.strategy == "full":
        said(found, logprobs, greedy, found.right)


def _take(world: World, chat: Chat, open: Open, kept: Sequence[int], nothing: bool) -> None:
    """Add what stays of an answer to the mirror: in a chat with its header and closing text."""
    chat.pieces = list(open.before)
    if nothing or not (kept or open.chat):
        return
    if not open.chat:
        chat.pieces.append(whole(kept, chat.base))
        return
    all = [ROLES["assistant"], *kept, END]
    cut = all.index(THINK) + 1 if THINK in kept and kept.index(THINK) < len(kept) - 1 else 0
    new = [whole(piece, chat.base) for piece in (all[:cut], all[cut:]) if piece]
    chat.pieces += new
    for part, piece in zip(chat.context.parts[-len(new) :], new, strict=True):
        world.names[part.name] = piece.chunk


# ---- verbs


def weave(world: World) -> bool:
    chat, rng = world.idle(filled=True), world.rng
    if chat is None:
        return False
    context = chat.context
    options: dict[str, Any] = {}
    if rng.random() < 0.5:
        options["repair"] = rng.choice(("full", "none", *chat.may(STRATEGIES, RECORD)))
    if rng.random() < 0.3:
        options["share"] = rng.choice(SHARES)
    if rng.random() < 0.15:
        options["max_drift"] = rng.choice((0.1, 700.0, 2000.0))
    before = checksum(world.rows_of(chat))
    preview = None if options else context.preview()
    require(checksum(world.rows_of(chat)) == before, "a preview changed rows")
    world.note(f"{context.name}.weave({options})")
    allowed = []
    if "max_drift" in options:
        allowed = [InvalidArgument]
    plan = world.attempt(lambda: context.weave(**options), *allowed)
    if plan is None:
        return True
    chat.repair = options.get("repair", chat.repair)  # stays
    world.touch(chat)
    world.drive()
    woven(world, chat, plan, preview, plan.strategy)
    if "max_drift" in options:
        wide = plan.drift is not None and plan.drift <= options["max_drift"]
        require(wide, f"drift {plan.drift} is over {options['max_drift']}")
    return True


def preview(world: World) -> bool:
    chat = world.idle(filled=True)
    if chat is None:
        return False
    world.note(f"{chat.context.name}.preview()")
    adds_up(chat.context.preview(), chat.pieces)
    return True


def check(world: World) -> bool:
    """It weaves what has to be, and says how far that is from a full prefill."""
    chat = world.idle(filled=True)
    if chat is None:
        return False
    context = chat.context
    world.note(f"{context.name}.check()")
    found = world.attempt(context.check)
    if found is None:
        return True
    world.touch(chat)
    world.drive()
    strategy, rows = context.preview().strategy, world.rows_of(chat)
    n = len(chat.tokens)
    require(found.n_tokens == n, f"{found.n_tokens} of {n} tokens were checked")
    require(len(rows[0][0]) >= n, f"{len(rows[0][0])} rows of {n} tokens were checked")
    if world.lossy or chat.thins:
        return True
    spans = [(n - 1, 1)]  # rows that were placed anew are not those that the answer saw
    if chat.answered is not None and chat.answered[0] == context.parts:
        spans.append(chat.answered[1:])
    twin, says = Woven(world.twin, chat.pieces, (), rows), []
    for start, count in spans:
        kl = float(divergence(twin.right, twin.over(start), start)[:count].mean())
        same = found.n_compared == count and abs(found.kl - kl) <= KL + 1e-6 * kl
        says += [] if same else [f"it is {kl:.3e} of {count} rows from {start} on"]
    told = f"check says {found.kl:.3e} of {found.n_compared} rows, {', '.join(says)}"
    require(len(says) < len(spans), told)
    if strategy == "full":
        error = twin.error(0, n)
        require(error <= 1e-8, f"checked with full repair, but rows are {error:.1e} off")
    plan = world.attempt(context.weave)
    if plan is not None:
        chat.was_woven = True
        same = checksum(world.rows_of(chat)) == checksum([(k[:n], v[:n]) for k, v in rows])
        require(same, "check did not weave all of it")
    return True


def _asked(
    world: World, chat: Chat, question: list[int] | None, options: dict[str, Any], n_most: int
) -> Open:
    """What an answer will be over; ``question`` is said first."""
    before = list(chat.pieces)
    if question is not None:
        before.append(whole([ROLES["user"], *question, END], chat.base))
    pieces = before
    if question is not None:
        pieces = [*before, whole([ROLES["assistant"]], chat.base)]
    strategy = chat.context.preview().strategy
    greedy = options.get("temperature", 0) == 0
    return Open(None, pieces, before, strategy, question is not None, n_most, greedy)


def generate(world: World) -> bool:
    return _answer(world, None)


def ask(world: World) -> bool:
    return _answer(world, world.words(world.rng.randint(1, 8)))


def _answer(world: World, question: list[int] | None) -> bool:
    chat, rng = world.idle(filled=question is None), world.rng
    if chat is None or (chat.end > LIMIT - 20 and rng.random() < 0.8):
        return False
    context = chat.context
    n_most, options = _sampling(world)
    open = _asked(world, chat, question, options, n_most)
    allowed = []
    if rng.random() < 0.1:
        options["max_drift"] = rng.choice((0.1, 700.0))
        allowed = [InvalidArgument] if _refused_bound(world, chat) else []
    if question is None and not options.get("max_drift"):
        open.preview = context.preview()
    verb = "generate" if question is None else "ask"
    said = "" if question is None else f"{text(question)!r}, "
    world.note(f"{context.name}.{verb}({said}{n_most}, **{options})")
    # a question's answer is closed by one token
    n_last = Chat(context, open.pieces, ()).end + n_most + (question is not None)
    if n_last > LIMIT:
        allowed = [*allowed, ContextTooLong]
    answer = world.attempt(
        lambda: (
            context.generate(n_most, **options)
            if question is None
            else context.ask(text(question), n_most, **options)
        ),
        *allowed,
    )
    if answer is not None:
        require(n_last <= LIMIT, f"an answer up to position {n_last}")
        require(not (options.get("max_drift") and allowed), "a bound that nothing keeps")
        _named_question(world, chat, open)
        world.drive()
        answered(world, chat, open, answer)
    return True


def _named_question(world: World, chat: Chat, open: Open) -> None:
    if open.chat:
        part = chat.context.parts[len(open.before) - 1]
        world.names[part.name] = open.before[-1].chunk


def generate_many(world: World) -> bool:
    found = [c for c in world.chats.values() if c.open is None and c.pieces]
    if len(found) < 2:
        return False
    chats = world.rng.sample(found, world.rng.randint(2, len(found)))
    n_most, options = _sampling(world)
    names = ", ".join(chat.context.name for chat in chats)
    world.touch(*chats)  # those begun before one is refused are woven again
    if world.rng.random() < 0.1:
        world.note(f"generate_many([{names} and one twice]) is refused")
        contexts = [*(chat.context for chat in chats), chats[0].context]
        many = world.attempt(
            lambda: world.engine.generate_many(contexts, n_most), InvalidArgument, ContextTooLong
        )
        require(many is None, "one context answers twice at once")
        return True
    opens = [_asked(world, chat, None, options, n_most) for chat in chats]
    world.note(f"generate_many([{names}], {n_most}, **{options})")
    allowed = [ContextTooLong] if max(c.end for c in chats) + n_most > LIMIT else []
    answers = world.attempt(
        lambda: world.engine.generate_many([c.context for c in chats], n_most, **options), *allowed
    )
    if answers is not None:
        world.drive()
        for chat, open, answer in zip(chats, opens, answers, strict=True):
            answered(world, chat, open, answer)
    return True


def begin(world: World) -> bool:
    """An answer that goes on while other things happen."""
    chat = world.idle(filled=True)
    if chat is None or chat.end > LIMIT - LONGEST - 4:
        return False
    n_most, options = _sampling(world)
    is_chat = world.rng.random() < 0.3
    open = _asked(world, chat, None, options, n_most)
    if is_chat:
        open.chat, open.pieces = True, [*open.before, whole([ROLES["assistant"]], chat.base)]
    world.note(f"{chat.context.name}.begin({n_most}, **{options}, chat={is_chat})")
    sampling = Sampling(max_tokens=n_most, **options)
    turn = world.attempt(lambda: chat.context.begin(sampling, chat=is_chat))
    if turn is not None:
        open.turn, chat.open = turn, open
        world.touch(chat)
    return True


def drive(world: World) -> bool:
    if not any(chat.open for chat in world.chats.values()) and not world.tasks:
        return False
    n = world.rng.randint(1, 8)
    world.note(f"loop.step() x {n}")
    world.drive()
    for _ in range(n):
        world.engine.loop.step()
        world.tasks.go_on()
    return True


def finish(world: World) -> bool:
    return _end(world, cancel=False)


def cancel(world: World) -> bool:
    return _end(world, cancel=True)


def abandon(world: World) -> bool:
    """End an answer as if it had never been asked for."""
    found = [chat for chat in world.chats.values() if chat.open is not None]
    if not found:
        return False
    chat = world.rng.choice(found)
    assert chat.open is not None and chat.open.turn is not None
    world.note(f"{chat.context.name}: abandon the answer under way")
    world.touch(chat)
    chat.open.turn.abandon()
    chat.pieces, chat.open = list(chat.open.before), None
    return True


def finish_all(world: World) -> None:
    """Cancel all answers under way."""
    while _end(world, cancel=True):
        pass


def _end(world: World, cancel: bool) -> bool:
    found = [chat for chat in world.chats.values() if chat.open is not None]
    if not found:
        return False
    chat = world.rng.choice(found)
    assert chat.open is not None
    turn, open = chat.open.turn, chat.open
    assert turn is not None
    world.note(f"{chat.context.name}: {'cancel' if cancel else 'run'} the answer under way")
    world.drive()
    answer = world.tried(turn.cancel if cancel else turn.run)[0]
    if answer is None:  # the context is as it was before it
        chat.open, chat.pieces = None, list(open.before)
        return True
    answered(world, chat, open, answer)
    return True


def stream(world: World) -> bool:
    """Read piece by piece; sometimes not to the end."""
    chat, rng = world.idle(filled=True), world.rng
    if chat is None or chat.end > LIMIT - LONGEST:
        return False
    context = chat.context
    n_most, options = _sampling(world)
    n_read = rng.choice((0, 1, 2, 99))
    open = _asked(world, chat, None, options, n_most)
    world.note(f"{context.name}.stream({n_most}, **{options}), {n_read} pieces of it")
    world.drive()
    pieces: list[str] = []

    def call() -> bool:
        stream = context.stream(n_most, **options)
        for piece in stream:
            pieces.append(piece)
            if len(pieces) >= n_read:
                break
        stream.close()
        return True

    def not_begun() -> bool:
        context.stream(n_most, **options).close()
        return True

    world.touch(chat)
    if world.attempt(call if n_read else not_begun):
        _streamed(world, chat, open, pieces, n_read == 99)
    return True


def _streamed(world: World, chat: Chat, open: Open, pieces: list[str], whole_: bool) -> None:
    context = chat.context
    tokens = context.tokens()
    n = len(chat.tokens)
    require(tokens[:n] == chat.tokens, "a stream changed what was there")
    kept = tokens[n:]
    require(len(kept) <= open.n_most, f"{len(kept)} tokens were streamed")
    if whole_:
        require("".join(pieces) == shown(kept), f"{pieces} of {kept}")
    _take(world, chat, open, kept, nothing=not kept)
    if not kept:
        return
    chat.was_woven, chat.answered = True, (context.parts, n - 1, len(kept))
    found = Woven(world.twin, open.pieces, kept, world.rows_of(chat))
    adds_up(context.plan, open.pieces)
    _as_claimed(world, chat, found, (context.plan, None, open.strategy))
    if not _loses(world, chat, context.plan):
        said(found, None, open.is_greedy)
        generated(found)
