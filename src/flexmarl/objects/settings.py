"""Settings of published weights."""

from typing import Literal

from pydantic import Field

from flexmarl.settings import Settings

Verify = Literal["full", "names"]
"""The part of a version that an engine checks itself; see `ObjectSettings.verify`."""


class ObjectSettings(Settings):
    """How published weights cross between nodes, and how they are checked."""

    verify: Literal["auto", "full", "names"] = Field(
        default="auto",
        description="What an engine checks before it serves a version. full: a digest of every byte that it holds; "
        "names: names, dtypes and shapes; the bytes are trusted as the object store gives them. "
        "auto: full on a CPU, names on accelerators.",
    )

    delta: Literal["off", "auto"] = Field(
        default="auto",
        description="ray, between nodes: auto sends the parts of a version in which few numbers changed as their "
        "difference from the version before it, if the receiving node has that one; off: whole, always.",
    )

    memory_gib: float | None = Field(
        default=None,
        ge=0,
        description="ray: shared memory of each node, in GiB, that published weights take at most. Beyond it, those "
        "that went unread for longest are in files of the temp folder (TMPDIR); null: they are all in memory, and a "
        "run whose weights have no room there ends.",
    )

    @property
    def memory_bytes(self) -> int | None:
        """`memory_gib` in bytes.

        >>> ObjectSettings(memory_gib=0.5).memory_bytes
        536870912
        """
        return None if self.memory_gib is None else int(self.memory_gib * 2**30)

    def level(self, device: str) -> Verify:
        """The part that engines on this device check.

        >>> ObjectSettings().level("cpu"), ObjectSettings().level("cuda:0")
        ('full', 'names')
        """
        if self.verify == "auto":
            return "full" if device == "cpu" else "names"
        return self.verify
