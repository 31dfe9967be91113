"""A process that fills a disk, makes room and goes on: what it was told of is there, and nothing else.

python full_disk.py room FOLDER     the disk is small; a file beside the store is removed
python full_disk.py limit FOLDER    the process may write files of three megabytes only; the limit is lifted
"""

import asyncio
import itertools
import resource
import shutil
import sys
from pathlib import Path

from flexmarl.errors import StoreError
from flexmarl.experience.backends.sqlite import DurableStore
from flexmarl.testing.experience import SOLVER, sample
from tests.unit.experience.acknowledging import a_row, the_store, tokens


async def put_until_refused(store: DurableStore) -> int:
    for group in itertools.count():
        try:
            await store.put(SOLVER, [a_row(group)])
        except StoreError as error:
            print(error)
            return group
    raise AssertionError


async def main(what: str, folder: Path) -> None:
    path, ballast = folder / "experience.sqlite", folder / "ballast"
    ballast.write_bytes(bytes(2_000_000))
    if what == "limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (3_000_000, resource.RLIM_INFINITY))
    store = the_store("create", path)
    acknowledged = await put_until_refused(store)
    print("free when refused:", shutil.disk_usage(folder).free)
    assert (await store.query("SELECT count(*) FROM samples")).rows == ((acknowledged,),)
    if what == "limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    ballast.unlink()
    for group in range(acknowledged, acknowledged + 20):
        await store.put(SOLVER, [a_row(group)])
    await store.close()
    store = the_store("open", path)
    rows = await store.get([sample(group) for group in range(acknowledged + 20)])
    assert all(row.values["tensor"].tolist() == tokens(group).tolist() for group, row in enumerate(rows))
    assert (await store.query("SELECT count(*) FROM samples")).rows == ((len(rows),),)
    await store.close()
    print("all there:", acknowledged, "and 20 more")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
