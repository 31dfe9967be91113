"""TeamSpec: the team of a run, made from its settings. It gives each episode a Team of its own."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from flexmarl.agents.caller import AgentSpec
from flexmarl.agents.chat import ChatRenderer, Message
from flexmarl.agents.context import EpisodeContext
from flexmarl.agents.interpret import PARSERS
from flexmarl.agents.remembering import compaction_of
from flexmarl.agents.settings import AgentSettings, TeamSettings
from flexmarl.agents.team import Team, Workflow
from flexmarl.agents.telling import Teller, Told, told_of_tools
from flexmarl.errors import ConfigError
from flexmarl.plugins import CodeFiles
from flexmarl.records import AgentName, PolicyName, Task
from flexmarl.sandbox.interface import Sandbox
from flexmarl.tasks import Environment


class Level(NamedTuple):
    """How far the agents are specialised."""

    name: str
    """L0: nothing is trained. L1: all share one trained policy. L2: each trains an adapter on one base that all share.
    L3: each trains its own weights. Otherwise: mixed."""
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamSpec:
    """The agents, the policy of each, and the workflow they play. Can be pickled and sent to another process."""

    agents: Mapping[AgentName, AgentSpec]
    trained: frozenset[PolicyName]
    """Policies that learn; the others are frozen."""
    run: Workflow
    adapters: frozenset[PolicyName] = frozenset()
    """Policies that learn an adapter on one base, the same for all of them."""
    environment: Callable[[Task], Environment[Any]] | None = None
    """Makes the environment of one episode, if the run has one."""
    sandbox: Sandbox | None = None
    """Opens boxes for tools that need them, if the run has such tools."""
    code: tuple[Path, ...] = ()
    """The user's files in which workflows, tools and parsers are defined; another process imports them first."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (CodeFiles(self.code), {one.name: getattr(self, one.name) for one in fields(self)})

    @classmethod
    def build(
        cls,
        settings: TeamSettings,
        renderers: Mapping[PolicyName, ChatRenderer],
        trained: Collection[PolicyName],
        adapters: Collection[PolicyName] = (),
        *,
        code: Sequence[Path] = (),
        sandbox: Sandbox | None = None,
    ) -> "TeamSpec":
        """Joins the settings with the policies of the run. Raises ConfigError if they do not fit each other."""
        agents = {AgentName(name): _agent(name, agent, renderers) for name, agent in settings.agents.items()}
        if idle := set(trained) - {agent.policy for agent in agents.values()}:
            raise ConfigError(f"policies.{min(idle)} is trained, but no agent acts with it; freeze or remove it")
        environment = settings.environment.resolve() if settings.environment else None
        return cls(
            agents=agents,
            trained=frozenset(trained),
            run=settings.workflow.resolve(),
            adapters=frozenset(adapters),
            environment=environment,
            sandbox=sandbox,
            code=tuple(code),
        )

    @property
    def level(self) -> Level:
        """The level of the team, with the reason."""
        acting = [agent.policy for agent in self.agents.values()]
        learning = [policy for policy in acting if policy in self.trained]
        because = ", ".join(
            f"{name} {'trains' if agent.policy in self.trained else 'uses the frozen'} {agent.policy}"
            for name, agent in self.agents.items()
        )
        if not learning:
            return Level("L0", because)
        if len(learning) < len(acting):
            return Level("mixed", because)
        distinct = len(set(learning))
        if distinct == 1:
            return Level("L1", because)
        if distinct < len(acting):
            return Level("mixed", because)
        return Level("L2" if self.adapters.issuperset(learning) else "L3", because)

    def seat(self, context: EpisodeContext) -> Team:
        """The team of one episode."""
        return Team(self.agents, context)


def _check_room(settings: AgentSettings, told: Told) -> None:
    """Raises ConfigError if even the shortest texts would not fit the limit of the agent's context after a summary."""
    compact, renderer = compaction_of(settings.context), told.renderer
    if compact is None or renderer.stands_in:
        return
    limit, system = compact.limit_tokens, [Message("system", told.system)] if told.system else []
    said = [Message("user" if number % 2 else "assistant", "x") for number in range(min(compact.keep, limit))][::-1]
    seen = list(compact.continuations(said, "x", [Message("user", "x")]))
    kept, bare = (len(renderer.render([*system, *messages])) for messages in (seen[0], seen[-1]))
    if bare > limit:
        raise ConfigError(
            f"context.compact.limit_tokens is {limit}, but the role prompt and a carried summary take at least {bare} "
            f"tokens; raise it"
        )
    if kept > limit:
        raise ConfigError(
            f"context.compact.keep is {compact.keep}, but so many messages never fit beside role prompt and summary "
            f"into limit_tokens={limit}; keep fewer, or raise limit_tokens"
        )


def _received(code: CodeFiles, contents: Mapping[str, Any]) -> TeamSpec:
    """Rebuilds a pickled TeamSpec in the process that it was sent to."""
    return TeamSpec(**contents)


def _agent(name: str, settings: AgentSettings, renderers: Mapping[PolicyName, ChatRenderer]) -> AgentSpec:
    policy = PolicyName(settings.policy)
    if policy not in renderers:
        raise ConfigError(
            f"team.agents.{name}.policy: there is no policy {policy!r}; there are: {', '.join(sorted(renderers))}"
        )
    try:
        parser = PARSERS[settings.parser] if isinstance(settings.parser, str) else settings.parser
        told = told_of_tools(settings, renderers[policy])
        _check_room(settings, told)
    except ConfigError as error:
        raise ConfigError(f"team.agents.{name}.{error}") from None
    return AgentSpec(
        name=AgentName(name),
        policy=policy,
        renderer=told.renderer,
        sampling=settings.sampling.record(),
        parser=parser,
        system=told.system,
        tools=(tools := {tool.name: tool for tool in settings.offered()}),
        syntax=told.syntax,
        tools_note=told.note,
        max_tool_calls=settings.max_tool_calls if tools else 0,
        max_result_chars=settings.max_result_chars,
        context=settings.context,
        delegates=settings.delegates,
        trust_special=settings.trust_special,
        hears_task=settings.hears_task,
        teller=Teller(settings, renderers[policy]),
    )
