"""Replies of a recorded run, from its experience store: the same sample gets the same reply again."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from flexmarl.errors import ConfigError
from flexmarl.experience.backends.store_file import StoreReader, read_store
from flexmarl.observability.run_folder import RunFolder
from flexmarl.records import AgentName, FinishReason, GenerationRequest, IntArray, SampleId
from flexmarl.simulator.reply_kinds import Responder


def recorded_responders(run: Path, agents: Sequence[AgentName]) -> dict[AgentName, Responder]:
    """What each of these agents said in the run whose folder this is. Raises ConfigError if it said nothing."""
    store = RunFolder(run).store
    if not store.is_file():
        raise ConfigError(
            f"simulation.recorded: '{run}' has no {store.name}; give the folder of a run whose `store.type` is sqlite"
        )
    with read_store(store) as reader:
        return {agent: _recorded(agent, _replies(reader, run, agent)) for agent in agents}


def _replies(reader: StoreReader, run: Path, agent: AgentName) -> dict[SampleId, IntArray]:
    rows = reader.rows(agent) if agent in reader.agents else ()
    answered = (row for row in rows if "response_ids" in row.values and len(row.values["response_ids"]))
    replies = {row.sample_id: _uncut(row.values["response_ids"], row.values["finish"]) for row in answered}
    if not replies:
        raise ConfigError(
            f"simulation.replies.{agent}: simulation.recorded is '{run}', in which '{agent}' said nothing; its agents "
            f"are: {', '.join(reader.agents)}. Give the agent replies of its own, e.g. {{type: lengths, mean: 300}}"
        )
    return replies


def _uncut(ids: IntArray, finish: str) -> IntArray:
    """The reply with one token more if its length ended it: at the same `max_tokens`, it ends for the same reason."""
    return np.append(ids, ids[-1:]) if finish == FinishReason.LENGTH else ids


def _recorded(agent: AgentName, replies: dict[SampleId, IntArray]) -> Responder:
    others = [replies[sample_id] for sample_id in sorted(replies)]

    def respond(request: GenerationRequest) -> IntArray:
        said = replies.get(SampleId(request.request_id))
        # A sample that the record lacks: another step, another attempt, or an evaluation.
        return others[request.seed % len(others)] if said is None else said

    return respond
