"""Law 2, end to end: the same recorded episodes, in any order, through both modes, make the same weights in float64.

Three steps are recorded once: a real model behind the embedded engine plays, learns and is published. Then they are
replayed: the production collector, store, session and trainer get the recorded groups in random orders, at random
times, in micro-batches of any size. The reference is the whole step in one micro-batch.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from flexmarl.agents import Team, TeamSpec
from flexmarl.agents.characters import character_renderer
from flexmarl.agents.settings import TeamSettings
from flexmarl.cluster.concurrency import DeviceThread
from flexmarl.credit import CreditSettings
from flexmarl.events.journal import RememberedEvents
from flexmarl.experience.backends.sqlite import SqliteStore
from flexmarl.experience.turn_rows import TURN_COLUMNS, closing_row, response_row
from flexmarl.inference.interface import EngineParts, make_engine
from flexmarl.inference.pool import InferencePool
from flexmarl.inference.settings import EmbeddedSettings
from flexmarl.objects.backends.memory import InlineObjectStore
from flexmarl.orchestrator.collect import Release, StepCollector
from flexmarl.orchestrator.crediting import Crediting
from flexmarl.orchestrator.publish import Publisher, Versions
from flexmarl.records import AgentName, GroupRecord, GroupState, PolicyName, Task, Version
from flexmarl.rollout.admission import Admission, AdmissionLaw
from flexmarl.rollout.player import Player
from flexmarl.rollout.rollout import Rollout
from flexmarl.rollout.settings import RolloutSettings
from flexmarl.simulator.virtual_time import run_virtual
from flexmarl.testing.scripted_run import CountedTasks
from flexmarl.training.backends.single import SingleProcessTrainer
from flexmarl.training.interface import StoreRows
from flexmarl.training.session import TrainingSession
from flexmarl.training.settings import TrainingSettings

SOLVER = PolicyName("solver")
AGENTS = (AgentName("solver"), AgentName("critic"))
STEPS, GROUPS, EPISODES = 3, 5, 3
LEARNING_RATE = 1e-2
TOLERANCE = 1e-10
Arrivals = Sequence[tuple[float, GroupRecord]]
"""When each group of a step comes."""


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny tensors are faster on one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tiny_model() -> PreTrainedModel:
    """Some 5 000 parameters; one id per token of the character tokenizer."""
    torch.manual_seed(7)
    config = Qwen3Config(
        vocab_size=106,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    return Qwen3ForCausalLM(config)


class Learner:
    """One policy's collector, store, session and trainer."""

    def __init__(self, release: Release, *, estimator: str, **training: object) -> None:
        self.objects = InlineObjectStore()
        self.store = SqliteStore(agents=AGENTS, columns=TURN_COLUMNS)
        self.admission = Admission(AdmissionLaw(groups=GROUPS, lag=0, window=1))
        self.versions = Versions({SOLVER: Version(0)})
        self.model = tiny_model()
        options = TrainingSettings.model_validate({"optimizer": {"learning_rate": LEARNING_RATE}, **training})
        self.trainer = SingleProcessTrainer(SOLVER, self.model, options, self.objects, rows=StoreRows(self.store))
        events = RememberedEvents()
        self.session = TrainingSession(
            SOLVER, self.store, self.trainer, micro_batch=options.micro_batch, version=Version(0), events=events
        )
        crediting = Crediting(
            store=self.store,
            credit=CreditSettings.model_validate({"filter": None, "estimator": {"type": estimator}}),
            trained=[SOLVER],
            admission=self.admission,
            events=events,
        )
        self.collector = StepCollector(
            crediting=crediting,
            admission=self.admission,
            versions=self.versions,
            release=release,
            events=events,
        )

    async def step(self, arrivals: Arrivals) -> Version:
        """Takes the groups when they come, and updates."""
        self.collector.open()
        for _ in arrivals:
            self.admission.admit()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.session.accumulate(), name="train")
            async with asyncio.TaskGroup() as groups:
                for at, group in arrivals:
                    groups.create_task(self._arrive(at, group), name=f"group-{group.group}")
            divisors = await self.collector.close()
            self.session.close_step()
        await self.session.finish(divisors[SOLVER])
        version = self.session.version
        self.versions.acknowledged(SOLVER, version)
        self.collector.settle_trained(self.collector.kept)
        return version

    async def _arrive(self, at: float, group: GroupRecord) -> None:
        await asyncio.sleep(at)
        for state in (GroupState.RUNNING, GroupState.DONE):
            self.admission.move(group.group, state)
        for episode in group.finished:
            for turn in episode.turns:
                reward = episode.rewards[turn.sample_id]
                assert reward is not None
                await self.store.put(
                    turn.agent, [response_row(turn), closing_row(turn.sample_id, SOLVER, reward=reward)]
                )
        await self.collector.take(group)


async def answer_and_criticise(task: Task, team: Team) -> None:
    """Rewards hang on what was sampled, so that they differ; some episodes fail."""
    answer = await team.solver.act(task.prompt)
    verdict = await team.critic.act(answer.text)
    if team.rng.random() < 0.15:
        raise ValueError("the workflow broke")
    for reply in (answer, verdict):
        reply.reward(float(sum(reply.turns[0].response_ids.tolist()) % 7))


@cache
def recorded() -> tuple[tuple[GroupRecord, ...], ...]:
    """The groups of each step, sampled at that step's version."""
    return asyncio.run(_record())


async def _record() -> tuple[tuple[GroupRecord, ...], ...]:
    learner = Learner(Release.AT_END, estimator="default", dtype="float32")
    thread = DeviceThread()
    parts = EngineParts(
        policy=SOLVER, make_model=tiny_model, decode=character_renderer().decode, store=learner.objects, thread=thread
    )
    engine = make_engine(EmbeddedSettings(slots=16, max_len=96), parts)
    agents = {
        name: {"policy": "solver", "sampling": {"max_tokens": length}}
        for name, length in zip(AGENTS, (12, 5), strict=True)
    }
    workflow = {"type": "sequential", "agents": list(AGENTS)}
    team = TeamSpec.build(
        TeamSettings.model_validate({"agents": agents, "workflow": workflow}), {SOLVER: character_renderer()}, [SOLVER]
    )
    admission, tasks, steps = Admission(AdmissionLaw(groups=STEPS * GROUPS, lag=0, window=1)), CountedTasks(), []

    async def groups(step: int) -> AsyncIterator[GroupRecord]:
        for _ in range(GROUPS):
            group = admission.admit()
            yield GroupRecord(group=group, task=tasks.train(group), step=step)

    async with InferencePool({SOLVER: [engine]}).open() as pool:  # type: ignore[dict-item]
        player = Player(team=replace(team, run=answer_and_criticise), generate=pool.generate, run_seed=0, timeout_s=60)
        rollout = Rollout(
            player=player,
            admission=admission,
            settings=RolloutSettings(),
            episodes=EPISODES,
            events=RememberedEvents(),
        )
        publisher = Publisher(
            trainers={SOLVER: learner.trainer},
            pool=pool,
            objects=learner.objects,
            versions=learner.versions,
            events=RememberedEvents(),
        )
        for step in range(STEPS):
            played: list[GroupRecord] = []

            async def emit(group: GroupRecord, played: list[GroupRecord] = played) -> None:
                played.append(group)

            await rollout.play(groups(step), emit)
            steps.append(tuple(sorted(played, key=lambda group: group.group)))
            await publisher.publish(SOLVER, await learner.step([(0.0, group) for group in steps[-1]]))
    await engine.close()
    thread.close()
    return tuple(steps)


def replayed(release: Release, steps: Sequence[Arrivals], **options: object) -> dict[str, torch.Tensor]:
    """The weights after the recorded steps, in virtual time."""
    learner = Learner(release, dtype="float64", **options)  # type: ignore[arg-type]

    async def replay() -> None:
        for arrivals in steps:
            await learner.step(arrivals)

    run_virtual(replay())
    return {name: tensor.detach().clone() for name, tensor in learner.model.state_dict().items()}


@cache
def reference(estimator: str, aggregation: str) -> dict[str, torch.Tensor]:
    """Whole steps, each in one micro-batch."""
    steps = [[(0.0, group) for group in groups] for groups in recorded()]
    options = {"estimator": estimator, "loss": {"type": "ppo", "aggregation": aggregation}}
    return replayed(Release.AT_END, steps, micro_batch=10_000, **options)


@st.composite
def arrivals(draw: st.DrawFn) -> list[list[tuple[float, GroupRecord]]]:
    """Any order of each step's groups, any times."""
    times = st.sampled_from([0.0, 0.0, 1.0, 2.5, 7.0])
    return [[(draw(times), group) for group in draw(st.permutations(groups))] for groups in recorded()]


@given(
    release=st.sampled_from([Release.AT_ONCE, Release.IN_ORDER, Release.AT_END]),  # These estimators compare a group.
    micro_batch=st.sampled_from([1, 3, 8, 40]),
    estimator=st.sampled_from(["default", "drmas"]),
    aggregation=st.sampled_from(["token-mean", "seq-mean-token-mean", "traj-mean-token-mean"]),
    data=st.data(),
)
@settings(max_examples=10, deadline=None)
def test_recorded_episodes_make_the_same_weights_in_any_order_and_mode(
    release: Release, micro_batch: int, estimator: str, aggregation: str, data: st.DataObject
) -> None:
    options = {"estimator": estimator, "loss": {"type": "ppo", "aggregation": aggregation}}
    weights = replayed(release, data.draw(arrivals()), micro_batch=micro_batch, **options)
    for name, expected in reference(estimator, aggregation).items():
        assert weights[name].dtype == torch.float64
        distance = (weights[name] - expected).norm() / expected.norm()
        assert distance <= TOLERANCE, f"{name}: relative L2 distance {distance:.3g}"


def test_the_recording_is_worth_replaying() -> None:
    """Versions advance, lengths and rewards differ, episodes fail, and the weights move far more than the tolerance."""
    steps = recorded()
    for version, groups in enumerate(steps):
        turns = [turn for group in groups for episode in group.finished for turn in episode.turns]
        assert {run.version for turn in turns for run in turn.versions} == {version}
        assert len({len(turn.response_ids) for turn in turns}) > 1
    episodes = [episode for groups in steps for group in groups for episode in group.episodes]
    assert any(not episode.finished for episode in episodes)
    assert len({reward for episode in episodes for reward in episode.rewards.values()}) > 3
    start = tiny_model().double().state_dict()
    for estimator in ("default", "drmas"):
        trained = reference(estimator, "token-mean")
        moved = max(((trained[name] - start[name]).norm() / start[name].norm()).item() for name in start)
        assert moved > LEARNING_RATE


def test_leaving_one_sample_out_would_be_seen() -> None:
    """The tolerance is tight: without a single episode of one group the weights are far outside it."""
    steps = [[(0.0, group) for group in groups] for groups in recorded()]
    at, group = steps[1][2]
    steps[1][2] = (at, replace(group, episodes=group.episodes[1:]))
    options = {"estimator": "default", "loss": {"type": "ppo", "aggregation": "token-mean"}}
    weights = replayed(Release.AT_END, steps, micro_batch=10_000, **options)
    name = "model.embed_tokens.weight"
    expected = reference("default", "token-mean")[name]
    assert (weights[name] - expected).norm() > 1e4 * TOLERANCE * expected.norm()
