from __future__ import annotations

import gc
import logging
import os
import sys
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of processes that tests start

from kvweave.cli.start import uncollected

with uncollected():  # to go through all that again and again takes a second
    import torch

    if not torch.cuda.is_available():  # read when Triton is imported, which transformers does
        os.environ.setdefault("TRITON_INTERPRET", "1")

    import oracle

import certifi
import days
import forking  # noqa: F401  what is on the path now is what other processes get
import needs
import pytest

import kvweave
from kvweave.run.model import Runner

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # beside vLLM there is none
    pass
else:  # a busy machine is no fault of what is tested
    settings.register_profile(
        "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("any machine")

torch.set_num_threads(1)  # tiny tensors: more threads only wait for each other

SOME = 2  # cases of a test that a quick run asks
CASES = "KVWEAVE_CASES"  # how many of a test that is marked `sampled`; others each day
LEFT = pytest.StashKey[list[int]]()  # cases and tests that are left to other days
THEIRS = ("HOME", "KEY", "KEYS", "LOG", "METRICS_KEY", "URL")  # what commands and servers heed
BUNDLED = Path(__file__).parents[1] / "src" / "kvweave" / "demo" / "model"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Spare the collector what is imported: to go through it takes up to a second, each time."""
    gc.disable()
    try:
        return (yield)
    finally:
        # pytest hangs itself into each logger that does not propagate, six times a test: torch has 57
        for logger in logging.root.manager.loggerDict.values():
            if isinstance(logger, logging.Logger):
                logger.propagate = True
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    """Note for xdist's workers, which are given what was collected, whether somebody asked for a part."""
    if not hasattr(config, "workerinput"):
        named = config.args_source is config.ArgsSource.ARGS or config.option.keyword
        os.environ["PYTEST_WHOLE"] = "" if named else "1"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: many tests wait."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (cores or 1) + 1


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a test's many cases a quick run of the whole asks some, the first and the last; the others are
    slow. With ``KVWEAVE_CASES`` it asks so many of one that is marked ``sampled``, or as many as its mark
    says if that is more, others each day."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items if os.environ["PYTEST_WHOLE"] else ():
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    n_asked = int(os.environ.get(CASES, "0"))
    left: list[pytest.Item] = []
    n_sampled = 0
    for name, cases in tests.items():
        some = {i * (len(cases) - 1) // (SOME - 1) for i in range(SOME)}
        for i, case in enumerate(cases):
            if i not in some:
                case.add_marker(pytest.mark.slow)
        mark = cases[0].get_closest_marker("sampled") if n_asked else None
        if mark is not None and (most := max(n_asked, *mark.args, 1)) < len(cases):
            today = days.one_in(-(-len(cases) // most), len(cases), zlib.crc32(name.encode()))
            left += [case for i, case in enumerate(cases) if i not in today]
            n_sampled += 1
    gone = {*left, *(item for item in items if n_asked and item.get_closest_marker("small"))}
    if gone and os.environ["PYTEST_WHOLE"]:
        config.hook.pytest_deselected(items=[*gone])
        items[:] = [item for item in items if item not in gone]
        if left:
            config.stash[LEFT] = [len(left), n_sampled]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker tells who started it."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left"] = session.config.stash.get(LEFT, None)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
    """All workers collect the same."""
    if left := getattr(node, "workeroutput", {}).get("left"):
        node.config.stash[LEFT] = left  # type: ignore[attr-defined]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """What a bench sets holds for its own test: with two threads those behind it take ten times as long.
    Tests of models that this transformers cannot cache are skipped."""
    if torch.get_num_threads() != 1:
        torch.set_num_threads(1)
    for value in getattr(getattr(item, "callspec", None), "params", {}).values():
        if isinstance(value, str) and value in oracle.LACKING:
            pytest.skip(oracle.LACKING[value])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Iterator[object]:
    """On the device that is not there somebody counts, in each test."""
    if oracle.DEVICE.type != "counted":
        return (yield)
    from device.counted import counting

    with counting():
        return (yield)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say at the end what was skipped, and what would enable it, and how much is left to other days."""
    skipped = terminalreporter.stats.get("skipped", [])
    if skipped:
        terminalreporter.section("skipped")
        for line in needs.summary(report.longrepr[2] for report in skipped):
            terminalreporter.line(line)
    if left := terminalreporter.config.stash.get(LEFT, None):
        n, tests = left
        terminalreporter.line(
            f"{n} cases of {tests} tests are left to other days: make test-slow asks all"
        )


@pytest.fixture(scope="session", autouse=True)
def a_new_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Nobody's chunks, model or keys: a person who runs the tests may use kvweave, and their home names
    another model than the bundled one. No test leaves anything there that the next would find."""
    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp("user")
        patch.setenv("HOME", str(home))
        for name in THEIRS:
            patch.delenv(f"KVWEAVE_{name}", raising=False)
        yield home
        assert not (home / ".kvweave").exists()


@pytest.fixture(scope="session", autouse=True)
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Whom to trust is one certificate, in all processes: each of httpx's clients, one a request in most
    tests, would read those of all the world, for 20 to 40 ms."""
    end = "-----END CERTIFICATE-----\n"
    file = tmp_path_factory.mktemp("trusted") / "one.pem"
    file.write_text(certifi.contents().partition(end)[0] + end)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(file))
        yield


@pytest.fixture(scope="module", autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """What a file of tests does to its process ends with it: the next to run there is another each time."""
    path, environment, here = [*sys.path], {**os.environ}, Path.cwd()
    yield
    more = [place for place in sys.path if place not in path]
    sys.path[:] = path
    changed = {name for name, _ in environment.items() ^ os.environ.items()}
    # read when these are imported
    of_libraries = ("PYTEST_", "HF_", "TRANSFORMERS_", "VLLM_", "GLOG_")
    ours = {name for name in changed if not name.startswith(of_libraries)}
    if "vllm" in sys.modules:  # which sets a dozen for its workers, of any names
        ours = set()
    assert (more, ours, Path.cwd()) == ([], set(), here)


@cache
def tiny(name: str = "llama", dtype: torch.dtype = torch.float64) -> Runner:
    """A tiny random model of a named architecture, built once per test run."""
    kind, changes = (oracle.MODELS | oracle.FIXED)[name]
    return Runner(oracle.build(kind, changes, dtype), name=name)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` looks at contexts so small that it would rather repair all of them: quick tests of how it looks."""
    monkeypatch.setattr("kvweave.weave.repair.auto.Auto.weighs", False)


@pytest.fixture
def runner() -> Runner:
    return tiny()


@pytest.fixture
def engines() -> Iterator[Callable[..., kvweave.Engine]]:
    """Make engines over tiny models; afterwards each is checked and closed."""
    made: list[kvweave.Engine] = []

    def make(
        name: str = "llama", dtype: torch.dtype = torch.float64, **options: object
    ) -> kvweave.Engine:
        defaults: dict[str, object] = {"repair": "none"}
        made.append(kvweave.Engine(tiny(name, dtype), **(defaults | options)))
        return made[-1]

    yield make
    for engine in made:
        vars(engine.runner).pop("forward", None)  # a patch that is undone leaves the class's in it
        engine.check_integrity()
        engine.close()


@pytest.fixture(scope="session")
def bundled() -> Path:
    return BUNDLED
