"""Settings of published weights."""

from typing import Literal

from pydantic import Field

from flexmarl.settings import Settings

Verify = Literal["full", "names"]
"""The part of a version that an engine checks itself; see `ObjectSettings.verify`."""


class ObjectSettings(Settings):
    """How published weights are checked."""

    verify: Literal["auto", "full", "names"] = Field(
        default="auto",
        description="What an engine checks before it serves a version. full: a digest of every byte that it holds; "
        "names: names, dtypes and shapes; the bytes are trusted as the object store gives them. "
        "auto: full on a CPU, names on accelerators.",
    )

    def level(self, device: str) -> Verify:
        """The part that engines on this device check.

        >>> ObjectSettings().level("cpu"), ObjectSettings().level("cuda:0")
        ('full', 'names')
        """
        if self.verify == "auto":
            return "full" if device == "cpu" else "names"
        return self.verify
