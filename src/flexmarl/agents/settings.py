"""Settings of a team: its agents, and how they interact."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from flexmarl.agents.black_box import Command, Program, Service
from flexmarl.agents.interpret import Choice
from flexmarl.agents.patterns import Custom, Iterative, Sequential, Turns
from flexmarl.agents.remembering import AgentContext, compaction_of, tools_of
from flexmarl.agents.seat_tools import CONTEXT_TOOLS, DelegateSettings
from flexmarl.agents.team import reserved_names
from flexmarl.records import Sampling
from flexmarl.settings import Settings
from flexmarl.tasks import EnvironmentSettings
from flexmarl.tools import AnySyntax, AnyTool, FunctionSyntax, Tool, ToolSet
from flexmarl.tools.interface import each_tool, keeps_state, max_parallel_of

AnyWorkflow = Annotated[
    Sequential | Iterative | Turns | Custom | Program | Service | Command, Field(discriminator="type")
]
"""Settings field of a workflow, chosen by its `type`."""


class SamplingSettings(Settings):
    """How an agent's tokens are drawn. Filters apply in the order temperature, top-k, top-p, min-p."""

    max_tokens: int = Field(default=256, ge=1)
    """Longest message."""
    temperature: float = Field(default=1.0, ge=0.0)
    """0 is greedy."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Keep the likeliest tokens up to this mass; 1 is off."""
    top_k: int = Field(default=0, ge=0)
    """0 is off."""
    min_p: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Leave out tokens below this share of the likeliest one's probability; 0 is off."""
    stop: tuple[str, ...] = ()
    """Texts that end a message, besides the chat template's end of turn."""

    @field_validator("stop")
    @classmethod
    def _stops_are_texts(cls, stop: tuple[str, ...]) -> tuple[str, ...]:
        if "" in stop:
            raise ValueError("stop: '' would end every message at once; leave it out")
        return stop

    @property
    def plain(self) -> bool:
        """True if tokens are drawn from the model's own distribution."""
        return (self.temperature, self.top_p, self.top_k, self.min_p) == (1.0, 1.0, 0, 0.0)

    def record(self) -> Sampling:
        """The same as the record that a call carries."""
        return Sampling(**self.model_dump())


class AgentSettings(Settings):
    """One agent of the team."""

    policy: str
    """Name of the policy it acts with."""
    system: str = ""
    """Role prompt."""
    tools: tuple[AnyTool, ...] = ()
    """Tools that it may call."""
    syntax: Literal["auto"] | AnySyntax = "auto"
    """How it writes tool calls. auto: as the policy's chat template writes them, or in tags, which the role prompt then
    explains, if the template knows no calls; `flexmarl check` says which."""
    tell_tools: Literal["auto", "template", "prompt", "none"] = "auto"
    """How the model learns of its tools: the chat template gets their schemas, the role prompt lists them, or neither.
    auto: the template if it uses them, else the role prompt; with syntax `function` neither."""
    max_tool_calls: int = Field(default=4, ge=0)
    """Tool calls per act. Further calls of a message are not run, and answered so; the text of a further message with
    calls is taken as the reply."""
    max_result_chars: int = Field(default=8192, ge=64)
    """Longest result of a tool call, in characters. Of a longer one the agent reads the head and the tail, and how many
    characters are left out between them."""
    chat_template_kwargs: Mapping[str, Any] = Field(default={})
    """Further arguments of the policy's chat template, e.g. {enable_thinking: false}."""
    hears_task: bool = True
    """True: its conversations begin with the messages that a task has before its prompt: a system prompt, which stands
    behind its role prompt, and earlier rounds."""
    context: AgentContext = "none"
    """Earlier acts of the episode that it sees. none: no act; full: all; or a section, e.g. {last: 2}."""
    delegates: DelegateSettings | None = None
    """Agents that it may hand tasks to, with the tool `delegate`; null: none."""
    parser: str | Choice = "text"
    """Parser of its final text: text, last_line, integer, boxed, json, a registered name, or a choice of words."""
    trust_special: bool = False
    """True: texts that it reads may spell control tokens, such as <|im_end|>; false: these stay text
    (docs/security.md)."""
    sampling: SamplingSettings = SamplingSettings()

    @model_validator(mode="before")
    @classmethod
    def _memory_is_context(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and "memory" in given:
            held = given["memory"]
            instead = f"{{last: {held}}}" if type(held) is int else held
            raise ValueError(f"`memory` is called `context` now; instead of memory: {held} write context: {instead}")
        return given

    @field_validator("syntax", mode="before")
    @classmethod
    def _null_is_auto(cls, syntax: Any) -> Any:
        # Run folders of earlier versions have null for agents without tools.
        return "auto" if syntax is None else syntax

    @model_validator(mode="after")
    def _tools_can_be_called(self) -> "AgentSettings":
        own = [tool.name for tool in self._seat_tools()]
        names = [*own, *(tool.name for tool in self.tools)]
        if repeated := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"tools: two are called {min(repeated)!r}; give each its own `name`")
        compact = compaction_of(self.context)
        if compact and compact.limit_tokens <= self.sampling.max_tokens:
            raise ValueError(
                f"context.compact.limit_tokens must be above sampling.max_tokens, {self.sampling.max_tokens}, got "
                f"{compact.limit_tokens}: a summary of that length must fit; use {2 * self.sampling.max_tokens} or more"
            )
        single = {*own, *(tool.name for tool in self.tools if not isinstance(tool, ToolSet))}
        if isinstance(self.syntax, FunctionSyntax) and (silent := single - set(self.syntax.names.values())):
            raise ValueError(
                f"syntax.names: {dict(self.syntax.names)} has no word for the tool {min(silent)!r}; "
                f"add one, e.g. {{{min(silent)}: {min(silent)}}}"
            )
        return self

    def offered(self) -> tuple[Tool, ...]:
        """All tools that it may call. Raises ConfigError if those of a set are not known."""
        return (*each_tool(self.tools), *self._seat_tools())

    def _seat_tools(self) -> tuple[Tool, ...]:
        delegate = (self.delegates.tool(),) if self.delegates else ()
        return (*(CONTEXT_TOOLS[name] for name in tools_of(self.context)), *delegate)


class TeamSettings(Settings):
    """The agents, in the team's order, and the workflow they play."""

    agents: Mapping[str, AgentSettings] = Field(min_length=1)
    """Agents by name."""
    workflow: AnyWorkflow
    """How they interact on one task."""
    environment: EnvironmentSettings | None = None
    """Environment in which a task is played, if any; the workflow finds it at `team.environment`."""

    @model_validator(mode="after")
    def _names_fit(self) -> "TeamSettings":
        for name, agent in self.agents.items():
            if self.workflow.opens_doors and agent.tools:
                raise ValueError(f"agents.{name}.tools: its program brings its own tools and runs them; remove them")
            if self.workflow.opens_doors and agent.context != "none":
                raise ValueError(f"agents.{name}.context: its program keeps its own history; remove it")
            if self.workflow.opens_doors and agent.delegates:
                raise ValueError(f"agents.{name}.delegates: its program asks other seats itself; remove it")
            if (
                unknown := [other for other in agent.delegates.agents if other not in self.agents]
                if agent.delegates
                else []
            ):
                raise ValueError(
                    f"agents.{name}.delegates.agents: there is no agent {unknown[0]!r}; "
                    f"there are: {', '.join(self.agents)}"
                )
            if not name.isidentifier() or name.startswith("_") or name in reserved_names():
                raise ValueError(
                    f"agents: {name!r} cannot name an agent; use letters, digits and _, and none of "
                    f"{', '.join(sorted(reserved_names()))}"
                )
        bounds = dict[str, tuple[str, int | str]]()
        for name, tool in ((name, tool) for name, agent in self.agents.items() for tool in agent.tools):
            other, same = bounds.setdefault(tool.name, (name, most := max_parallel_of(tool) or "null"))
            if most != same:
                found = f"max_parallel of {tool.name!r} is {most}, and {same} for agent {other!r}"
                works = "their calls count together: use one number, or give one tool another `name`"
                raise ValueError(f"agents.{name}.tools: {found}; {works}")
        if getattr(self.workflow, "candidates", 1) > 1:
            for name, tool in ((name, tool) for name, agent in self.agents.items() for tool in agent.tools):
                if keeps_state(tool):
                    raise ValueError(
                        f"agents.{name}.tools: {tool.name!r} keeps a state from call to call, and workflow.candidates "
                        f"is above 1: the branches of a tree would share it; set session: false, or candidates: 1"
                    )
        if absent := [seat for seat in self.workflow.seats if seat not in self.agents]:
            raise ValueError(
                f"workflow: {self.workflow.type} needs the agent {absent[0]!r}; the team has {', '.join(self.agents)}"
            )
        return self
