from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from store.faults import shim
from store.faults.host import Host
from store.faults.tally import Tally, table
from store.faults.verbs import Tokens, chunks, shared_at, tier_at

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
    host.control.raw.skew = host.control.raw.named = 0


class Filled:
    """A home, and a tier in it or beside it, with durable chunks; `copy` makes another of it.

    ``kind``: of a tier that others may use too.
    """

    def __init__(
        self, root: Path, told: dict[str, Tokens], *, inside: bool = False, kind: str = ""
    ) -> None:
        self.root, self.told, self.inside, self.kind = root, told, inside, kind
        self.home = root / "home"
        self.tier = self.home / "tier" if inside else root / "tier"
        self.tiers = (shared_at(self.tier, kind) if kind else tier_at(self.tier),)

    @property
    def may(self) -> dict[str, list[Tokens | None]]:
        return {name: [tokens] for name, tokens in self.told.items()}

    def in_tier(self, path: Path) -> bool:
        """Whether it is the tier's and not the index's."""
        return self.tier in (self.root / path).parents

    def files(self) -> list[Path]:
        """Every file, as paths from the root."""
        return sorted(p.relative_to(self.root) for p in self.root.rglob("*") if p.is_file())

    def copy(self, to: Path) -> Filled:
        if to.exists():
            shutil.rmtree(to)
        shutil.copytree(self.root, to)
        return Filled(to, self.told, inside=self.inside, kind=self.kind)

    def restore(self, original: Filled, *, tier: bool) -> None:
        """Put back the home's own files as they were, and with ``tier`` also what was in that."""
        for path in self.files():
            if not self.in_tier(path):
                (self.root / path).unlink()
        for path in original.files():
            if tier or not original.in_tier(path):
                (self.root / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(original.root / path, self.root / path)


def _filled(host: Host, root: Path, *, inside: bool = False, kind: str = "") -> Filled:
    made = Filled(root, CHUNKS, inside=inside, kind=kind)
    if kind:
        made.tier.mkdir()
    host.control.off()
    host.run("fill", made.home, made.tiers, CHUNKS)
    return made


@pytest.fixture(scope="session")
def pristine(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Filled:
    return _filled(host, tmp_path_factory.mktemp("pristine"))


@pytest.fixture(scope="session")
def pristine_inside(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Filled:
    return _filled(host, tmp_path_factory.mktemp("inside"), inside=True)


@pytest.fixture(scope="session")
def pristine_of(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Filled]:
    """By kind of tier, one that others may use too."""
    made: dict[str, Filled] = {}

    def get(kind: str) -> Filled:
        if kind not in made:
            made[kind] = _filled(host, tmp_path_factory.mktemp(kind), kind=kind)
        return made[kind]

    return get


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
