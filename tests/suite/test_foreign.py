"""The suite on a model of another world: it is told plain sentences, and may answer in its own words."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
import torch
from conftest import BUNDLED
from templates import PLAIN
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from kvweave import Runner
from kvweave.suite import exam as exam_module
from kvweave.suite import report, stream
from kvweave.suite.exam import Exam
from kvweave.suite.method import FULL, Method
from kvweave.suite.protocols import PROTOCOLS, Size, cases
from kvweave.suite.reply import written
from kvweave.weave.oracle import prefill

SMALL = Size(notes=(4, 5), filler=(0, 4), questions=3)
METHODS = [Method(), Method("first_k", 0.15), Method("query", 0.15)]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A random chat model whose tokens are bytes."""
    where = tmp_path_factory.mktemp("stranger")
    letters = ["<|im_start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=PLAIN,
    ).save_pretrained(where)
    config = Qwen3Config(
        vocab_size=len(letters), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, max_position_embeddings=8192,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=1, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(where)
    return str(where)


@pytest.fixture(scope="module")
def stranger(path):
    return Runner.load(path, device="cpu")


@pytest.fixture
def strange(stranger):
    made = Exam(stranger)
    yield made
    made.close()


def papers(exam, protocol, n=1):
    return [exam.words.paper(c, i) for i, c in enumerate(islice(cases(protocol, "far", SMALL), n))]


def test_it_is_told_the_rules_and_whole_sentences(strange, stranger):
    text = stranger.tokenizer.decode
    assert not strange.words.trained
    system = text(strange.words.head)
    assert system.startswith("<|im_start|>system\nYou keep notes.") and "Bob" in system
    for protocol in PROTOCOLS:
        (paper,) = papers(strange, protocol)
        for _, tokens in paper.notes:
            note = text(list(tokens))
            assert note.startswith("<|im_start|>user\n") and note.endswith("<|im_end|>\n")
            assert " ." not in note and " tree" not in note.replace("'s tree", "")
        for question in paper.questions:
            asked, expected = text(list(question.asked)), text(list(question.expected))
            assert "\nWhat is " in asked and asked.endswith("?<|im_end|>\n<|im_start|>assistant\n")
            leak = f" is {question.value}"
            assert expected.endswith(leak if question.is_leak else f"{leak}.<|im_end|>")


@pytest.mark.slow
def test_a_model_that_cannot_do_it_does_not_count(strange):
    found = strange.sit(papers(strange, "P1")[0], METHODS)
    rows = report.summarise(found, METHODS)
    assert [row["method"] for row in rows] == [FULL, *(m.label for m in METHODS)]
    assert report.warning(rows) == "does not count: full prefill scores 0.0%"
    assert all(0 <= row["kl"][0] < 1 for row in rows) and rows[1]["kl"][0] > 0


@pytest.mark.parametrize("says", ["Well, it is **{}**!", "{}", "\n{}\nhot cold loud"])
def test_a_reply_counts_by_its_value_whatever_its_wording(strange, monkeypatch, says):
    (paper,) = papers(strange, "P8")
    values = iter([q.value for q in paper.questions] * (1 + len(METHODS)))
    monkeypatch.setattr(exam_module, "written", lambda *_: says.format(next(values).title()))
    found = strange.sit(paper, METHODS)
    assert [o.right for o in found] == [1.0] * 3 * (1 + len(METHODS))
    assert report.warning(report.summarise(found, METHODS)) == ""


def test_a_line_is_decoded_as_generate_does(strange, stranger, path):
    ids = list(strange.words.head[:40])
    rows, _ = prefill(stranger, np.array(ids), np.arange(40), slice(0, 0))
    model = Qwen3ForCausalLM.from_pretrained(path)
    options = {"attention_mask": torch.ones(1, 40), "max_new_tokens": 64, "do_sample": False}
    wanted = model.generate(torch.tensor([ids]), **options)[0, 40:].tolist()
    line = written(stranger, rows, 30, ids[30:])
    text = stranger.tokenizer.decode(wanted, skip_special_tokens=True)
    assert line and text.startswith(line) and rows.n == 40


@pytest.mark.parametrize("protocol", ["P1", "P3", "P9"])
def test_what_is_decoded_is_right_where_forced_replies_are(protocol):
    """The bundled model, judged as if it were a stranger to its own world."""
    found = {}
    for trained in (True, False):
        exam = Exam(Runner.load(str(BUNDLED), device="cpu"))
        (paper,) = papers(exam, protocol)
        exam.words.trained = trained
        found[trained] = exam.sit(paper, METHODS)
        exam.close()
    for forced, free in zip(found[True], found[False], strict=True):
        assert free.right >= forced.right and (free.method, free.kl) == (forced.method, forced.kl)
    assert [o.right for o in found[False] if o.method == FULL] == [
        o.right for o in found[True] if o.method == FULL
    ]


def test_a_stream_is_told_in_plain_words_too(strange, stranger):
    steps = stream.script(strange, "far", prunes=1, window=2)
    assert all(" ." not in step.user and "what about" not in step.user for step in steps)
    found = stream.hold(strange, 0, steps, [Method()], window=2)
    assert {o.right for o in found} <= {0.0}
