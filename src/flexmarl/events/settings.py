"""Settings of the trackers that get a run's metrics besides metrics.jsonl and TensorBoard."""

from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from flexmarl.settings import Settings


class WandbSettings(Settings):
    """Weights & Biases; needs the extra `wandb`. The key comes from `wandb login` or WANDB_API_KEY."""

    project: str = Field(default="flexmarl", min_length=1, description="Project that the run is shown in.")
    entity: str | None = Field(default=None, description="User or team that owns it; null: your default.")
    mode: Literal["online", "offline"] = Field(
        default="online", description="offline: files in the run folder alone, for `wandb sync`; needs no key."
    )


class MlflowSettings(Settings):
    """MLflow; needs the extra `mlflow`. A password comes from MLFLOW_TRACKING_PASSWORD or MLFLOW_TRACKING_TOKEN."""

    tracking_uri: str | None = Field(
        default=None,
        description="A server such as http://tracking:5000, or a file such as sqlite:///mlflow.db, relative to the "
        "working directory; null: MLFLOW_TRACKING_URI, else MLflow's default.",
    )
    experiment: str = Field(default="flexmarl", min_length=1, description="Experiment that the run is shown in.")

    @field_validator("tracking_uri")
    @classmethod
    def _there_is_no_password_in_it(cls, uri: str | None) -> str | None:
        if uri is not None and urlsplit(uri).password is not None:
            raise ValueError(
                "tracking_uri holds a password, which every run folder would keep; use a URI without one, and set "
                "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
            )
        return uri


class MetricsSettings(Settings):
    """Trackers that get the figures of metrics.jsonl, step by step. TensorBoard always has them."""

    wandb: WandbSettings | None = Field(default=None, description="Weights & Biases; null is off, {} its defaults.")
    mlflow: MlflowSettings | None = Field(default=None, description="MLflow; null is off, {} its defaults.")
