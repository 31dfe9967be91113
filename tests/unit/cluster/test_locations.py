"""Where files are: the least busy node is the source, names can be used again, what is dropped or lost stays away."""

from collections import Counter

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, rule

from flexmarl.cluster.locations import REMEMBERED, Fetch, Locations, Sent

NODES = st.sampled_from(["a", "b", "c"])
FILES = st.sampled_from(["one", "two"])


def test_the_source_is_the_node_with_fewest_fetches_under_way() -> None:
    locations = Locations()
    assert locations.add("file", "a", 8)
    first, second = locations.begin("file", "b"), locations.begin("file", "c")
    assert first is not None
    assert second is not None
    assert (first.source, first.num_bytes, second.source) == ("a", 8, "a")
    assert locations.end("file", first.number, Sent(8))
    third = locations.begin("file", "d")
    assert third is not None
    assert (third.source, third.because) == ("b", "0 fetches under way, the fewest of 2 nodes that have it")
    other = locations.begin("file", "e", avoid=["a", "b"])
    assert other is None, "no other node has it yet"


def version(number: int, policy: str = "solver") -> str:
    return f"weights%2F{policy}%2F{number}.object"


def test_the_base_is_the_newest_file_of_its_family_and_size_that_both_nodes_have() -> None:
    locations = Locations()

    def base(file: str, to: str) -> str:
        fetch = locations.begin(file, to)
        assert fetch is not None
        assert locations.end(file, fetch.number, Sent(8))
        return fetch.base

    for number in (1, 2, 3):
        assert locations.add(version(number), "a", 8)
    assert locations.add(version(9, "judge"), "a", 8)
    assert base(version(1), "b") == "", "b has nothing"
    assert base(version(9, "judge"), "b") == "", "another family"
    assert base(version(3), "b") == version(1)
    assert locations.add(version(10), "a", 8)
    assert base(version(10), "b") == version(3), "the newest, by the order in which they came"
    assert locations.add(version(11), "a", 9)
    assert base(version(11), "b") == "", "another size"
    locations.drop(version(10))
    assert locations.add(version(10), "a", 8)
    assert locations.add(version(12), "a", 8)
    assert base(version(12), "b") == version(3), "version 10 is another file now, which b does not have"
    assert locations.add("one", "a", 8)
    assert locations.add("other", "a", 8)
    assert (base("one", "b"), base("other", "b")) == ("", ""), "files without a version have no family"


def test_fetches_are_remembered_in_the_order_in_which_they_ended() -> None:
    locations = Locations()
    locations.add("file", "a", 8)
    fetches = [locations.begin("file", f"node {number}") for number in range(REMEMBERED + 2)]
    for fetch in reversed(fetches):
        assert fetch is not None
        locations.end("file", fetch.number, Sent(8))
    number, last = locations.fetched(after=REMEMBERED)
    assert (number, [one.node for one in last]) == (REMEMBERED + 2, ["node 1", "node 0"])
    assert locations.fetched(after=number) == (number, [])
    assert len(locations.fetched(after=0)[1]) == REMEMBERED


class Schedules(RuleBasedStateMachine):
    """Any order of the calls, by a model that knows which nodes may have what."""

    fetches = Bundle("fetches")

    def __init__(self) -> None:
        super().__init__()
        self.locations = Locations()
        self.has: dict[str, set[str]] = {}
        self.under_way: dict[int, tuple[str, Fetch, str]] = {}
        self.fetched: list[tuple[str, str]] = []

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
        assert self.locations.end(file, number, Sent(1) if whole else None) == (current is not None)
        if current and whole:
            self.has[file].add(current[2])
            self.fetched.append((file, current[2]))
        number, fetched = self.locations.fetched(after=0)
        assert [(one.file, one.node) for one in fetched] == self.fetched[-number:]

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
