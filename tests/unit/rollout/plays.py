"""Small plays: a team on a scripted model, with a store to look at."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

from flexmarl.agents import TeamSpec, Workflow
from flexmarl.agents.characters import character_renderer
from flexmarl.agents.settings import TeamSettings
from flexmarl.events.event import Events
from flexmarl.experience.backends.sqlite import SqliteStore
from flexmarl.experience.turn_rows import TURN_COLUMNS
from flexmarl.records import AgentName, GroupId, GroupRecord, PolicyName, Task
from flexmarl.rollout.episode_calls import Holds
from flexmarl.rollout.player import Player
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
    made = Player(
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
