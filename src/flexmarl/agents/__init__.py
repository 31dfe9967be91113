"""Teams of agents and how they interact. In: a task, and a function that generates tokens. Out: turns with rewards."""

from flexmarl.agents.chat import ChatRenderer
from flexmarl.agents.context import EpisodeContext, Generate, NoRecorder, Recorder
from flexmarl.agents.interpret import parser
from flexmarl.agents.seat import Reply, Seat, ToolUse
from flexmarl.agents.spec import Level, TeamSpec
from flexmarl.agents.team import Team, Workflow, workflow
from flexmarl.plugins import load_code

__all__ = ["ChatRenderer", "EpisodeContext", "Generate", "Level", "NoRecorder", "Recorder", "Reply", "Seat", "Team"]
__all__ += ["TeamSpec", "ToolUse", "Workflow", "load_code", "parser", "workflow"]
