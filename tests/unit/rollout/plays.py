"""Small plays: a team on a scripted model, with a store to look at."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from flexmarl.agents import TeamSpec, Workflow
from flexmarl.agents.characters import character_renderer
from flexmarl.agents.settings import TeamSettings
from flexmarl.cluster.inproc import InprocCluster, inproc_cluster
from flexmarl.cluster.interface import Resident, ResidentKind, ResidentSpec
from flexmarl.events.event import Events
from flexmarl.experience.backends.sqlite import SqliteStore
from flexmarl.experience.turn_rows import TURN_COLUMNS
from flexmarl.records import AgentName, Episode, GroupId, GroupRecord, PolicyName, Task, WorkerId
from flexmarl.rollout.episode_calls import Holds
from flexmarl.rollout.player import Player
from flexmarl.rollout.remote_player import RemotePlayer, RolloutWorkers
from flexmarl.rollout.worker import FromEpisode, PlayJob, PlayParts, RolloutHost, RolloutWorker
from flexmarl.testing.agents import Script, ScriptedModel

TASK = Task(input_id="sum-1", prompt="3+4", reference="7")
GROUP = GroupRecord(group=GroupId(0), task=TASK, step=0)


def team_of(workflow: Workflow, *, frozen: bool = False) -> TeamSpec:
    """A solver and a verifier; the verifier's policy may be frozen."""
    agents = {"solver": {"policy": "solver"}, "verifier": {"policy": "verifier"}}
    settings = TeamSettings.model_validate(
        {"agents": agents, "workflow": {"type": "sequential", "agents": ["solver", "verifier"]}}
    )
    trained = [PolicyName(name) for name in (["solver"] if frozen else ["solver", "verifier"])]
    renderers = dict.fromkeys((PolicyName("solver"), PolicyName("verifier")), character_renderer())
    return replace(TeamSpec.build(settings, renderers, trained), run=workflow)


def new_store() -> SqliteStore:
    return SqliteStore(agents=[AgentName("solver"), AgentName("verifier")], columns=TURN_COLUMNS)


def player(
    workflow: Workflow,
    script: Script = lambda prompt, request: "7",
    *,
    delay_s: Callable[..., float] = lambda request: 1.0,
    timeout_s: float = 100.0,
    store: SqliteStore | None = None,
    frozen: bool = False,
    temperature: float | None = None,
    holds: Holds = lambda policy: None,
    events: Events | None = None,
) -> tuple[Player, ScriptedModel]:
    model = ScriptedModel(_Tokenizer(), script, delay_s=delay_s)
    made = WHERE[0](
        team=team_of(workflow, frozen=frozen),
        generate=model,
        run_seed=0,
        timeout_s=timeout_s,
        store=store,
        temperature=temperature,
        holds=holds,
        events=events,
    )
    return made, model


class PlayerOfWorkers(Player):
    """Plays every episode on a worker of its own, which all that passes between them crosses to as to a process."""

    def __init__(self, *, team: TeamSpec, run_seed: int, timeout_s: float, store: SqliteStore | None, **others: Any):
        super().__init__(team=team, run_seed=run_seed, timeout_s=timeout_s, store=store, **others)
        self._others = {"team": team, "run_seed": run_seed, "timeout_s": timeout_s, "store": store, **others}

    async def play(self, *args: Any, **kwargs: Any) -> Episode:
        async with workers_of(1, **{name: self._others[name] for name in ("team", "timeout_s", "store")}) as (crew, _):
            return await RemotePlayer(workers=crew, **self._others).play(*args, **kwargs)


WHERE: list[type[Player]] = [Player]
"""The kind of player that `player` makes."""


@asynccontextmanager
async def workers_of(
    number: int,
    *,
    team: TeamSpec,
    store: SqliteStore | None = None,
    timeout_s: float = 100.0,
    stuck_s: float = 1000.0,
    latency_s: float = 0.0,
    bounded: bool = False,
    events: Events | None = None,
) -> AsyncIterator[tuple[RolloutWorkers, InprocCluster]]:
    """Rollout workers in this process, behind crossings, and their cluster."""
    parts = PlayParts(
        team=team,
        open_store=lambda: Unclosed(store),
        run_seed=0,
        timeout_s=timeout_s,
        grace_s=3.0,
        bounded=bounded,
    )

    def spec(name: WorkerId) -> ResidentSpec[RolloutWorker]:
        return ResidentSpec(
            name=name, kind=ResidentKind.ROLLOUT, contract=RolloutWorker, make=lambda: CountingHost(name, parts)
        )

    nodes = {"left": number, "right": number}
    async with inproc_cluster(nodes, crosses=True, latency_s=latency_s, events=events) as cluster:

        async def spawn(name: WorkerId) -> Resident[RolloutWorker]:
            return (await cluster.spawn([spec(name)]))[0]

        async with RolloutWorkers(spawn, stuck_s=stuck_s, events=cluster.events).open() as crew:
            for resident in await cluster.spawn([spec(WorkerId("rollout", number=n)) for n in range(number)]):
                crew.add(resident)
            yield crew, cluster


class CountingHost(RolloutHost):
    """Counts the episodes that it was given."""

    played = 0

    async def play(self, job: PlayJob) -> AsyncIterator[FromEpisode]:
        self.played += 1
        async for item in super().play(job):
            yield item


class Unclosed:
    """A store that is shared with the test, which closes it."""

    def __init__(self, store: Any) -> None:
        self.put = store.put

    async def close(self) -> None: ...


class _Tokenizer:
    """As much of a tokenizer as a ScriptedModel uses, on the renderer's own tokens."""

    eos_token_id = character_renderer().stop_ids[0]

    def decode(self, ids, skip_special_tokens=False):
        return character_renderer().decode(ids)

    def __call__(self, text, add_special_tokens=False):
        return type("Encoded", (), {"input_ids": character_renderer().encode(text)})


async def rows(store: SqliteStore) -> dict[str, tuple]:
    """Sample id -> (state, reward, whether there is a response)."""
    found = await store.query("SELECT sample_id FROM samples")
    return {
        row.sample_id: (row.state.value, row.values.get("reward"), "response_ids" in row.values)
        for row in await store.get([sample_id for (sample_id,) in found.rows])
    }


def now() -> float:
    return asyncio.get_running_loop().time()
