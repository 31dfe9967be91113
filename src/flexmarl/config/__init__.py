"""Reads configs. In: a YAML file and dotted overrides. Out: checked settings, or errors that name the key."""

from flexmarl.config.caution import cautions
from flexmarl.config.load import Overrides, load_run, parse_override
from flexmarl.config.run_settings import RunSettings

__all__ = ["Overrides", "RunSettings", "cautions", "load_run", "parse_override"]
