"""The durable experience store against TransferQueue 0.1.11, in one run on one machine.

    pip install -r requirements-bench.lock
    python benchmarks/store.py --json

A row is 512 token ids (int32) and 512 logprobs (float32) under a key. Each side has one writer process and two reader
processes, all of them asynchronous Ray actors; they stay up, and rounds take turns. A client awaits one call after the
other (`at a time` lines: several), rows are made before the clock starts, and what was read is compared with what was
written after it stopped.

    ours            `DurableStore` on a file: a put has returned when its rows are synced to the disk, so they survive
                    kill -9 and power loss; all or none of a call's rows; each key and value set once; the row's state,
                    indexes and status columns included. Readers read the file themselves.
    TransferQueue   its default backend: a controller and two storage units, three processes that the clients reach
                    over ZMQ. Rows are in memory, gone with the process that holds them; a put overwrites. `by key`:
                    its key-value interface, which asks the controller where rows are. `located`: its native client,
                    which has this metadata at hand before the clock starts.

A figure is our rate by the faster of their ways to do it. Durable puts are as fast as the disk syncs, which the table
shows round by round: a busy disk slows ours, not theirs.
"""

import asyncio
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
import torch
import transfer_queue
from common import interleaved_rates, median_ratio, parser, report
from tensordict import TensorDict

from flexmarl.experience.backends.sqlite import DurableStore
from flexmarl.experience.interface import PartialRow
from flexmarl.experience.turn_rows import TURN_COLUMNS
from flexmarl.records import AgentName, PolicyName, Version, make_sample_id, make_trajectory_id

TOKENS, SINGLES, BATCH, BATCHES, AT_ONCE, SYNCS = 512, 256, 128, 32, 16, 128
SOLVER, POLICY = AgentName("solver"), PolicyName("solver")
WANTED = {"put_single_vs_tq": 5.0, "get_single_vs_tq": 5.0, "put_batch_vs_tq": 2.0, "get_batch_vs_tq": 2.0}
Call = Callable[[], Awaitable[Any]]


class Rows:
    """The rows of one burst, the same for both sides; `first` numbers them and seeds them."""

    def __init__(self, first: int, count: int) -> None:
        rng = np.random.default_rng(first)
        self.keys = [make_sample_id("task", 0, make_trajectory_id(first + row, 0, 0)) for row in range(count)]
        self.names: list[str] = [*self.keys]
        """The keys in the type that TransferQueue asks for."""
        self.ids = rng.integers(0, 150_000, (count, TOKENS), dtype=np.int32)
        self.logprobs = -rng.random((count, TOKENS), dtype=np.float32)

    def slices(self, size: int) -> list[slice]:
        """Which rows each call puts or gets."""
        return [slice(start, start + size) for start in range(0, len(self.keys), size)]


async def rate(rows: Rows, calls: Sequence[Call], at_once: int = 1) -> tuple[float, list[Any]]:
    """Rows per second and the results, with `at_once` callers who each await one call after the other."""

    async def caller(mine: Sequence[Call]) -> list[Any]:
        return [await call() for call in mine]

    began = time.perf_counter()
    results = await asyncio.gather(*(caller(calls[index::at_once]) for index in range(at_once)))
    took = time.perf_counter() - began
    return len(rows.keys) / took, [result for of_caller in results for result in of_caller]


class Ours:
    """A process with the store: its owner, or one that joined."""

    def __init__(self, path: Path, *, owner: bool) -> None:
        self.store = (
            DurableStore.create(path, agents=[SOLVER], columns=TURN_COLUMNS) if owner else DurableStore.join(path)
        )

    async def put(self, first: int, count: int, size: int, at_once: int = 1) -> float:
        rows = Rows(first, count)
        partial_rows = [
            PartialRow(
                sample_id=key, policy=POLICY, version=Version(0), values={"response_ids": ids, "logprobs": logprobs}
            )
            for key, ids, logprobs in zip(rows.keys, rows.ids, rows.logprobs, strict=True)
        ]
        calls = [partial(self.store.put, SOLVER, partial_rows[part]) for part in rows.slices(size)]
        return (await rate(rows, calls, at_once))[0]

    async def get(self, first: int, count: int, size: int) -> float:
        rows = Rows(first, count)
        calls = [partial(self.store.get, rows.keys[part]) for part in rows.slices(size)]
        per_second, results = await rate(rows, calls)
        read = [row for result in results for row in result]
        assert [row.sample_id for row in read] == rows.keys
        assert np.array_equal([row.values["response_ids"] for row in read], rows.ids)
        assert np.array_equal([row.values["logprobs"] for row in read], rows.logprobs)
        return per_second

    async def close(self) -> None:
        await self.store.close()


class Theirs:
    """A process with TransferQueue's client; the first one starts its controller and storage units."""

    def __init__(self) -> None:
        transfer_queue.init()
        self.client = transfer_queue.get_client()

    async def put(self, first: int, count: int, size: int, at_once: int = 1) -> float:
        rows = Rows(first, count)
        ids, logprobs = torch.from_numpy(rows.ids), torch.from_numpy(rows.logprobs)
        if size == 1:
            calls: list[Call] = [
                partial(
                    transfer_queue.async_kv_put,
                    key=key,
                    partition_id=str(first),
                    fields={"response_ids": ids[row], "logprobs": logprobs[row]},
                )
                for row, key in enumerate(rows.keys)
            ]
        else:
            calls = [
                partial(
                    transfer_queue.async_kv_batch_put,
                    keys=rows.names[part],
                    partition_id=str(first),
                    fields=TensorDict({"response_ids": ids[part], "logprobs": logprobs[part]}, batch_size=size),
                )
                for part in rows.slices(size)
            ]
        return (await rate(rows, calls, at_once))[0]

    async def get(self, first: int, count: int, size: int, *, located: bool) -> float:
        rows = Rows(first, count)
        listed = [rows.names[part] for part in rows.slices(size)]
        if located:
            places = [await self.client.async_kv_retrieve_meta(keys, str(first)) for keys in listed]
            calls: list[Call] = [partial(self.client.async_get_data, place) for place in places]
        else:
            calls = [partial(transfer_queue.async_kv_batch_get, keys, str(first)) for keys in listed]
        per_second, results = await rate(rows, calls)
        for name, written in (("response_ids", rows.ids), ("logprobs", rows.logprobs)):
            read = [row for result in results for row in result[name].unbind()]
            assert np.array_equal(torch.stack(read), written)
        return per_second

    async def clear(self, first: int, count: int) -> None:
        await transfer_queue.async_kv_clear(Rows(first, count).names, str(first))

    async def close(self) -> None:
        transfer_queue.close()


def process(kind: type[Ours] | type[Theirs], *arguments: Any, **named: Any) -> Any:
    """A client in a process of its own, ready for its first call."""
    made: Any = ray.remote(num_cpus=0)(kind).remote(*arguments, **named)
    ray.get(made.__ray_ready__.remote())
    return made


class Bursts:
    """The contenders, each of which works on rows of its own; a get reads what the last put of its size wrote."""

    def __init__(self, path: Path) -> None:
        self.ours = [process(Ours, path, owner=True), *(process(Ours, path, owner=False) for _ in range(2))]
        self.theirs = [process(Theirs) for _ in range(3)]
        self.rows_put = 0
        self.newest: dict[Any, tuple[int, int]] = {}

    def put(self, side: Sequence[Any], size: int, at_once: int = 1) -> float:
        """Rows per second of the side's writer."""
        count = SINGLES if size == 1 else BATCH * BATCHES
        kind = (side is self.ours, size, at_once)
        if side is self.theirs and kind in self.newest:
            ray.get(side[0].clear.remote(*self.newest[kind]))
        self.newest[kind] = (self.rows_put, count)
        self.rows_put += count
        return ray.get(side[0].put.remote(*self.newest[kind], size, at_once))

    def get(self, side: Sequence[Any], size: int, readers: int = 1, **how: bool) -> float:
        """Rows per second of the side's readers together."""
        burst = self.newest[(side is self.ours, size, 1)]
        return sum(ray.get([reader.get.remote(*burst, size, **how) for reader in side[1 : 1 + readers]]))

    def contenders(self) -> Mapping[str, Callable[[], float]]:
        """In turn, each of ours beside each of theirs."""
        ours, theirs = self.ours, self.theirs
        return {
            "put 1: ours": partial(self.put, ours, 1),
            "put 1: TQ": partial(self.put, theirs, 1),
            "get 1: ours": partial(self.get, ours, 1),
            "get 1: TQ by key": partial(self.get, theirs, 1, located=False),
            "get 1: TQ located": partial(self.get, theirs, 1, located=True),
            f"put {BATCH}: ours": partial(self.put, ours, BATCH),
            f"put {BATCH}: TQ": partial(self.put, theirs, BATCH),
            f"get {BATCH}: ours": partial(self.get, ours, BATCH),
            f"get {BATCH}: TQ by key": partial(self.get, theirs, BATCH, located=False),
            f"get {BATCH}: TQ located": partial(self.get, theirs, BATCH, located=True),
            f"put 1, {AT_ONCE} at a time: ours": partial(self.put, ours, 1, AT_ONCE),
            f"put 1, {AT_ONCE} at a time: TQ": partial(self.put, theirs, 1, AT_ONCE),
            "get 1, two readers: ours": partial(self.get, ours, 1, readers=2),
            "get 1, two readers: TQ located": partial(self.get, theirs, 1, readers=2, located=True),
        }

    def bytes_per_row_of_theirs(self) -> float:
        """Growth of their storage units' memory over a burst, before anything was cleared."""
        self.put(self.theirs, BATCH)
        before = storage_units_bytes()
        self.put(self.theirs, BATCH, at_once=2)
        return (storage_units_bytes() - before) / (BATCH * BATCHES)

    def bytes_per_row_of_ours(self, path: Path) -> float:
        """Size of the closed file by the rows in it."""
        with_rows = DurableStore.join(path)
        ((rows,),) = asyncio.run(with_rows.query("SELECT count(*) FROM samples")).rows
        asyncio.run(with_rows.close())
        ray.get([actor.close.remote() for actor in reversed(self.ours)])
        return path.stat().st_size / rows


def storage_units_bytes() -> int:
    """Resident memory of TransferQueue's storage units, which Ray started below this process."""
    units = [p for p in psutil.Process().children(recursive=True) if p.name().startswith("ray::SimpleStor")]
    assert units
    return sum(unit.memory_info().rss for unit in units)


def syncs(folder: Path) -> float:
    """How often a second the disk syncs a new page of 8 KiB: what bounds durable puts at that moment."""
    with (folder / "sync").open("wb", buffering=0) as file:
        began = time.perf_counter()
        for _ in range(SYNCS):
            file.write(bytes(8192))
            os.fdatasync(file.fileno())
        return SYNCS / (time.perf_counter() - began)


def best_of(rates: Mapping[str, Sequence[float]], names: Sequence[str]) -> str:
    """The contender with the highest median."""
    return max(names, key=lambda name: statistics.median(rates[name]))


def main() -> None:
    options = parser(__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--folder", type=Path, default=Path("runs"), help="where the store's file is made (runs)")
    arguments = options.parse_args()
    arguments.folder.mkdir(exist_ok=True)
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    with tempfile.TemporaryDirectory(dir=arguments.folder.resolve(), prefix="bench-store-") as made:
        path = Path(made) / "experience.sqlite"
        bursts = Bursts(path)
        bytes_of_theirs = bursts.bytes_per_row_of_theirs()
        contenders = {"sync of 8 KiB": partial(syncs, Path(made)), **bursts.contenders()}
        rates = interleaved_rates(contenders, arguments.repeats)
        bytes_of_ours = bursts.bytes_per_row_of_ours(path)
        ray.get(bursts.theirs[0].close.remote())
    ray.shutdown()
    figures = {}
    for name in WANTED:
        what, size = name.split("_")[:2]
        kind = f"{what} {1 if size == 'single' else BATCH}:"
        theirs = best_of(rates, [one for one in rates if one.startswith(f"{kind} TQ")])
        figures[name] = median_ratio(rates, f"{kind} ours", theirs)
    figures |= {"bytes_per_row_on_disk": bytes_of_ours, "bytes_per_row_in_memory_tq": bytes_of_theirs}
    figures |= {
        "bytes_per_row_of_tokens": float(2 * TOKENS * 4),
        "fdatasync_us": 1e6 / statistics.median(rates["sync of 8 KiB"]),
    }
    table = [
        (name, f"{statistics.median(runs):.0f}", f"{min(runs):.0f}", f"{max(runs):.0f}", str(len(runs)))
        for name, runs in rates.items()
    ]
    title = f"rows (or syncs) a second: {TOKENS} ids and {TOKENS} logprobs a row; 1 or {BATCH} rows a call"
    report(title, ("contender", "median", "min", "max", "runs"), table, figures, as_json=arguments.json, wanted=WANTED)


if __name__ == "__main__":
    main()
