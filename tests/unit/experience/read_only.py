"""A process that tries what needs to write, and reads, in a folder that cannot be written."""

import asyncio
import sys
from pathlib import Path

from flexmarl.errors import StoreError
from flexmarl.experience.backends.sqlite import DurableStore
from flexmarl.experience.store_file import read_store
from flexmarl.testing.experience import AGENTS, COLUMNS

if __name__ == "__main__":
    path = Path(sys.argv[1])
    attempts = (
        lambda: DurableStore.open(path),
        lambda: DurableStore.join(path),
        lambda: DurableStore.create(path.with_name("new.sqlite"), agents=AGENTS, columns=COLUMNS),
    )
    for attempt in attempts:
        try:
            asyncio.run(attempt().close())
        except StoreError as error:
            print(error)
    for stored in (path, path.parent / "killed" / path.name):
        try:
            with read_store(stored) as reader:
                print(reader.query("SELECT count(*) FROM solver"))
        except StoreError as error:
            print(error)
