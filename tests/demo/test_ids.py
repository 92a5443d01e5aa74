"""The world's words have changed once, its token ids never: they are what the weights were trained on.

The digests are of the ids that the code made before its words were English.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import BUNDLED
from tokenizers import Tokenizer

from kvweave import Engine, Runner
from kvweave.demo import job, world
from kvweave.demo.tokenizer import wrap_tokenizer
from kvweave.suite import prose, stream
from kvweave.suite.exam import Exam
from kvweave.suite.protocols import PROTOCOLS, Size, cases

TRAINING = Path(__file__).parents[2] / "demo"
PAPERS = {
    "P1": "5c3b79e79c344b80",
    "P2": "ab906317f7fab17a",
    "P3": "66390e36933e0e0d",
    "P4": "72e44209cd1de07c",
    "P5": "de68f0544a8fbb46",
    "P7": "ea5a2c13c491c637",
    "P8": "f907ba14aff62b71",
    "P9": "76652fe52018d6c9",
}
PYTHON_3_11 = "9fd2eb1120a43753"  # of its held-out prose
PROSE = "20e676a941558891"
STREAMS = "44a983eb4cf18477"
JOB = {"SIZE": "af80763bdb04c6bc", "QUICK": "e18e55d8095d6e9c"}
FIRST, FURTHER = "ad793547ea600b12", "d2960be7237d8820"
SIZES = (Size(), Size(notes=(3, 5), facts=(1, 2), filler=(0, 3), entities=(8, 10), questions=6))


def digest(runs):
    """One digest of many runs of token ids."""
    found = hashlib.blake2b(digest_size=8)
    for ids in runs:
        found.update(np.array([len(ids), *ids], "<i4").tobytes())
    return found.hexdigest()


@pytest.fixture(scope="module")
def model():
    return Runner.load(str(BUNDLED), device="cpu")


@pytest.fixture(scope="module")
def exam(model):
    made = Exam(model)
    yield made
    made.close()


@pytest.fixture(scope="module")
def training():
    """The scripts that train the model, and the ids they train it on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(TRAINING))
        import further
        import train

        yield train, further, train.Ids(Tokenizer.from_file(str(BUNDLED / "tokenizer.json")))
    for name in ("train", "further", "relay"):
        sys.modules.pop(name, None)


def paper_ids(paper):
    for name, tokens in paper.notes:
        yield [len(name), *tokens]
    for question in paper.questions:
        yield question.asked
        yield question.expected


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_papers(exam, protocol):
    runs = [exam.words.head]
    for size in SIZES:
        for i, case in enumerate(islice(cases(protocol, "ids", size), 25)):
            runs += paper_ids(exam.words.paper(case, i))
    assert digest(runs) == PAPERS[protocol]


def test_streams(exam):
    runs = []
    for seed in range(3):
        for step in stream.script(exam, f"ids/{seed}", prunes=40):
            user, asked = exam.words.user(step.user), step.question.asked
            runs += [user, step.reply, asked, step.question.expected]
    assert digest(runs) == STREAMS


@pytest.mark.parametrize("size", ["SIZE", "QUICK"])
def test_demonstration(model, size):
    with Engine(model) as engine:
        head = engine.context("demo", system=world.SYSTEM).tokens()
        script = job.Script(engine, head, getattr(job, size))
        steps = [script.step() for _ in range(60)]
    assert digest([ids for step in steps for ids in (step.prompt, step.reply)]) == JOB[size]


def test_first_training(training):
    train, _, ids = training
    runs = []
    for stage, (length, spec) in enumerate(train.STAGES):
        for seed in range(3):
            document, answers = ids.document(f"ids/{stage}/{seed}", length, spec)
            runs += [document, [a.start for a in answers], [a.count for a in answers]]
    assert digest(runs) == FIRST


def test_further_training(training):
    _, further, ids = training
    runs = []
    for kind in further.KINDS:
        for level in range(further.LAST + 1):
            for seed in range(3):
                document, marks = further.lesson(ids, kind, level, f"ids/{seed}")
                runs += [document, [m[0] for m in marks], [m[1] for m in marks]]
    assert digest(runs) == FURTHER


@pytest.fixture
def its_topics(monkeypatch):
    """The documentation that was trained on: that of this Python, or of another one on the path."""
    told = "import json; from pydoc_data import topics; print(json.dumps(topics.topics))"
    for name in (sys.executable, "python3", "python3.11"):
        if (python := shutil.which(name)) is None:
            continue
        done = subprocess.run([python, "-I", "-c", told], capture_output=True, check=False)
        found = json.loads(done.stdout or b"{}")
        monkeypatch.setattr(prose, "topics", SimpleNamespace(topics=found))
        texts = "\0".join(prose.texts(held_out=True))
        if hashlib.blake2b(texts.encode(), digest_size=8).hexdigest() == PYTHON_3_11:
            return
    pytest.skip("another Python has other documentation: put 3.11.7 on the path")


def test_prose_that_training_held_out(its_topics):
    tokenizer = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    assert digest(tokenizer.encode(text).ids for text in prose.texts(held_out=True)) == PROSE


@pytest.mark.slow
def test_training_exports_the_tokenizer_that_is_bundled(training, its_topics, tmp_path):
    train, _, _ = training
    wrap_tokenizer(train.tokenizer_object()).save_pretrained(tmp_path, save_jinja_files=False)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (BUNDLED / name).read_bytes()
