"""Placement: no node is overfull, all get room or none, policies spread, equal clusters give equal places."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.cluster.interface import ClusterNode
from flexmarl.cluster.placement import NoRoom, Placed, PoolNodes, RoomRequest, needed, place
from flexmarl.records import InstanceId, PolicyName, WorkerId

NAMES = ("a", "b", "c", "d")


def node(name: str, *, cpus: int = 4, devices: int = 0) -> ClusterNode:
    return ClusterNode(name=name, id=name, address=name, cpus=cpus, devices=devices)


def engine(
    policy: str, number: int, *, devices: int = 0, on: str | None = None, takes_turns: bool = False
) -> RoomRequest:
    name = WorkerId.engine(InstanceId(PolicyName(policy), number))
    return RoomRequest(name=name, devices=devices, pool="rollout", node=on, takes_turns=takes_turns)


def rank(place: int, number: int = 0, *, devices: int = 0, group: str = "") -> RoomRequest:
    name = WorkerId.rank(place, number)
    return RoomRequest(name=name, devices=devices, pool="training", takes_turns=True, group=group)


def trainer(policy: str, *, devices: int = 0) -> RoomRequest:
    return RoomRequest(name=WorkerId.trainer(policy), devices=devices, pool="training")


def everywhere(nodes: Sequence[ClusterNode], devices: int | None = None) -> dict[str, PoolNodes]:
    pool = PoolNodes(nodes=frozenset(node.name for node in nodes), devices=devices)
    return {"rollout": pool, "training": pool}


@st.composite
def clusters(draw: st.DrawFn) -> tuple[list[ClusterNode], list[RoomRequest], dict[str, PoolNodes]]:
    nodes = [
        node(name, cpus=draw(st.integers(0, 5)), devices=draw(st.integers(0, 4)))
        for name in NAMES[: draw(st.integers(1, 4))]
    ]
    policies = draw(st.lists(st.sampled_from(["one", "two"]), max_size=8))
    requests = [
        engine(policy, number, devices=draw(st.integers(0, 2)), on=draw(st.sampled_from([None, None, nodes[0].name])))
        for number, policy in enumerate(policies)
    ]
    requests = [replace(request, takes_turns=draw(st.booleans())) for request in requests]
    requests += [trainer(policy, devices=draw(st.integers(0, 2))) for policy in draw(st.sets(st.sampled_from("xyz")))]
    requests += [rank(number, devices=draw(st.integers(0, 2))) for number in range(draw(st.integers(0, 4)))]
    for number in range(4, 4 + draw(st.integers(0, 2))):
        devices, ranks = draw(st.integers(0, 2)), draw(st.integers(2, 3))
        requests += [rank(number, one, devices=devices, group=f"place-{number}") for one in range(ranks)]
    requests = draw(st.permutations(requests))
    pools = {
        pool: PoolNodes(
            nodes=frozenset(draw(st.sets(st.sampled_from([node.name for node in nodes])))),
            devices=draw(st.none() | st.integers(0, 4)),
        )
        for pool in ("rollout", "training")
    }
    return nodes, requests, pools


@given(clusters(), st.randoms(use_true_random=False))
def test_no_node_or_pool_is_overfull_and_the_order_of_nodes_is_no_matter(
    cluster: tuple[list[ClusterNode], list[RoomRequest], dict[str, PoolNodes]], dice: random.Random
) -> None:
    nodes, requests, pools = cluster
    found = place(requests, nodes=nodes, pools=pools)
    assert found == place(requests, nodes=dice.sample(nodes, len(nodes)), pools=pools)
    if isinstance(found, NoRoom):
        assert "CPU and" in found.because
        return
    groups = {placed.request.group for placed in found if placed.request.group}
    assert all(len({placed.node for placed in found if placed.request.group == group}) == 1 for group in groups)
    assert [placed.request for placed in found] == requests
    assert all(placed.because for placed in found)
    for there in nodes:
        here = [placed.request for placed in found if placed.node == there.name]
        rooms = {placed.room: placed.request for placed in found if placed.node == there.name}
        assert len(rooms) <= there.cpus
        assert sum(request.devices for request in rooms.values()) <= there.devices
        for name, pool in pools.items():
            of_pool = [request for request in here if request.pool == name and request.node is None]
            assert there.name in pool.nodes or not of_pool
            if pool.devices is not None and sum(request.devices for request in here if request.pool == name):
                assert sum(request.devices for request in here if request.pool == name) <= pool.devices
    for request, placed in zip(requests, found, strict=True):
        assert request.node in (None, placed.node)
    assert_rooms_are_shared_in_turn(found)


def assert_rooms_are_shared_in_turn(found: Sequence[Placed]) -> None:
    """One resident has a room, or one of each pool: then both take turns, on the same devices."""
    rooms: dict[tuple[str, int], list[RoomRequest]] = {}
    for placed in found:
        rooms.setdefault((placed.node, placed.room), []).append(placed.request)
    for inside in rooms.values():
        if len(inside) > 1:
            one, other = inside
            assert one.takes_turns
            assert other.takes_turns
            assert {one.pool, other.pool} == {"rollout", "training"}
            assert one.devices == other.devices


@given(st.integers(0, 5), st.integers(0, 5), st.integers(0, 3), st.data())
def test_what_takes_turns_needs_the_larger_number_of_rooms_not_the_sum(
    engines: int, ranks: int, alone: int, data: st.DataObject
) -> None:
    requests = data.draw(
        st.permutations(
            [
                *(engine("one", number, devices=1, takes_turns=True) for number in range(engines)),
                *(engine("judge", number, devices=1) for number in range(alone)),
                *(rank(number, devices=1) for number in range(ranks)),
            ]
        )
    )
    rooms = max(engines, ranks) + alone
    assert needed(requests) == (rooms, rooms)
    enough = [node("a", cpus=rooms, devices=rooms)]
    found = place(requests, nodes=enough, pools=everywhere(enough))
    assert isinstance(found, list)
    assert {placed.room for placed in found} == set(range(rooms))
    assert_rooms_are_shared_in_turn(found)
    if rooms:
        for less in (node("a", cpus=rooms - 1, devices=rooms), node("a", cpus=rooms, devices=rooms - 1)):
            assert isinstance(place(requests, nodes=[less], pools=everywhere([less])), NoRoom)


@given(st.lists(st.integers(0, 9), max_size=8))
def test_who_comes_in_place_of_a_lost_one_has_its_room(losses: list[int]) -> None:
    """Two engines and two ranks in two rooms. Each loss is followed by another resident of the same kind."""
    nodes = [node("a", cpus=2, devices=2)]
    first = [engine("one", n, devices=1, takes_turns=True) for n in range(2)] + [rank(n, devices=1) for n in range(2)]
    held = place(first, nodes=nodes, pools=everywhere(nodes))
    assert isinstance(held, list)
    for number, loss in enumerate(losses, start=2):
        lost = held.pop(loss % len(held))
        new = (
            rank(number, devices=1)
            if lost.request.pool == "training"
            else replace(lost.request, name=WorkerId.engine(InstanceId(PolicyName("one"), number)))
        )
        came = place([new], nodes=nodes, pools=everywhere(nodes), held=held)
        assert isinstance(came, list)
        assert (came[0].node, came[0].room) == (lost.node, lost.room)
        assert "it takes turns with" in came[0].because
        held += came
        assert_rooms_are_shared_in_turn(held)


@given(st.lists(st.sampled_from(["one", "two", "three"]), max_size=12), st.integers(1, 4))
def test_where_there_is_room_the_instances_of_a_policy_spread_evenly(policies: list[str], number: int) -> None:
    nodes = [node(name, cpus=12) for name in NAMES[:number]]
    requests = [engine(policy, index) for index, policy in enumerate(policies)]
    found = place(requests, nodes=nodes, pools=everywhere(nodes))
    assert not isinstance(found, NoRoom)
    for policy in set(policies):
        counts = Counter(placed.node for placed in found if placed.request.name.policy == policy)
        assert max(counts.values()) - min(counts[one.name] for one in nodes) <= 1
    loads = Counter(placed.node for placed in found)
    assert max(loads.values(), default=0) - min(loads[one.name] for one in nodes) <= len(set(policies))


def test_what_is_held_already_counts() -> None:
    nodes = [node("a", cpus=2), node("b", cpus=2)]
    first = place([engine("one", 0), engine("one", 1)], nodes=nodes, pools=everywhere(nodes))
    assert isinstance(first, list)
    assert [placed.node for placed in first] == ["a", "b"]
    held = [Placed(request=engine("one", 2), node="a", room=1, because=""), *first]
    again = place([engine("one", 3)], nodes=nodes, pools=everywhere(nodes), held=held)
    assert isinstance(again, list)
    assert (again[0].node, again[0].because) == ("b", "no other node has room")
    full = place([engine("one", 3), engine("two", 0)], nodes=nodes, pools=everywhere(nodes), held=held)
    assert isinstance(full, NoRoom), "all or none"
    assert "engine/two/0 needs 1 CPU and 0 GPU on one node; a has 2 CPU and 0 GPU, of which 2 CPU" in full.because


def test_those_with_most_devices_choose_first_and_never_span_nodes() -> None:
    nodes = [node("a", cpus=9, devices=4), node("b", cpus=9, devices=4)]
    requests = [engine("small", 0, devices=1), engine("small", 1, devices=1), engine("large", 0, devices=4)]
    found = place(requests, nodes=nodes, pools=everywhere(nodes))
    assert isinstance(found, list)
    assert [placed.node for placed in found] == ["b", "b", "a"]
    assert isinstance(place([engine("large", 0, devices=5)], nodes=nodes, pools=everywhere(nodes)), NoRoom)


def test_a_group_gets_one_node_or_none() -> None:
    nodes = [node("a", cpus=2), node("b", cpus=3)]
    first = [rank(0, number, group="place-0") for number in range(2)]
    found = place([engine("one", 0, on="a"), *first], nodes=nodes, pools=everywhere(nodes))
    assert isinstance(found, list)
    assert [placed.node for placed in found] == ["a", "b", "b"]
    second = [rank(1, number, group="place-1") for number in range(2)]
    full = place(second, nodes=nodes, pools=everywhere(nodes), held=found)
    assert isinstance(full, NoRoom), "each node has one room left"
    tight, engines = [node("a", cpus=2), node("b", cpus=2)], [engine("one", number) for number in range(2)]
    assert isinstance(place([*engines, *second], nodes=tight, pools=everywhere(tight)), list), "it chooses first"
    assert "rank/1/0 with 1 more of its group needs 2 CPU and 0 GPU on one node; a has 2 CPU" in full.because


@pytest.mark.parametrize(("devices", "fits"), [(3, True), (2, False)])
def test_a_pool_takes_no_more_devices_of_a_node_than_it_may(devices: int, fits: bool) -> None:
    nodes = [node("a", cpus=9, devices=4)]
    requests = [engine("one", number, devices=1) for number in range(3)]
    assert isinstance(place(requests, nodes=nodes, pools=everywhere(nodes, devices)), list) == fits


def test_a_node_outside_the_pool_is_used_only_by_who_names_it() -> None:
    nodes = [node("a"), node("b")]
    pools = {"rollout": PoolNodes(nodes=frozenset("b")), "training": PoolNodes(nodes=frozenset())}
    found = place([engine("one", 0), engine("one", 1, on="a")], nodes=nodes, pools=pools)
    assert isinstance(found, list)
    assert [(placed.node, placed.because) for placed in found] == [
        ("b", "no other node has room"),
        ("a", "it was asked for"),
    ]
    tight = [node("a", cpus=1), node("b", cpus=1)]
    found = place([engine("one", 0), engine("one", 1, on="a")], nodes=tight, pools=everywhere(tight))
    assert isinstance(found, list), "who may be on one node only chooses first"
    assert [placed.node for placed in found] == ["b", "a"]
    refused = place([trainer("one")], nodes=nodes, pools=pools)
    assert isinstance(refused, NoRoom)
    assert "no node is allowed to have it" in refused.because
