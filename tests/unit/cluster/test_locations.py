"""Where files are: the least busy node is the source, names can be used again, what is dropped or lost stays away."""

from collections import Counter

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, rule

from flexmarl.cluster.locations import Fetch, Locations

NODES = st.sampled_from(["a", "b", "c"])
FILES = st.sampled_from(["one", "two"])


def test_the_source_is_the_node_with_fewest_fetches_under_way() -> None:
    locations = Locations()
    assert locations.add("file", "a", 8)
    first, second = locations.begin("file", "b"), locations.begin("file", "c")
    assert first is not None
    assert second is not None
    assert (first.source, first.num_bytes, second.source) == ("a", 8, "a")
    assert locations.end("file", first.number, whole=True)
    third = locations.begin("file", "d")
    assert third is not None
    assert (third.source, third.because) == ("b", "0 fetches under way, the fewest of 2 nodes that have it")
    other = locations.begin("file", "e", avoid=["a", "b"])
    assert other is None, "no other node has it yet"


class Schedules(RuleBasedStateMachine):
    """Any order of the calls, by a model that knows which nodes may have what."""

    fetches = Bundle("fetches")

    def __init__(self) -> None:
        super().__init__()
        self.locations = Locations()
        self.has: dict[str, set[str]] = {}
        self.under_way: dict[int, tuple[str, Fetch, str]] = {}
        self.fetched: Counter[tuple[str, str]] = Counter()

    @rule(file=FILES, node=NODES)
    def add(self, file: str, node: str) -> None:
        assert self.locations.add(file, node, 1) == (file not in self.has)
        self.has.setdefault(file, {node})

    @rule(file=FILES, node=NODES, target=fetches)
    def begin(self, file: str, node: str) -> tuple[str, int]:
        fetch = self.locations.begin(file, node)
        sources = self.has.get(file, set()) - {node}
        assert (fetch is not None) == bool(sources)
        if fetch is None:
            return file, 0
        busy = Counter(one.source for _, one, _ in self.under_way.values())
        assert fetch.source in sources
        assert busy[fetch.source] == min(busy[source] for source in sources)
        self.under_way[fetch.number] = file, fetch, node
        return file, fetch.number

    @rule(fetch=consumes(fetches), whole=st.booleans())
    def end(self, fetch: tuple[str, int], whole: bool) -> None:
        file, number = fetch
        current = self.under_way.pop(number, None)
        assert self.locations.end(file, number, whole=whole) == (current is not None)
        if current and whole:
            self.has[file].add(current[2])
            self.fetched[file, current[2]] += 1
        assert self.locations.fetched == self.fetched

    @rule(file=FILES)
    def drop(self, file: str) -> None:
        fetching = {node for one, _, node in self.under_way.values() if one == file}
        assert set(self.locations.drop(file)) == self.has.pop(file, set()) | fetching
        self._forget(lambda one, _: one == file)

    @rule(node=NODES)
    def lose(self, node: str) -> None:
        self.locations.lose(node)
        self._forget(lambda _, to: to == node)
        self.has = {file: nodes - {node} for file, nodes in self.has.items() if nodes - {node}}
        self._forget(lambda one, _: one not in self.has)
        assert self.locations.names == sorted(self.has)

    def _forget(self, gone) -> None:
        self.under_way = {number: one for number, one in self.under_way.items() if not gone(one[0], one[2])}


TestSchedules = Schedules.TestCase
