"""Settings of the gateway."""

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from flexmarl.settings import Settings


class GatewaySettings(Settings):
    """The server at which programs play seats of the team; it needs the extra `gateway`."""

    host: str = Field(default="127.0.0.1", description="Address that it listens on.")
    port: int = Field(default=0, ge=0, le=65535, description="0: a free one.")
    hosts: tuple[str, ...] = Field(default=(), description="Further host names by which programs reach it.")
    models: Mapping[str, str] = Field(
        default={},
        description="Names of models that programs ask for -> seats, for programs that can set one URL only, "
        "e.g. {small: titler}.",
    )
    thoughts: Literal["as_template", "keep"] = Field(
        default="as_template",
        description="as_template: where the chat template leaves out the thoughts of earlier replies, the prompt is "
        "rendered anew; keep: it continues the sampled tokens, thoughts included.",
    )
    max_calls: int = Field(default=200, ge=1, description="Calls of an episode; one more ends it as failed.")
    max_body_mib: float = Field(default=32.0, gt=0, description="Longest body of a request; a longer one gets 413.")
    patience_s: float = Field(
        default=0.0, ge=0, description="How long a reply is sampled on when its client has gone; it may come back."
    )
    heartbeat_s: float = Field(default=10.0, gt=0, description="Seconds between two signs of life of a stream.")
