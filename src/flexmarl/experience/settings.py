"""What a user may choose about the store."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class StoreSettings(BaseModel):
    """Where experience is kept."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["memory"] = Field("memory", description="SQLite in this process's memory; gone when the run ends.")
