"""Decides from which node a file is fetched: the one with fewest fetches under way; and knows which nodes have it.

A file is set on one node, and fetched by others. Its name may be used again after it was dropped.
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import count


@dataclass(frozen=True, slots=True)
class Fetch:
    """One node's permission to copy a file from another node."""

    number: int
    """Unique. A fetch that ends with an unknown number was overtaken: its file was dropped."""
    source: str
    """The node to copy from."""
    num_bytes: int
    """Size of the file."""
    because: str


@dataclass(slots=True)
class _File:
    num_bytes: int
    nodes: set[str]
    """Nodes that have it."""
    fetches: dict[int, tuple[str, str]] = field(default_factory=dict)
    """Number -> (source, destination) of the fetches under way."""


class Locations:
    """The nodes that have each file of a run.

    >>> locations = Locations()
    >>> locations.add("weights", "a", 8)
    True
    >>> locations.begin("weights", "b").source
    'a'
    """

    def __init__(self) -> None:
        self._files: dict[str, _File] = {}
        self._numbers = count(1)
        self.fetched: Counter[tuple[str, str]] = Counter()
        """(file, node) -> fetches that have ended with the whole file."""

    @property
    def names(self) -> list[str]:
        """The files that exist."""
        return sorted(self._files)

    def add(self, name: str, node: str, num_bytes: int) -> bool:
        """Adds a new file, which `node` has. Returns False if there is a file of this name."""
        if name in self._files:
            return False
        self._files[name] = _File(num_bytes, {node})
        return True

    def begin(self, name: str, to: str, *, avoid: Collection[str] = ()) -> Fetch | None:
        """Begins a fetch to node `to`, from no node in `avoid`; None if no other node has the file."""
        file = self._files.get(name)
        sources = sorted(file.nodes - {to, *avoid}) if file else []
        if file is None or not sources:
            return None
        busy = Counter(source for one in self._files.values() for source, _ in one.fetches.values())
        source = min(sources, key=lambda node: (busy[node], node))
        number = next(self._numbers)
        file.fetches[number] = (source, to)
        because = f"{busy[source]} fetches under way, the fewest of {len(sources)} nodes that have it"
        return Fetch(number, source, file.num_bytes, because)

    def end(self, name: str, number: int, *, whole: bool) -> bool:
        """Ends a fetch. Returns False if the file was dropped meanwhile: then what was fetched must go, too."""
        file = self._files.get(name)
        if file is None or number not in file.fetches:
            return False
        _, to = file.fetches.pop(number)
        if whole:
            file.nodes.add(to)
            self.fetched[name, to] += 1
        return True

    def drop(self, name: str) -> Collection[str]:
        """Forgets a file. Returns the nodes that have it or are fetching it."""
        file = self._files.pop(name, None)
        return {*file.nodes, *(to for _, to in file.fetches.values())} if file else ()

    def lose(self, node: str) -> None:
        """Forgets what a lost node had and what it was fetching. A file that no other node has is gone."""
        for name, file in list(self._files.items()):
            file.nodes.discard(node)
            file.fetches = {number: fetch for number, fetch in file.fetches.items() if fetch[1] != node}
            if not file.nodes:
                del self._files[name]
