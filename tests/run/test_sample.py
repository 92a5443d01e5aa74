"""Sampling against exact distributions; stop strings and characters for any cut of a stream."""

from __future__ import annotations

import codecs
import itertools
import math
from collections import Counter

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from kvweave.errors import InvalidArgument
from kvweave.run.draw import candidates
from kvweave.run.sample import (
    Choice,
    Detokenizer,
    Sampler,
    Sampling,
    StopScanner,
    sample,
)

P = [0.1, 0.4, 0.2, 0.25, 0.05]


def logits(*probabilities: float) -> torch.Tensor:
    """Logits of these probabilities, shifted so that nothing may rely on their sum."""
    return torch.tensor(probabilities).log() + 7


def choose(sampler: Sampler, logits: torch.Tensor) -> Choice:
    """What a request alone in its batch gets."""
    (found,) = sample(logits[None], [sampler])
    if isinstance(found, Exception):
        raise found
    return found


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("top_k", -1),
        ("seed", -1),
        ("seed", 2**63),
        ("stop", "END"),
        ("stop", ("END", "")),
        ("min_p", 1.5),
        ("logprobs", -1),
    ],
)
def test_sampling_that_makes_no_sense_is_refused_by_name(field, value):
    with pytest.raises(InvalidArgument) as error:
        Sampling(**{field: value})
    assert error.value.argument == field
    assert repr(value) in error.value.message


def test_the_edges_of_what_makes_sense():
    Sampling(max_tokens=1, temperature=0.0, top_p=1.0, top_k=0, seed=0, logprobs=0)
    Sampling(top_p=1e-9, temperature=100.0, seed=2**63 - 1, stop=("a",), stop_tokens=(1,))


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({}, {0: 0.1, 1: 0.4, 2: 0.2, 3: 0.25, 4: 0.05}),
        ({"top_k": 99}, {0: 0.1, 1: 0.4, 2: 0.2, 3: 0.25, 4: 0.05}),
        ({"top_k": 2}, {1: 0.4 / 0.65, 3: 0.25 / 0.65}),
        ({"top_k": 1}, {1: 1.0}),
        ({"top_p": 0.39}, {1: 1.0}),
        ({"top_p": 0.5}, {1: 0.4 / 0.65, 3: 0.25 / 0.65}),
        ({"top_p": 0.84}, {1: 0.4 / 0.85, 3: 0.25 / 0.85, 2: 0.2 / 0.85}),
        ({"top_p": 1e-9}, {1: 1.0}),
        ({"top_p": 5e-324}, {1: 1.0}),
        # top_p is of what top_k left: 0.4/0.65 = 0.615 is enough for 0.6, not for 0.62.
        ({"top_k": 2, "top_p": 0.6}, {1: 1.0}),
        ({"top_k": 2, "top_p": 0.62}, {1: 0.4 / 0.65, 3: 0.25 / 0.65}),
        # temperature 0.5 squares the probabilities, 2 takes their roots.
        ({"temperature": 0.5}, {i: p * p / 0.275 for i, p in enumerate(P)}),
        ({"temperature": 2.0}, {i: p**0.5 / sum(q**0.5 for q in P) for i, p in enumerate(P)}),
        # and it comes before top_p: squared, the first has 0.16/0.275 = 0.58.
        ({"temperature": 0.5, "top_p": 0.55}, {1: 1.0}),
    ],
)
def test_what_may_be_drawn_and_how_likely(sampling, expected):
    ids, probabilities, _ = candidates(
        logits(*P)[None], Sampling(**({"temperature": 1.0} | sampling))
    )
    found = dict(zip(ids[0].tolist(), probabilities[0].tolist(), strict=True))
    assert {id: p for id, p in found.items() if p} == pytest.approx(expected, rel=1e-5)


def test_top_p_keeps_no_token_more_than_it_needs_and_the_lowest_of_equals():
    sampling = Sampling(temperature=1.0, top_p=0.25)
    ids, probabilities, n_kept = candidates(torch.zeros(1, 1024), sampling, 1024)
    assert int(n_kept) == 256
    assert ids[0, :256].tolist() == list(range(256))
    assert probabilities[0].tolist() == [1 / 256] * 256 + [0] * 768
    # of equals those with higher ids were looked at, perhaps: that is no answer
    assert int(candidates(torch.zeros(1, 1024), sampling, 512)[2]) == 0


def by_the_book(logits: torch.Tensor, sampling: Sampling, made: torch.Generator) -> int:
    """Sort the whole vocabulary, cut it, draw."""
    scaled = logits.float()
    scaled = (scaled - scaled.max()) / sampling.temperature
    ids = scaled.sort(descending=True, stable=True).indices
    probabilities = scaled.softmax(-1)[ids]
    kept = probabilities.cumsum(-1) - probabilities < sampling.top_p
    return int(ids[kept][torch.multinomial(probabilities[kept], 1, generator=made)])


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.99])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # bfloat16 has many equals
def test_top_p_of_a_large_vocabulary_is_that_of_all_of_it_sorted(top_p, dtype):
    sampling, made = (
        Sampling(temperature=0.9, top_p=top_p, seed=3),
        torch.Generator().manual_seed(3),
    )
    sampler, seed = Sampler(sampling), torch.Generator().manual_seed(0)
    for scale in [9.0, 3.0, 9.0, 1.0, 0.1, 5.0] * 4:
        row = (torch.randn(3000, generator=seed) * scale).to(dtype)
        assert choose(sampler, row).token == by_the_book(row, sampling, made)


def test_what_a_seed_gives_does_not_depend_on_how_many_tokens_were_looked_at():
    rows = torch.randn(20, 2000, generator=torch.Generator().manual_seed(1)) * 4
    sampling = Sampling(temperature=1.0, top_p=0.7, seed=8)
    fresh, grown = Sampler(sampling), Sampler(sampling)
    grown.keep(0)  # as after a draw that did not stand
    assert [choose(fresh, row) for row in rows] == [choose(grown, row) for row in rows]


def test_a_batch_gives_each_request_what_it_gets_alone():
    rows = torch.randn(30, 700, generator=torch.Generator().manual_seed(2)).bfloat16() * 3
    rows[4, 17], rows[5, 3] = math.nan, math.inf
    rows[6] = -math.inf
    asked = [
        Sampling(),
        Sampling(temperature=0.8, seed=1, logprobs=2),
        Sampling(temperature=2.0, top_p=0.95, seed=2),
        Sampling(logprobs=900),
        Sampling(temperature=0.8, top_k=9, top_p=0.6, seed=4),
    ]
    together, apart = ([Sampler(asked[i % 5]) for i in range(30)] for _ in range(2))
    for turn in range(3):
        found = sample(rows + turn, together)
        assert [isinstance(choice, InvalidArgument) for choice in found[3:8]] == [0, 1, 1, 1, 0]
        for choice, row, sampler in zip(found, rows + turn, apart, strict=True):
            (expected,) = sample(row[None], [sampler])
            assert choice == expected or str(choice) == str(expected)


def test_huge_logits_over_a_small_temperature_do_not_overflow():
    sampler = Sampler(Sampling(temperature=1e-5, seed=1))
    assert choose(sampler, torch.tensor([0.0, 3e35, 1.0])).token == 1


def test_draws_follow_the_distribution():
    sampler = Sampler(Sampling(temperature=1.0, top_k=3, seed=5))
    n = 4000
    counts = Counter(choice.token for choice in sample(logits(*P).expand(n, 5), [sampler] * n))
    assert set(counts) == {1, 2, 3}
    for token, p in {1: 0.4 / 0.85, 2: 0.2 / 0.85, 3: 0.25 / 0.85}.items():
        assert abs(counts[token] / n - p) < 5 * (p * (1 - p) / n) ** 0.5


def test_greedy_takes_the_likeliest_and_the_lowest_of_equals():
    assert choose(Sampler(Sampling()), logits(*P)).token == 1
    assert choose(Sampler(Sampling()), torch.tensor([0.0, 3.0, 1.0, 3.0])).token == 1
    assert choose(Sampler(Sampling()), torch.zeros(1000)).token == 0


@pytest.mark.parametrize("temperature", [1e-6, 1e-12, 1e-300])
def test_a_tiny_temperature_is_greedy_and_divides_by_nothing(temperature):
    assert choose(Sampler(Sampling(temperature=temperature, seed=1)), logits(*P)).token == 1


def test_a_seed_gives_the_same_tokens_whatever_else_draws():
    sampling = Sampling(temperature=1.0, seed=11)
    rows = torch.randn(40, 50, generator=torch.Generator().manual_seed(0))
    alone = Sampler(sampling)
    tokens = [choose(alone, row).token for row in rows]
    shared, other = Sampler(sampling), Sampler(Sampling(temperature=1.0))
    busy = []
    for row in rows:
        choose(other, row)
        torch.rand(3)
        busy.append(choose(shared, row).token)
    assert busy == tokens
    different = Sampler(Sampling(temperature=1.0, seed=12))
    assert [choose(different, row).token for row in rows] != tokens


def test_a_seeded_sampler_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    choose(Sampler(Sampling(temperature=1.0, seed=11)), logits(*P))
    assert torch.equal(torch.get_rng_state(), before)


def test_logprobs_are_of_the_unmodified_distribution():
    sampling = Sampling(temperature=0.3, top_k=1, logprobs=3, seed=1)
    choice = choose(Sampler(sampling), logits(*P))
    assert choice.token == 1
    assert choice.logprob == pytest.approx(math.log(0.4), rel=1e-5)
    assert [token for token, _ in choice.top] == [1, 3, 2]
    assert [p for _, p in choice.top] == pytest.approx([math.log(p) for p in (0.4, 0.25, 0.2)])


def test_an_impossible_token_is_neither_drawn_nor_reported():
    masked = torch.tensor([-math.inf, 0.0, -math.inf, 0.0])
    sampler = Sampler(Sampling(temperature=1.0, logprobs=4, seed=2))
    choices = [choose(sampler, masked) for _ in range(50)]
    assert {choice.token for choice in choices} == {1, 3}
    assert choices[0].top == ((1, pytest.approx(-math.log(2))), (3, pytest.approx(-math.log(2))))


def test_more_logprobs_than_tokens_and_none():
    assert len(choose(Sampler(Sampling(logprobs=99)), logits(*P)).top) == 5
    assert choose(Sampler(Sampling()), logits(*P)).top == ()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "bad",
    [
        torch.tensor([0.0, math.nan, 1.0]),
        torch.full((3,), -math.inf),
        torch.tensor([0.0, math.inf]),
        torch.zeros(0),
        torch.zeros(2, 3),
    ],
)
def test_broken_logits_are_an_error(bad, temperature):
    with pytest.raises(InvalidArgument) as error:
        choose(Sampler(Sampling(temperature=temperature)), bad)
    assert error.value.argument == "logits"


def test_half_precision_logits_are_sampled_in_full_precision():
    bf16 = torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16)
    exact = torch.tensor([1.0, 2.0, 3.0]).log_softmax(-1)[2].item()
    assert choose(Sampler(Sampling()), bf16).logprob == pytest.approx(exact, rel=1e-6)


def scan(scanner: StopScanner, pieces: list[str]) -> tuple[str, bool]:
    text = ""
    for piece in pieces:
        emitted, stopped = scanner.feed(piece)
        text += emitted
        if stopped:
            return text, True
    return text + scanner.flush(), False


@pytest.mark.parametrize(
    ("stop", "pieces", "text", "matched"),
    [
        ((), ["a", "b"], "ab", None),
        (("END",), ["one E", "ND two"], "one ", "END"),
        (("END",), ["one E", "N", "X"], "one ENX", None),
        (("END",), ["END"], "", "END"),
        (("END",), ["one EN"], "one EN", None),
        (("\n\n",), ["a\n", "b\n", "\nc"], "a\nb", "\n\n"),
        (("aab",), ["aa", "ab"], "a", "aab"),
        (("abc", "b"), ["abc"], "a", "b"),
        (("b", "ab"), ["ab"], "", "ab"),
        (("x", "END"), ["a END x"], "a ", "END"),
    ],
)
def test_stop_strings(stop, pieces, text, matched):
    scanner = StopScanner(stop)
    assert scan(scanner, pieces) == (text, matched is not None)
    assert scanner.matched == matched


def test_only_what_may_begin_a_stop_string_is_held_back():
    scanner = StopScanner(("END", "\nUser:"))
    assert scanner.feed("hello E") == ("hello ", False)
    assert scanner.feed("N") == ("", False)
    assert scanner.feed("\nUs") == ("EN", False)
    assert scanner.flush() == "\nUs"
    assert scanner.flush() == ""


def test_nothing_comes_after_a_stop():
    scanner = StopScanner(("E",))
    assert scanner.feed("aEb") == ("a", True)
    assert scanner.feed("more") == ("", True)
    assert scanner.flush() == ""


def cut(text: str, places: list[int]) -> list[str]:
    at = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(at)]


small = st.text(alphabet="abc", min_size=1, max_size=4)


@given(
    st.lists(small, max_size=3).map(tuple),
    st.text(alphabet="abc", max_size=20),
    st.lists(st.integers(0, 99), max_size=6),
)
def test_any_cut_gives_the_text_up_to_the_stop_that_is_complete_first(stop, text, places):
    ends = [n for n in range(len(text) + 1) if any(text[:n].endswith(s) for s in stop)]
    expected = text
    if ends:
        longest = max(len(s) for s in stop if text[: ends[0]].endswith(s))
        expected = text[: ends[0] - longest]
    assert scan(StopScanner(stop), cut(text, places)) == (expected, bool(ends))


@given(st.lists(small, min_size=1, max_size=3).map(tuple), st.text(alphabet="abcd", max_size=20))
def test_the_text_held_back_is_always_the_beginning_of_a_stop_string(stop, text):
    scanner, emitted = StopScanner(stop), ""
    for n, letter in enumerate(text, 1):
        piece, stopped = scanner.feed(letter)
        if stopped:
            return
        emitted += piece
        held = text[len(emitted) : n]
        assert text[:n] == emitted + held
        assert not held or any(s.startswith(held) for s in stop)


class Bytes:
    """A byte-level tokenizer: token i is ``vocabulary[i]``; counts what it is asked for."""

    def __init__(self, vocabulary: list[bytes]) -> None:
        self.vocabulary = vocabulary
        self.longest = 0

    def __call__(self, tokens: list[int]) -> str:
        self.longest = max(self.longest, len(tokens))
        return b"".join(self.vocabulary[t] for t in tokens).decode("utf-8", "replace")


def stream(decode: Bytes, tokens: list[int]) -> list[str]:
    detokenizer = Detokenizer(decode)
    return [*(detokenizer.feed(token) for token in tokens), detokenizer.flush()]


def test_a_character_is_emitted_when_its_last_byte_is_there():
    decode = Bytes([b"a", *(bytes([b]) for b in "é🙂".encode())])
    assert stream(decode, [0, 1, 2, 0, 3, 4, 5, 6]) == ["a", "", "é", "a", "", "", "", "🙂", ""]


def test_a_broken_tail_comes_out_with_the_flush():
    assert stream(Bytes([b"a", b"\xf0", b"\x9f"]), [0, 1, 2]) == ["a", "", "", "\ufffd"]


def test_broken_bytes_do_not_hold_the_stream_up():
    pieces = stream(Bytes([b"\x80"]), [0] * 100)
    assert "".join(pieces) == "\ufffd" * 100
    assert len("".join(pieces[:50])) >= 40


@pytest.mark.parametrize("n_broken", range(12))
def test_a_decoder_with_a_mark_per_byte_loses_no_character_after_broken_bytes(n_broken):
    codecs.register_error("each byte", lambda e: ("\ufffd" * (e.end - e.start), e.end))
    tokens = list(b"\x80" * n_broken + "🙂".encode())
    detokenizer = Detokenizer(lambda tokens: bytes(tokens).decode("utf-8", "each byte"))
    text = "".join(detokenizer.feed(token) for token in tokens)
    assert text == "\ufffd" * n_broken + "🙂"


def test_a_space_that_only_context_shows_is_kept():
    words = ["▁one", "▁two", "s", "</s>", "▁three"]

    def decode(tokens: list[int]) -> str:  # as sentencepiece: no space at the very beginning
        text = "".join(words[t] for t in tokens if words[t] != "</s>")
        return text.replace("▁", " ").removeprefix(" ")

    detokenizer = Detokenizer(decode)
    assert [detokenizer.feed(t) for t in [0, 1, 2, 3, 4]] == ["one", " two", "s", "", " three"]


def test_a_flushed_detokenizer_starts_afresh():
    decode = Bytes([b"a", b"\xf0"])
    detokenizer = Detokenizer(decode)
    assert [detokenizer.feed(0), detokenizer.feed(1), detokenizer.flush()] == ["a", "", "\ufffd"]
    assert [detokenizer.feed(0), detokenizer.flush(), detokenizer.flush()] == ["a", "", ""]


pieces_of_text = st.one_of(
    st.text(max_size=3).map(str.encode),
    st.binary(max_size=5),
    st.sampled_from([bytes([b]) for b in "🙂é\ufffd".encode()]),
    st.just(b""),
)


@given(st.lists(pieces_of_text, max_size=60))
@example([b"a", *[b""] * 40, b"\xf0", b"\x9f", *[b""] * 40, b"\x99", b"\x82"])
@example([*[b"\x80"] * 9, b"\xf0", b"\x9f", b"\x99", b"\x82", b"z"])
def test_any_bytes_give_the_text_of_the_whole_in_bounded_work(tokens):
    decode = Bytes(tokens)
    emitted = "".join(stream(decode, list(range(len(tokens)))))
    assert emitted == b"".join(tokens).decode("utf-8", "replace")
    assert decode.longest <= 24
