"""Claims about contexts whose rows a token policy lets go of.

`Twin` is driven by hand, one token at a time; here it chooses by sorting in numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
import oracle
import pytest
import torch
from run.backend import MODELS, ids, transformers
from weave.twins import EVERY, N_NEW, Twin

from kvweave import Engine, Runner
from kvweave.errors import ContextTooLong, InvalidArgument
from kvweave.keep.tokens import POLICIES
from kvweave.keep.tokens.spec import Keep
from kvweave.run.base import Ints
from kvweave.weave.answer import request_from
from kvweave.weave.calibration import Calibration, Curve


def streaming(target: int) -> Callable[[Twin], None]:
    def choose(twin: Twin) -> None:
        n = twin.rows.n
        if n > target:
            kept = np.r_[0:4, n - target + 4 : n]
            twin.rows.move(kept, np.arange(target))

    return choose


def keep_best(twin: Twin, worth: list[torch.Tensor], target: int, safe: Ints) -> None:
    """Let each head keep the ``target`` rows of most ``worth`` [kv head, slot]; ``safe`` slots stay."""
    rows = twin.rows
    for layer, scores in enumerate(worth):
        for head, kept in enumerate(rows.kept(layer)):
            if len(kept) > target:
                each = np.where(np.isin(kept, safe), np.inf, scores[head].numpy()[kept])
                order = sorted(range(len(kept)), key=lambda i: (-each[i], -kept[i]))
                rows.free(layer, head, np.delete(kept, order[:target]))


def heaviest(target: int, sinks: int, newest: int) -> Callable[[Twin], None]:
    def choose(twin: Twin) -> None:
        n = twin.rows.n
        keep_best(twin, twin.total, target, np.r_[0:sinks, n - newest : n])

    return choose


def said_again(target: int, sinks: int) -> Callable[[Twin], None]:
    """What was said since the last choice is read again, and rows get the most that is paid."""
    most: list[torch.Tensor] = []

    def choose(twin: Twin) -> None:
        start, n = most[0].shape[1] if most else 0, twin.rows.n
        if n <= target:
            return
        for layer, weights in enumerate(twin.read_again(start)):
            part = weights[..., start:n]
            whole = part.sum(-1) + weights[..., n:].sum(-1)
            whole += weights[..., : min(sinks, start)].sum(-1)
            new = (part / whole[..., None]).amax((1, 2))
            old = most[layer] if start else new[:, :0]
            most[layer : layer + 1] = [torch.cat([old, new], 1)]
        keep_best(twin, most, target, np.arange(sinks))

    return choose


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine(transformers("llama"), base="") as made:
        yield made


@pytest.fixture
def of_few_positions() -> Iterator[Engine]:
    """One whose end is soon reached."""
    with Engine(Runner(oracle.build(*MODELS["llama"]), max_positions=250), base="") as made:
        yield made


def answered(engine: Engine, keep: str | None, prompt: Ints, **more: object) -> tuple[int, ...]:
    context = engine.context("c", keep=keep)
    context.append(prompt.tolist())
    answer = context.generate(max_tokens=N_NEW, ignore_eos=True, **more)
    engine.check_integrity()
    return answer.tokens


@pytest.mark.parametrize("spec", ["ttkv:16", "h2o:16,int8=rest", "keydiff:16,int4=rest,heads=ada"])
def test_nothing_goes_and_nothing_is_exact(engine: Engine, spec: str) -> None:
    """Rows that rest in fewer bits are approximate, and named so: before, after, in the next turn."""
    context = engine.context("c", keep=f"{spec},every={EVERY}")
    context.append(ids(80, 6).tolist())
    form = "int4" if "int4" in spec else "int8"
    before = context.preview()
    assert before.drift is None and before.approximate == {f"rows:{form}": 80}
    answer = context.generate(max_tokens=20, ignore_eos=True)
    assert answer.plan.drift is None and answer.plan.approximate == {f"rows:{form}": 80}
    state = context.session.state
    assert state.rows.n_freed == 0 and set(state.rows.forms) == {form}
    assert not any(p.exact for p in state.woven)
    assert "let go" not in str(context.plan.shed) and f"rest as {form}" in context.plan.explain()
    context.append(ids(5, 7).tolist())
    context.generate(max_tokens=3)
    assert context.plan.drift is None and not any(span.exact for span in context.plan.spans)
    whole = engine.context("d")
    whole.append(ids(80, 6).tolist())
    whole.generate(max_tokens=20, ignore_eos=True)
    assert whole.plan.drift == 0
    assert state.rows.n_bytes < 0.55 * whole.session.state.rows.n_bytes
    with pytest.raises(InvalidArgument, match="max_drift"):
        context.generate(max_tokens=3, max_drift=0.5)


def test_streaming_is_sinks_and_window_at_positions_within(engine: Engine) -> None:
    """As decoded by hand: rows leave, the others close up and their keys are turned anew."""
    prompt = ids(60, 3)
    wanted = Twin("llama", True).reply(prompt, streaming(24))
    assert answered(engine, f"streaming:24,every={EVERY}", prompt) == tuple(wanted)
    assert tuple(wanted) != tuple(Twin("llama", True).reply(prompt, streaming(10**6)))


def test_rows_worth_less_rest_in_fewer_bits(engine: Engine) -> None:
    """As decoded by hand, over rows that are rounded one by one."""
    prompt = ids(60, 4)

    def choose(twin: Twin) -> None:
        rows, worth = twin.rows, [t.numpy() for t in twin.total]
        for layer, total in enumerate(worth):
            own, coded = rows.kept(layer), {"int8": [], "k4v2": []}
            for head, kept in enumerate(own):
                score = total[head][kept].copy()
                score[(kept < 4) | (kept >= rows.n - 8)] = np.inf
                order = sorted(range(len(kept)), key=lambda i: (-score[i], -kept[i]))
                coded["int8"].append(np.sort(kept[order[20:30]]))
                coded["k4v2"].append(np.sort(kept[order[30:45]]))
                own[head] = np.sort(kept[order[:45]])
            rows.keep(layer, own)
            for form, slots in coded.items():
                rows.code(layer, form, slots)

    twin = Twin("llama", False)
    wanted = twin.reply(prompt, choose)
    spec = f"h2o:20,int8=10,k4v2=15,window=8,every={EVERY}"
    assert answered(engine, spec, prompt) == tuple(wanted)
    context = engine.get_context("c")
    forms, rows = context.session.state.rows.forms, context.session.state.rows
    assert forms.keys() == {"int8", "k4v2"} and rows.n_freed > 0
    assert context.plan.shed is not None and context.plan.shed.coded == forms
    names = context.plan.approximate
    assert names["rows:int8"] == names["rows:k4v2"] == names["freed"] == len(prompt)
    assert not any(
        "k4v2" in name for name in answered_names(engine, f"h2o:20,window=8,every={EVERY}")
    )


def answered_names(engine: Engine, keep: str) -> list[str]:
    engine.close_context("c")
    answered(engine, keep, ids(60, 4))
    return list(engine.get_context("c").plan.approximate)


def test_h2o_frees_what_got_least_attention(engine: Engine) -> None:
    prompt = ids(60, 4)
    wanted = Twin("llama", False).reply(prompt, heaviest(30, 4, 8))
    spec = f"h2o:30,window=8,every={EVERY}"
    assert answered(engine, spec, prompt) == tuple(wanted)
    assert tuple(wanted) != tuple(Twin("llama", False).reply(prompt, heaviest(10**6, 4, 8)))


@pytest.mark.parametrize("n_prompt", [60, 20])
def test_kvzip_reads_what_is_decoded_again(engine: Engine, n_prompt: int) -> None:
    """At each choice what came since the last; all at the first, where the prompt fitted."""
    prompt = ids(n_prompt, 4)
    wanted = Twin("llama", False).reply(prompt, said_again(30, 4))
    assert answered(engine, f"kvzip:30,every={EVERY}", prompt) == tuple(wanted)
    assert tuple(wanted) != tuple(Twin("llama", False).reply(prompt, said_again(10**6, 4)))


@pytest.mark.parametrize("name", [name for name in POLICIES if not POLICIES[name].splits])
@pytest.mark.sampled
def test_a_budget_that_fits_changes_nothing(engine: Engine, name: str) -> None:
    """All rows stay: the answer is exact, and says so."""
    prompt = ids(40, 5)
    wanted = answered(engine, None, prompt)
    engine.close_context("c")
    assert answered(engine, f"{name}:500,every={EVERY}", prompt) == wanted
    plan = engine.get_context("c").plan
    assert plan.drift == 0 and plan.shed is None and not plan.approximate


@pytest.mark.parametrize(
    "name", [n for n, kind in POLICIES.items() if n != "full" and not kind.more]
)
@pytest.mark.sampled
def test_rows_that_go_are_counted_and_their_memory_is_free(engine: Engine, name: str) -> None:
    prompt, keep = ids(120, 6), Keep.parse(f"{name}:24,every={EVERY}")
    answered(engine, keep.text, prompt)
    context = engine.get_context("c")
    state, plan = context.session.state, context.plan
    assert plan.drift is None and plan.shed is not None
    assert plan.approximate["freed"] == len(prompt) == plan.n_tokens
    assert keep.text in plan.explain()
    most = (24 + EVERY + 2) * engine.runner.row_bytes * (1.5 if keep.policy.moves else 1)
    assert state.rows.n_bytes <= most * 1.1
    assert dict(engine.shelf.charged())[state.name] == state.n_bytes
    for layer in range(len(engine.runner.layers)):
        assert max(len(kept) for kept in state.rows.kept(layer)) <= 24 + EVERY


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.sampled
def test_a_conversation_goes_on(engine: Engine, name: str) -> None:
    """Turn after turn, edits between, a fork: rows, parts and index agree; a fork answers the same."""
    context = engine.context("c", keep=f"{name}:30,every={EVERY}")
    for turn in range(3):
        context.append(ids(20, turn).tolist())
        context.generate(max_tokens=12, ignore_eos=True)
        engine.check_integrity()
    twin = engine.fork(context, "d")
    for each in (context, twin):
        each.append(ids(9, 9).tolist())
    a, b = (each.generate(max_tokens=12, ignore_eos=True) for each in (context, twin))
    assert a.tokens == b.tokens
    context.drop(0)
    context.append(ids(5, 8).tolist())
    context.generate(max_tokens=5)
    engine.check_integrity()
    again = context.weave("full")
    assert len(again.spans) == len(context.parts)


def test_a_policy_that_saw_nothing_says_so(engine: Engine) -> None:
    """Rows of reused chunks are not computed: nobody's attention is seen where nothing else is."""
    engine.put("a", ids(90, 1).tolist())
    context = engine.context("c", keep="snapkv:0.3", repair="none")
    context.append_chunk("a")
    plan = context.weave()
    assert plan.shed is not None and plan.shed.n_seen == 0 and "what 0 rows" in plan.explain()
    context.append(ids(7).tolist())
    plan = context.weave()
    assert plan.shed is not None and plan.shed.n_seen == 7


@pytest.mark.parametrize("spec", ["keydiff:24", "h2o:24", "streaming:24", "kvzip:24", "rkv:24"])
def test_memory_is_the_budget_and_a_page(engine: Engine, spec: str) -> None:
    """At each step of a reply behind a prompt that was much longer."""
    context = engine.context("c", keep=f"{spec},every={EVERY}")
    context.append(ids(200, 2).tolist())
    turn = context.begin(*request_from(80, {"ignore_eos": True}))
    most, state = (24 + EVERY) * engine.runner.row_bytes, context.session.state
    most = most * 3 // 2 if spec.startswith("streaming") else most
    while not turn.done:
        engine.loop.step()
        if len(turn._weaving.request.out) > 0:
            assert state.rows.n_bytes <= most
            assert state.n_bytes <= dict(engine.shelf.charged())[state.name]
    turn.finish()


@pytest.mark.parametrize("model", ["llama", "ministral"])
@pytest.mark.parametrize(
    "spec", ["h2o:0.3", "streaming:0.3", "ttkv:16", "diffkv,window=8", "flexicache:16,page=4,overlap=0",
             "h2o:0.2,int8=0.3,layers=pyramid", "kvzip:0.3", "keydiff:0.2,below=rest"],
)  # fmt: skip
@pytest.mark.sampled
def test_what_an_answer_will_take_is_charged_before_it_begins(model: str, spec: str) -> None:
    """Budgets that grow with the answer too: it does not end for want of memory on the way."""
    with Engine(transformers(model), base="") as engine:
        context = engine.context("c", keep=f"{spec},every={EVERY}", denoise=False)
        state = context.session.state
        for turn in range(2):
            context.append(ids(60, turn).tolist())
            running, charged = context.begin(*request_from(6 * EVERY, {"ignore_eos": True})), []
            while not running.done:
                engine.loop.step()
                charged.append(dict(engine.shelf.charged())[state.name])
                assert state.n_bytes <= charged[-1]
            running.finish()
            first = next(i for i, n in enumerate(charged) if n < charged[0] or i == EVERY)
            assert all(b <= a for a, b in pairwise(charged[first:]))


def test_what_closed_up_is_named_and_said_again(engine: Engine) -> None:
    """Parts are the slices that are left; the tokens of all of them are those that were said."""
    prompt = ids(60, 3)
    out = answered(engine, f"streaming:24,every={EVERY}", prompt)
    context = engine.get_context("c")
    said = [*prompt.tolist(), *out]
    kept = context.n_tokens
    assert context.tokens() == said[:4] + said[len(said) - kept + 4 :]
    assert kept <= 24 + EVERY + 1


@pytest.mark.slow
def test_a_stream_longer_than_the_model(of_few_positions: Engine) -> None:
    """Positions do not run out, memory does not grow."""
    engine, limit = of_few_positions, of_few_positions.runner.limit
    context = engine.context("c", keep="streaming:64,every=16")
    context.append(ids(30).tolist())
    turn = context.begin(*request_from(limit + 50, {"ignore_eos": True}))
    most = 0
    while not turn.done:
        engine.loop.step()
        most = max(most, context.session.state.rows.n_bytes)
    answer = turn.finish()
    assert len(answer.tokens) == limit + 50 and answer.finish == "length"
    assert most <= (64 + 17 + 3) * engine.runner.row_bytes * 1.5
    engine.check_integrity()
    context.append(ids(10).tolist())
    context.generate(max_tokens=5)


def test_other_policies_end_at_the_limit(of_few_positions: Engine) -> None:
    engine = of_few_positions
    context = engine.context("c", keep="h2o:64")
    context.append(ids(30).tolist())
    with pytest.raises(ContextTooLong):
        context.generate(max_tokens=engine.runner.limit)


@pytest.mark.parametrize(
    "keep",
    ["nothing", "h2o:0", "h2o:1.5", "h2o:-3", "h2o:x", "h2o,age=1", "h2o,every=0", "h2o,what=3",
     "snapkv,window=-1", "streaming:9,heads=ada", "h2o,heads=some", "h2o,age", "", "h2o,sinks=1,sinks=2",
     "diffkv,int8=3", "h2o:9,int8=0", "h2o:9,int8=", "h2o:9,int7=4", "streaming:9,int8=rest", "h2o:9,k8v4=1.5"],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(engine: Engine, keep: str) -> None:
    with pytest.raises(InvalidArgument):
        engine.context("c", keep=keep)
    assert "c" not in engine.contexts


def test_an_engine_is_told_at_once() -> None:
    with pytest.raises(InvalidArgument):
        Engine(transformers("llama"), keep="nothing:0.3")
    with Engine(transformers("llama"), keep="h2o:24") as made:
        assert made.context("c").settings.keep == "h2o:24"


def test_what_contradicts_it_is_refused(engine: Engine) -> None:
    for more in ({"prune": "evict"}, {"max_drift": 1.0}, {"positions": "keep"}):
        with pytest.raises(InvalidArgument):
            engine.context("c", keep="streaming:30", **more)
    with Engine(transformers("llama"), rows="int8") as eight, pytest.raises(InvalidArgument):
        eight.context("c", keep="h2o:30")


def test_pinned_chunks_stay(engine: Engine) -> None:
    engine.put("a", ids(10, 1).tolist())
    engine.put("b", ids(40, 2).tolist())
    engine.files.pin("a")
    context = engine.context("c", keep=f"streaming:24,every={EVERY}")
    context.append(ids(20, 3).tolist())
    for name in ("a", "b"):
        context.append_chunk(name)
    context.generate(max_tokens=30, ignore_eos=True)
    assert "a" in [part.name for part in context.parts]
    assert not any(part.name.startswith("b") for part in context.parts)


@pytest.mark.parametrize("spec", ["h2o:0.3,heads=ada", "h2o:0.3,layers=pyramid"])
def test_budgets_by_head_and_layer_sum_up(engine: Engine, spec: str) -> None:
    prompt = ids(120, 6)
    answered(engine, f"{spec},window=4,every=500", prompt)
    rows = engine.get_context("c").session.state.rows
    kept = [[int((own < len(prompt)).sum()) for own in rows.kept(i)] for i in range(4)]
    assert abs(sum(map(sum, kept)) - 36 * 2 * 4) <= 4
    flat = {n for layer in kept for n in layer}
    assert len(flat) > 1, "all the same"


@pytest.mark.parametrize("spec", ["h2o:64,layers=pyramid,every=4", "h2o:0.9,layers=pyramid"])
def test_a_layer_that_gets_less_is_asked_whether_all_fits(engine: Engine, spec: str) -> None:
    """The upper layers let go of rows: nothing of that is exact."""
    answered(engine, spec, ids(40, 5))
    context = engine.get_context("c")
    assert context.session.state.rows.n_freed > 0
    assert context.plan.drift is None and context.plan.approximate["freed"] == 40


@pytest.mark.parametrize("end", ["stop", "cancel"])
def test_an_answer_of_nothing_closes_up_too(engine: Engine, end: str) -> None:
    """Parts are what rows there are, so that the next turn stands behind them."""
    prompt, keep = ids(120, 5), f"streaming:24,every={EVERY}"
    first = answered(engine, keep, prompt)[0]
    engine.close_context("c")
    context = engine.context("c", keep=keep)
    context.append(prompt.tolist())
    options = {"stop_tokens": (first,)} if end == "stop" else {}
    turn = context.begin(*request_from(9, options))
    while end == "cancel" and not turn.plan:
        engine.loop.step()
    assert (turn.cancel() if end == "cancel" else turn.run()).text == ""
    state = context.session.state
    if end == "stop":
        said = prompt.tolist()
        assert context.tokens() == said[:4] + said[-20:] and state.rows.n == 24
    assert state.rows.n == (state.woven[-1].slots[1] if state.woven else state.rows.n)
    context.append(ids(9, 9).tolist())
    context.generate(max_tokens=5, ignore_eos=True)
    engine.check_integrity()


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.sampled
def test_no_more_is_held_than_was_accounted(name: str) -> None:
    """Neither behind a prompt that fits with its answer, nor while many tokens are decoded."""
    model = transformers("llama")
    row = model.row_bytes
    wide = 1.5 if name == "streaming" else 1  # unrotated keys besides
    watch = Keep.parse(name).policy.watch(model.layers, model.device)
    known = 0 if watch is None else 2 * watch.tally.bytes_for(66, 66)  # of float64
    with Engine(model, budget=int(66 * row * wide) + known) as engine:
        context = engine.context("c", keep=f"{name}:5000", denoise=False)
        context.append(ids(60).tolist())
        assert len(context.generate(max_tokens=1, ignore_eos=True).tokens) == 1
    with Engine(model) as engine:
        context = engine.context("c", keep=f"{name}:5000,every={EVERY}", denoise=False)
        context.append(ids(60).tolist())
        some = request_from(5 * EVERY, {"ignore_eos": True})
        turn, state = context.begin(*some), context.session.state
        while not turn.done:
            engine.loop.step()
            assert state.n_bytes <= dict(engine.shelf.charged())[state.name]
        turn.finish()


@pytest.mark.parametrize("model", ["llama", "ministral"])
def test_a_row_that_sees_nothing_is_no_nan(model: str) -> None:
    """`auto` computes rows anew of which some head has freed all before, and them too."""
    with Engine(transformers(model), repair="auto") as engine:
        for i in (1, 2):
            engine.put(f"d{i}", ids(40, i).tolist())
        context = engine.context("c", keep="h2o:16,sinks=0,window=4")
        for i in (1, 2):
            context.append_chunk(f"d{i}")
        for n in (8, 20, 60, 120):
            context.append(ids(n, 7).tolist())
            assert context.generate(max_tokens=3, ignore_eos=True).plan.drift is None


def test_a_bound_of_one_answer_is_refused(engine: Engine) -> None:
    engine.weaver.calibration = Calibration(
        engine.runner.fingerprint, 0.95, 100,
        (Curve(0.15, 0.15, (0.0,) * 6, (0.0,), (0.01,), (-9.0,) * 5, (9.0,) * 5),),
    )  # fmt: skip
    engine.put("d", ids(40, 1).tolist())
    engine.compress("d", "h2o:13")
    for options in ({"keep": "h2o:12"}, {}):
        context = engine.context("c", repair="auto", share=0.15, **options)
        context.append_chunk("d")
        context.append(ids(9, 5).tolist())
        with pytest.raises(InvalidArgument, match="max_drift"):
            context.generate(max_tokens=5, max_drift=0.05)
        assert context.session.state.rows.n == 0
        engine.close_context("c")
