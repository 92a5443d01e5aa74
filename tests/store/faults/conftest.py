from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from store.faults import shim
from store.faults.host import Host
from store.faults.tally import Tally, table
from store.faults.verbs import Tokens, chunks, tier_at

CHUNKS = chunks(6)


@pytest.fixture(scope="session")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """The process that forks engines, under the shim."""
    made = Host(shim.build(tmp_path_factory.mktemp("shim")))
    yield made
    made.close()


@pytest.fixture(autouse=True)
def quiet(host: Host) -> Iterator[None]:
    """No fault is left for the next test."""
    yield
    host.control.off()
    host.control.unwatch()
    host.control.raw.skew = 0


class Filled:
    """A home and a tier beside it with durable chunks, closed; `copy` makes another of it."""

    def __init__(self, root: Path, told: dict[str, Tokens]) -> None:
        self.root, self.told = root, told
        self.home, self.tier = root / "home", root / "tier"
        self.tiers = (tier_at(self.tier),)

    @property
    def may(self) -> dict[str, list[Tokens | None]]:
        return {name: [tokens] for name, tokens in self.told.items()}

    def files(self) -> list[Path]:
        """Every file, the largest last, as paths from the root."""
        found = [p for p in self.root.rglob("*") if p.is_file()]
        return sorted((p.relative_to(self.root) for p in found), key=lambda p: (p.parts[0], p.name))

    def copy(self, to: Path) -> Filled:
        if to.exists():
            shutil.rmtree(to)
        shutil.copytree(self.root, to)
        return Filled(to, self.told)


@pytest.fixture(scope="session")
def pristine(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Filled:
    made = Filled(tmp_path_factory.mktemp("pristine"), CHUNKS)
    host.control.off()
    host.run("fill", made.home, made.tiers, CHUNKS)
    return made


@pytest.fixture
def fresh(pristine: Filled, tmp_path: Path) -> Callable[[], Filled]:
    """Make the same home and tier again and again, in one place."""
    return lambda: pristine.copy(tmp_path / "world")


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Iterator[Tally]:
    made = Tally()
    yield made
    request.node.user_properties.append(("faults", dict(made.counts)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [r for each in terminalreporter.stats.values() for r in each]
    found = [p for r in reports if getattr(r, "when", "") == "teardown" for p in r.user_properties]
    lines = table(counts for name, counts in found if name == "faults")
    if lines:
        terminalreporter.section("faults")
        for line in lines:
            terminalreporter.line(line)
