"""Run protocols under methods, unit by unit, so that the work can be cut, shared and resumed.

A unit is a case, or a stream (P6). Its outcomes depend on the seed, the unit and the method only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

from kvweave.errors import InvalidArgument
from kvweave.run.model import Runner
from kvweave.suite import prose, stream
from kvweave.suite.exam import Exam, Trial
from kvweave.suite.method import Method
from kvweave.suite.protocols import PROTOCOLS, TEST, cases
from kvweave.suite.words import Paper
from kvweave.weave.calibration import Calibration, Recipes

NAMES = (*sorted([*PROTOCOLS, "P6"]), "prose")
SEED = "fidelity"
ASKED = 4  # questions of a case that count; P5 asks as many again about what was removed
PER_STREAM = 80  # questions of a stream, about


class Suite:
    """The protocols at a size: about ``n`` questions each, for one model, whose calibration holds
    ``recipes``: `auto` goes by them."""

    def __init__(
        self,
        runner: Runner,
        n: int = 500,
        prunes: int = stream.PRUNES,
        recipes: Recipes = (),
    ) -> None:
        self.runner, self.n, self.prunes = runner, n, prunes
        self._chosen = Calibration(runner.fingerprint, 0.0, 0, (), recipes=recipes)
        self._exams: dict[bool, Exam] = {}
        self._papers: dict[str, list[Paper]] = {}

    def close(self) -> None:
        """Close all engines."""
        for exam in self._exams.values():
            exam.close()

    def units(self, protocol: str) -> int:
        """Return how many units there are. Raises InvalidArgument for an unknown protocol."""
        if protocol == "P6":
            return max(2, -(-self.n // PER_STREAM))
        return len(self._cases(protocol))

    def run(
        self, protocol: str, methods: Sequence[Method], units: Iterable[int]
    ) -> Iterator[list[Trial]]:
        """Yield the outcomes of unit after unit; the oracle's own are among them."""
        exam = self._exam(protocol == "prose")
        for unit in units:
            if protocol == "P6":
                steps = stream.script(exam, f"{SEED}/P6/{unit}", self.prunes)
                yield stream.hold(exam, unit, steps, methods)
            elif protocol == "prose":  # a document that never had the chunk is what forget gives
                forget = [replace(m, modes=("forget",)) for m in methods]
                yield exam.sit(self._cases(protocol)[unit], forget)
            else:
                yield exam.sit(self._cases(protocol)[unit], methods)

    def _exam(self, is_prose: bool) -> Exam:
        """Return the engines: prose stands behind the BOS token, if there is one."""
        if is_prose not in self._exams:
            tokenizer = self.runner.tokenizer
            bos = str(getattr(tokenizer, "bos_token", None) or "")
            exam = Exam(self.runner, bos if is_prose else None)
            exam.calibration = self._chosen
            self._exams[is_prose] = exam
        return self._exams[is_prose]

    def _cases(self, protocol: str) -> list[Paper]:
        if protocol not in NAMES:
            raise InvalidArgument("protocols", f"no {protocol!r}", f"some of {', '.join(NAMES)}")
        if protocol not in self._papers:
            words = self._exam(protocol == "prose").words
            if protocol == "prose":
                self._papers[protocol] = list(prose.papers(words.maker, self.n))
            else:
                # P5 asks half of its questions, P9 only half as many as it is told
                size = replace(TEST, questions=(2 if protocol in ("P5", "P9") else 1) * ASKED)
                made = islice(cases(protocol, SEED, size), -(-self.n // ASKED))
                self._papers[protocol] = [words.paper(c, i) for i, c in enumerate(made)]
        return self._papers[protocol]
