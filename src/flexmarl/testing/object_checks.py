"""Conformance suite of object stores.

    await check_object_store(lambda: MyStore())

It raises AssertionError with the broken clause of the contract. The fake is InlineObjectStore. In
`flexmarl.simulator.modelled_residents.SimulatedObjectStore` transfers take virtual time.
"""

from collections.abc import Awaitable, Callable

import torch

from flexmarl.objects.interface import ObjectKey, ObjectStore, TensorTree, checksum, names_checksum

KEYS = ("weights/solver/3", "weights%2Fsolver%2F3", "..", "/", "", "a b\n\x00", "Ä☃", "w" * 1000, "w" * 1001)
"""Keys that a careless store mistakes for paths, or for one another."""


def heterogeneous_tree() -> dict[str, torch.Tensor]:
    """Makes tensors of many dtypes and shapes: empty ones, a scalar, non-contiguous ones, and many small ones."""
    numbers = torch.arange(24.0)
    return {
        "layers.0.weight": numbers.view(4, 6),
        "layers.0.transposed": numbers.view(4, 6).T,
        "layers.0.every_second": numbers[::2],
        "expanded": torch.ones(1).expand(5),
        "half": numbers.bfloat16(),
        "double": numbers.double() / 3,
        "step": torch.tensor(7),
        "mask": numbers > 3,
        "empty": torch.zeros(0),
        "empty_matrix": torch.zeros(3, 0, dtype=torch.bfloat16),
        "nan": torch.tensor([float("nan"), -0.0]),
        "trained": torch.ones(2, requires_grad=True),
        **{f"small.{i}": torch.full((i % 5,), i, dtype=torch.int16) for i in range(200)},
    }


async def check_object_store(make: Callable[[], ObjectStore]) -> None:
    """Checks every clause of the contract on a fresh store; raises AssertionError with the one that it breaks."""
    for clause in (
        _gives_back_the_same,
        _keeps_a_copy,
        _tells_keys_apart,
        _sets_a_key_once,
        _fills,
        _refuses_to_fill,
        _is_taken,
        _releases,
    ):
        await clause(make())


async def _gives_back_the_same(store: ObjectStore) -> None:
    for name, tree in {"heterogeneous": heterogeneous_tree(), "nothing": dict[str, torch.Tensor]()}.items():
        meta = await store.set(ObjectKey(name), tree)
        got = await store.get(meta.key)
        assert meta.checksum == checksum(tree) == checksum(got), f"{name}: the checksum must be that of the tree"
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tree.values())
        assert meta.num_bytes >= num_bytes, f"{name}: it has {num_bytes} bytes, reported were {meta.num_bytes}"
        _check_equal(got, tree)


async def _keeps_a_copy(store: ObjectStore) -> None:
    mine = torch.zeros(3)
    await store.set(ObjectKey("k"), {"w": mine})
    mine.fill_(9.0)
    assert (await store.get(ObjectKey("k")))["w"].tolist() == [0.0] * 3, "the caller's later writes must not be seen"


async def _tells_keys_apart(store: ObjectStore) -> None:
    for number, key in enumerate(KEYS):
        await store.set(ObjectKey(key), {"number": torch.tensor(number)})
    for number, key in enumerate(KEYS):
        got = (await store.get(ObjectKey(key)))["number"].item()
        assert got == number, f"key {key[:40]!r} must name its own object, not that of {KEYS[int(got)][:40]!r}"


async def _sets_a_key_once(store: ObjectStore) -> None:
    await store.set(ObjectKey("k"), {"w": torch.zeros(1)})
    await _refuses(ValueError, store.set(ObjectKey("k"), {"w": torch.ones(1)}), "setting a key again", "'k'")
    assert (await store.get(ObjectKey("k")))["w"].item() == 0.0, "the first object must stay"


async def _fills(store: ObjectStore) -> None:
    key, tree = ObjectKey("k"), {name: tensor.detach() for name, tensor in heterogeneous_tree().items()}
    large = torch.arange(600_000)  # More than one piece of a copy.
    await store.set(key, {**tree, "large": large})
    for verify in ("full", "names"):
        mine = {name: torch.ones_like(tensor).contiguous() for name, tensor in tree.items()} | {"large": large * 0}
        got = await store.get_into(key, mine, verify=verify)
        digest = checksum(mine) if verify == "full" else names_checksum(mine)
        assert got == digest, "get_into must return the checksum of what the caller's tensors hold"
        _check_equal(mine, {**tree, "large": large})
    mine["large"].zero_()
    assert torch.equal((await store.get(key))["large"], large), "the caller's later writes must not be seen"


async def _refuses_to_fill(store: ObjectStore) -> None:
    await store.set(ObjectKey("k"), {"a": torch.ones(2), "b": torch.ones(3)})
    mine = torch.zeros(2)
    for b in ({"b": torch.zeros(4)}, {"b": torch.zeros(3).double()}, {}, {"b": torch.zeros(3), "c": torch.zeros(1)}):
        name = "'c'" if "c" in b else "'b'"
        await _refuses(ValueError, store.get_into(ObjectKey("k"), {"a": mine, **b}), "another layout", name)
    await _refuses(KeyError, store.get_into(ObjectKey("other"), {"a": mine}), "getting an unknown object", "other")
    assert mine.tolist() == [0.0, 0.0], "a refused get_into must leave the caller's tensors as they were"


async def _is_taken(store: ObjectStore) -> None:
    tree = {name: tensor.detach() for name, tensor in heterogeneous_tree().items()}
    await store.set(ObjectKey("state/1"), tree)
    taken = dict(await store.take(ObjectKey("state/1")))
    _check_equal(taken, tree)
    await _refuses(KeyError, store.get(ObjectKey("state/1")), "getting an object that was taken", "state/1")
    await _refuses(KeyError, store.take(ObjectKey("state/1")), "taking an object twice", "state/1")
    await store.set(ObjectKey("state/2"), {name: torch.zeros_like(tensor) for name, tensor in tree.items()})
    _check_equal(taken, tree)
    taken["layers.0.weight"].fill_(3.0)
    await store.set(ObjectKey("state/3"), taken)
    del taken
    changed = {**tree, "layers.0.weight": torch.full((4, 6), 3.0)}
    _check_equal(await store.get(ObjectKey("state/3")), changed)
    reading = await store.get(ObjectKey("state/3"))
    again = dict(await store.take(ObjectKey("state/3")))
    again["layers.0.weight"].fill_(4.0)
    _check_equal(reading, changed)
    await store.set(ObjectKey("state/4"), {**again, "half": torch.ones(24, dtype=torch.bfloat16)})
    _check_equal(await store.get(ObjectKey("state/4")), {**again, "half": torch.ones(24, dtype=torch.bfloat16)})


async def _releases(store: ObjectStore) -> None:
    for key in ("gone", "stays"):
        await store.set(ObjectKey(key), {"w": torch.ones(2)})
    reading = await store.get(ObjectKey("gone"))
    await store.release(ObjectKey("gone"))
    await store.release(ObjectKey("gone"))
    await _refuses(KeyError, store.get(ObjectKey("gone")), "getting a released object", "stays")
    assert reading["w"].tolist() == [1.0, 1.0], "who has got an object may read on after its release"
    await store.set(ObjectKey("gone"), {"w": torch.zeros(1)})


async def _refuses(error: type[Exception], call: Awaitable[object], what: str, says: str) -> None:
    message = None
    try:
        await call
    except error as raised:
        message = str(raised)
    assert message is not None, f"{what} must raise {error.__name__}"
    assert says in message, f"{what} must name {says}, said: {message}"


def _check_equal(got: TensorTree, tree: TensorTree) -> None:
    assert got.keys() == tree.keys(), f"names must come back, got {sorted(got)}"
    for name, tensor in tree.items():
        assert got[name].dtype == tensor.dtype, f"{name}: dtype must be {tensor.dtype}, got {got[name].dtype}"
        assert got[name].shape == tensor.shape, f"{name}: shape must be {tensor.shape}, got {got[name].shape}"
        assert torch.equal(got[name].nan_to_num(5), tensor.nan_to_num(5)), f"{name}: values must come back"
