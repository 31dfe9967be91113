"""Decides from which node a file is fetched: the one with fewest fetches under way; and knows which nodes have it.

A file is set on one node, and fetched by others. Its name may be used again after it was dropped. Files follow one
another in families: `{family}%2F{version}.object`. Where both nodes of a fetch have an earlier file of its family and
size, the later one may cross as the difference between them. Nothing is kept for that.
"""

from collections import Counter, deque
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
    base: str = ""
    """The newest other file of its family and size that both nodes have."""


@dataclass(frozen=True, slots=True)
class Sent:
    """The bytes that crossed for a file."""

    num_bytes: int
    by_difference: int = 0
    """Bytes of the file that came as the difference from its base."""
    mismatched: int = 0
    """Bytes of the file that did not come out right from a difference, and crossed whole after it."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """A fetch that ended with the whole file."""

    file: str
    node: str
    """The node that has it now, too."""
    fetch: Fetch
    sent: Sent


@dataclass(slots=True)
class _File:
    num_bytes: int
    nodes: set[str]
    """Nodes that have it."""
    fetches: dict[int, tuple[Fetch, str]] = field(default_factory=dict)
    """Number -> (fetch, destination) of the fetches under way."""


def family(name: str) -> str:
    """The part of a file's name that the files share which follow one another.

    >>> family("weights%2Fsolver%2F3.object")
    'weights%2Fsolver'
    """
    return name.rpartition("%2F")[0]


REMEMBERED = 1000
"""Fetches that have ended and are remembered."""


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
        self._fetched: deque[Fetched] = deque(maxlen=REMEMBERED)
        self._ended = 0

    @property
    def names(self) -> list[str]:
        """The files that exist."""
        return sorted(self._files)

    def fetched(self, after: int) -> tuple[int, list[Fetched]]:
        """The fetches that have ended with the whole file: their number, and those that came after the first `after`.

        Only the last `REMEMBERED` are known.
        """
        new = max(0, self._ended - after)
        return self._ended, list(self._fetched)[-new:] if new else []

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
        busy = Counter(fetch.source for one in self._files.values() for fetch, _ in one.fetches.values())
        source = min(sources, key=lambda node: (busy[node], node))
        number = next(self._numbers)
        because = f"{busy[source]} fetches under way, the fewest of {len(sources)} nodes that have it"
        fetch = Fetch(number, source, file.num_bytes, because, self._base(name, {source, to}))
        file.fetches[number] = (fetch, to)
        return fetch

    def end(self, name: str, number: int, sent: Sent | None) -> bool:
        """Ends a fetch, which failed if nothing was `sent`.

        Returns False if the file was dropped meanwhile: then what was fetched must go, too.
        """
        file = self._files.get(name)
        if file is None or number not in file.fetches:
            return False
        fetch, to = file.fetches.pop(number)
        if sent is not None:
            file.nodes.add(to)
            self._fetched.append(Fetched(name, to, fetch, sent))
            self._ended += 1
        return True

    def drop(self, name: str) -> Collection[str]:
        """Forgets a file. Returns the nodes that have it or are fetching it."""
        file = self._files.pop(name, None)
        return {*file.nodes, *(to for _, to in file.fetches.values())} if file else ()

    def lose(self, node: str) -> list[Fetch]:
        """Forgets what a lost node had. A file that no other node has is gone. Returns the fetches to the lost node."""
        ended: list[Fetch] = []
        for name, file in list(self._files.items()):
            file.nodes.discard(node)
            ended += [fetch for fetch, to in file.fetches.values() if to == node]
            file.fetches = {number: fetch for number, fetch in file.fetches.items() if fetch[1] != node}
            if not file.nodes:
                del self._files[name]
        return ended

    def _base(self, name: str, nodes: set[str]) -> str:
        size = self._files[name].num_bytes
        bases = [
            other
            for other, file in self._files.items()  # In order of their `add`.
            if other != name and family(other) == family(name) and file.num_bytes == size and nodes <= file.nodes
        ]
        return bases[-1] if bases and family(name) else ""
