"""The open contexts of an engine: each namespace has its own, by name."""

from __future__ import annotations

from collections.abc import Iterator

from kvweave.errors import ContextNotFound, NameTaken, nearest
from kvweave.weave.context import Context


class Contexts:
    """Contexts by namespace and name; two namespaces may use one name and never see each other."""

    def __init__(self) -> None:
        self._spaces: dict[str, dict[str, Context]] = {"": {}}

    def __iter__(self) -> Iterator[Context]:
        return iter([c for space in self._spaces.values() for c in space.values()])

    def of(self, namespace: str) -> dict[str, Context]:
        """Return the contexts of one namespace by name."""
        return self._spaces.get(namespace, {})

    def get(self, name: str, namespace: str = "") -> Context:
        """Return a context. Raises ContextNotFound."""
        mine = self.of(namespace)
        if name not in mine:
            raise ContextNotFound(name, nearest(name, mine))
        return mine[name]

    def require_free(self, name: str, namespace: str) -> None:
        """Raise NameTaken if there is a context of that name."""
        if name in self.of(namespace):
            raise NameTaken(name, 0)

    def add(self, context: Context) -> None:
        """Add a context under its own name and namespace."""
        self._spaces.setdefault(context.namespace, {})[context.name] = context

    def remove(self, context: Context) -> None:
        """Forget a context."""
        mine = self._spaces[context.namespace]
        del mine[context.name]
        if not mine and context.namespace:
            del self._spaces[context.namespace]
