"""Teams of agents and how they interact. In: a task, and a function that generates. Out: turns with their rewards."""

from flexmarl.agents.chat import ChatRenderer
from flexmarl.agents.context import EpisodeContext, Generate
from flexmarl.agents.parsers import parser
from flexmarl.agents.recorder import NoRecorder, Recorder
from flexmarl.agents.reply import Reply, ToolUse
from flexmarl.agents.seat import Seat
from flexmarl.agents.spec import Level, TeamSpec
from flexmarl.agents.team import Team
from flexmarl.agents.user_code import load_code
from flexmarl.agents.workflow import Workflow, workflow

__all__ = [
    "ChatRenderer",
    "EpisodeContext",
    "Generate",
    "Level",
    "NoRecorder",
    "Recorder",
    "Reply",
    "Seat",
    "Team",
    "TeamSpec",
    "ToolUse",
    "Workflow",
    "load_code",
    "parser",
    "workflow",
]
