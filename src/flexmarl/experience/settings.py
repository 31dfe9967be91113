"""What a user may choose about the store and about the cutting of micro-batches."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class StoreSettings(BaseModel):
    """Where experience is kept."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["memory"] = Field("memory", description="SQLite in this process's memory; gone when the run ends.")


class PackingSettings(BaseModel):
    """How large a micro-batch and how ragged a forward pass may be."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_samples: int = Field(16, ge=1, description="Samples in a micro-batch; 16 in the paper's runs.")
    max_padded_tokens: int | None = Field(
        None, ge=1, description="Samples times the longest one's tokens, prompt included; none means no limit."
    )
    max_padding_share: float = Field(
        0.25,
        ge=0.0,
        lt=1.0,
        description="Largest share of padding in one forward pass; 0 groups equal lengths.",
    )
