"""Trees of turns: one context per group of candidates, and on each row the reward of its own action (law X3)."""

import random
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexmarl.agents import patterns
from flexmarl.agents.context import Node
from flexmarl.agents.patterns import Branch, best
from flexmarl.credit import CreditSettings, credit_rows
from flexmarl.errors import EpisodeError, boundary
from flexmarl.records import Episode, EpisodeStatus, GroupId, GroupRecord, PolicyName, Purpose, split_sample_id
from flexmarl.simulator.virtual_time import run_virtual
from flexmarl.tasks import StepResult
from flexmarl.testing.agents import check_turns
from flexmarl.testing.plugin_checks import check_environment
from tests.unit.agents.tables import CALCULATOR, TASK, context, spec, text

LAST = 90


class Lattice:
    """Places 0 to 100. Where a digit leads and what it pays is odd enough that no two actions are mixed up."""

    def __init__(self, task=None):
        self.reset(0)

    def reset(self, seed):
        self.place = seed % LAST

    def observe(self):
        return f"at {self.place}"

    def step(self, action):
        if self.place >= LAST:
            raise EpisodeError("the play is over; reset or restore the environment")
        digit = int(action) if action.isdecimal() and action.isascii() else 0
        reward = pay(self.place, digit)
        self.place = leads(self.place, digit)
        return StepResult(reward, self.place >= LAST)

    def snapshot(self):
        return self.place

    def restore(self, snapshot):
        self.place = snapshot


def pay(place, digit):
    return (place * 31 + digit * 17) % 29 / 29


def leads(place, digit):
    return (place * 7 + digit * 13 + 1) % 101


@patterns.turn("lattice")
async def lattice(task, team):
    """The seats take turns."""
    seats, played = [*team], team.metrics.get("turns", 0.0)
    reply = await seats[int(played) % len(seats)].act(team.environment.observe())
    result = team.environment.step(reply.text)
    reply.reward(result.reward)
    team.report(turns=played + 1, total=team.metrics.get("total", 0.0) + result.reward)
    return result.done


def digits(prompt, request):
    """A model that says a digit, by the seed of the call."""
    return str(random.Random(request.seed).randrange(10))


def grown(
    candidates,
    keep=1,
    *,
    agents=2,
    remembers="none",
    max_turns=4,
    delays=0,
    name="lattice",
    script=digits,
    purpose=Purpose.TRAINING,
    episode=0,
    **more,
):
    """The team after a tree was played."""
    team = {agent: {"context": remembers, **more} for agent in ("red", "blue", "green")[:agents]}
    workflow = {"type": "turns", "turn": name, "candidates": candidates, "keep": keep, "max_turns": max_turns}
    team_spec = spec(team, workflow)
    random_delay = random.Random(delays)
    played = context(
        script,
        delay_s=lambda request: random_delay.random(),
        environment=Lattice,
        purpose=purpose,
        trajectory_id=f"g0e{episode}a0",
    )
    team = team_spec.seat(played)
    run_virtual(team_spec.run(TASK, team))
    return team


def by_path(team):
    """path -> (prompt, response, seed-dependent log-probabilities, reward)."""
    rewards = team.rewards()
    return {
        Node(turn.path).name: (text(turn.prompt_ids), turn.text, turn.logprobs.tolist(), rewards[turn.sample_id])
        for turn in team.turns
    }


trees = given(
    candidates=st.integers(1, 4),
    keep=st.integers(1, 3),
    agents=st.integers(1, 3),
    remembers=st.sampled_from(["none", "full", {"last": 1}]),
    max_turns=st.integers(1, 4),
    delays=st.integers(0, 99),
)


@settings(max_examples=60, deadline=None)
@trees
def test_every_group_of_candidates_has_one_context_hash(**tree):
    team = grown(**tree)
    check_turns(team.turns)
    groups = defaultdict(list)
    for turn in team.turns:
        groups[turn.branch].append(turn)
    for members in groups.values():
        assert len(members) == tree["candidates"]
        assert len({turn.context_hash for turn in members}) == 1
        assert len({(turn.agent, turn.turn) for turn in members}) == 1
    assert len(by_path(team)) == len(team.turns), "no two calls have one path"


@settings(max_examples=60, deadline=None)
@trees
def test_the_reward_on_a_row_is_the_one_its_own_action_produced(**tree):
    team = grown(**tree)
    places = {"": None}
    for turn in sorted(team.turns, key=lambda turn: turn.turn):
        seen = int(text(turn.prompt_ids).split("at ")[-1].split("<")[0])
        assert team.rewards()[turn.sample_id] == pay(seen, int(turn.text))
        before = places[turn.branch]
        assert before is None or seen == before, "a candidate plays on from where its branch was, not its sibling"
        places[Node(turn.path).name] = leads(seen, int(turn.text))


@settings(max_examples=40, deadline=None)
@trees
def test_the_branches_with_the_highest_rewards_so_far_go_on(**tree):
    played = by_path(grown(**tree))

    def score(path):
        names = path.split(".")
        return sum(played[".".join(names[: n + 1])][3] for n in range(len(names)))

    went_on = {path.rpartition(".")[0] for path in played} - {""}
    for depth in range(tree["max_turns"] - 1):
        level = [path for path in played if path.count(".") == depth and not over(played[path])]
        gone = {path for path in level if path in went_on}
        assert len(gone) <= tree["keep"]
        rest = [score(path) for path in level if path not in gone]
        assert not gone or not rest or min(map(score, gone)) >= max(rest) - 1e-12


@settings(max_examples=30, deadline=None)
@trees
def test_each_seat_remembers_what_was_said_on_its_own_path(**tree):
    for turn in grown(**tree).turns:
        acts = turn.turn // tree["agents"]
        remembered = {"none": 0, "full": acts}.get(str(tree["remembers"]), min(acts, 1))
        assert text(turn.prompt_ids).count("<|user|>") == remembered + 1


def over(row):
    prompt, said, _, _ = row
    return leads(int(prompt.split("at ")[-1].split("<")[0]), int(said)) >= LAST


@settings(max_examples=30, deadline=None)
@trees
def test_whatever_finishes_first_the_tree_is_the_same(**tree):
    again = by_path(grown(**{**tree, "delays": tree["delays"] + 1000}))
    assert again == by_path(grown(**tree))


def test_candidates_have_seeds_of_their_own_also_in_equal_contexts():
    team = grown(4, agents=1, max_turns=1)
    assert len({tuple(turn.logprobs) for turn in team.turns}) == 4


def test_the_columns_say_where_in_the_tree_a_call_is():
    team = grown(2, agents=1, max_turns=3, script=lambda prompt, request: "3")
    places = [(turn.turn, Node(turn.path).name, turn.branch) for turn in team.turns]
    assert places == [
        *((0, path, "") for path in ("0", "1")),
        *((1, path, "0") for path in ("0.0", "0.1")),
        *((2, path, "0.0") for path in ("0.0.0", "0.0.1")),
    ], "equal rewards: the lowest index goes on"
    assert [split_sample_id(turn.sample_id)[1] for turn in team.turns] == [*range(6)]


def test_a_call_after_the_first_of_a_turn_is_sampled_from_a_branch_of_its_own():
    said = lambda prompt, request: "5" if "<|tool|>" in prompt else "calc(2+3)"  # noqa: E731
    team = grown(2, agents=1, max_turns=1, script=said, max_tool_calls=1, **CALCULATOR)
    places = {Node(turn.path).name: [] for turn in team.turns}
    for turn in team.turns:
        places[Node(turn.path).name].append(turn.branch)
    assert places == {"0": ["", "0:1"], "1": ["", "1:1"]}


def test_the_figures_of_the_best_play_are_those_of_the_episode():
    team = grown(3, keep=2, agents=1, max_turns=2)
    played = by_path(team)
    totals = [played[path][3] + played[path.split(".")[0]][3] for path in played if "." in path]
    assert team.metrics == {"turns": 2.0, "total": max(totals)}


@patterns.turn("ends_early")
async def ends_early(task, team):
    """Candidate 0 of the first turn gets most and is over; what follows candidate 1 gets less."""
    reply, path = await team.red.act("x"), team.context.node.path
    reply.reward({(0,): 5.0, (1,): 1.0}.get(path, 0.5))
    team.report(depth=len(path))
    return path == (0,)


def test_a_branch_that_is_over_stays_among_the_best():
    team = grown(2, keep=2, agents=1, name="ends_early")
    assert team.metrics == {"depth": 1.0}
    assert {turn.path[0] for turn in team.turns if turn.turn} == {1}


def test_one_candidate_is_a_plain_episode():
    team = grown(1, max_turns=3)
    assert [Node(turn.path).name for turn in team.turns] == ["0", "0.0", "0.0.0"]
    assert [turn.agent for turn in team.turns] == ["red", "blue", "red"]


@pytest.mark.parametrize("purpose", [Purpose.EVALUATION, Purpose.GREEDY])
def test_what_is_not_trained_on_plays_one_candidate(purpose):
    team = grown(3, max_turns=2, purpose=purpose)
    assert [Node(turn.path).name for turn in team.turns] == ["0", "0.0"]


def test_of_equal_scores_the_lowest_path_goes_on():
    branches = [Branch(team=None, path=(index,), score=score) for index, score in enumerate([0.0, 2.0, 1.0, 2.0])]
    assert [branch.path for branch in best(branches, 3)] == [(1,), (3,), (2,)]


def test_a_fork_remembers_what_was_said_and_what_it_says_is_forgotten_outside():
    async def play(team):
        await team.red.act("one")
        drawn = team.rng.random()
        team.red.state["heard"] = ["one"]
        left, right = team.fork(Node((0,))), team.fork(Node((1,)))
        left.red.state["heard"].append("left")
        await left.red.act("left")
        await right.red.act("right")
        await team.red.act("two")
        assert (team.red.state, right.red.state) == ({"heard": ["one"]}, {"heard": ["one"]})
        numbers = [branch.rng.random() for branch in (left, right, team)]
        assert drawn not in numbers
        assert len(set(numbers)) == 1, "siblings that draw see the same, and go on where they were"

    team = spec({"red": {"context": "full"}}).seat(context(lambda *_: "ok"))
    run_virtual(play(team))
    heard = [text(turn.prompt_ids).count("<|user|>") for turn in team.turns]
    assert heard == [1, 2, 2, 2]
    prompts = [text(turn.prompt_ids) for turn in team.turns]
    assert all("left" not in prompt for prompt in prompts[2:])


def test_a_reward_for_an_agent_in_a_branch_reaches_the_turns_of_that_branch_alone():
    async def play(team):
        await team.red.act("root")
        for index in range(2):
            fork = team.fork(Node((index,)))
            await fork.red.act("leaf")
            fork.red.reward(float(index))
            fork.reward(10.0 * index)

    team = spec({"red": {}}).seat(context(lambda *_: "ok"))
    run_virtual(play(team))
    assert list(team.rewards().values()) == [None, 0.0, 11.0]


@patterns.turn("draws_in_the_prompt")
async def draws_in_the_prompt(task, team):
    (await team.red.act(team.context.node.name)).reward(0.0)
    return True


@patterns.turn("unrewarded")
async def unrewarded(task, team):
    await team.red.act("x")
    return True


@patterns.turn("silent")
async def silent(task, team):
    return False


@patterns.turn("forgets_to_return")
async def forgets_to_return(task, team):
    (await team.red.act("x")).reward(1.0)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("draws_in_the_prompt", "candidates 0 and 1 of a turn have different contexts"),
        ("unrewarded", "candidate . got no reward"),
        ("silent", "candidate . made no call"),
        ("forgets_to_return", "the turn returned None; it must return True if the play is over"),
    ],
)
def test_a_turn_that_cannot_be_compared_fails_the_episode(name, error):
    with pytest.raises(EpisodeError, match=error), boundary(EpisodeError, "workflow"):
        grown(2, name=name)


def test_the_lattice_is_an_environment():
    check_environment(Lattice, actions=[*"0123456789"])


@patterns.turn("asks_a_tool")
async def asks_a_tool(task, team):
    """An act earns what its last message says, whatever it took to say it."""
    reply = await team.red.act("x")
    reply.reward(float(reply.text))
    team.report(said=float(reply.text))
    return False


def at_times_a_tool(prompt, request):
    """One candidate in two calls the tool first; what is said then is worth less than what others say at once."""
    if "<|tool|>" in prompt.split("<|user|>")[-1]:
        return "0.5"
    return "calc(2+3)" if request.seed % 2 else "0.9"


def test_the_candidate_that_goes_on_is_the_one_whose_act_earned_most_and_not_the_one_that_took_most_calls():
    for remembers in ("none", "full"):
        team = grown(
            6, agents=1, max_turns=3, name="asks_a_tool", script=at_times_a_tool, remembers=remembers, **CALCULATOR
        )
        calls = defaultdict(list)
        for turn in team.turns:
            calls[Node(turn.path).name].append(turn)
        for depth in range(3):
            level = {path: said for path, said in calls.items() if path.count(".") == depth}
            assert {len(said) for said in level.values()} == {1, 2}, "with and without a tool"
            for path, said in level.items():
                assert {turn.act_hop for turn in said} == {said[0].hop}
                went_on = any(other.startswith(f"{path}.") for other in calls)
                assert not went_on or len(said) == 1, "0.9 is more than 0.5, though 0.5 stands on two calls"
        assert team.metrics == {"said": 0.9}


def test_a_candidate_is_worth_each_reward_once_whoever_it_is_for():
    async def play(team):
        fork = team.fork(Node((0,)))
        first, second = await fork.red.act("a"), await fork.red.act("b")
        await fork.blue.act("c")
        first.reward(1.0)
        second.reward(0.25, part="style")
        fork.red.reward(0.5)
        fork.blue.reward(0.0625)
        fork.reward(2.0)
        assert fork.total_reward() == 3.8125
        assert team.total_reward() == 0.0
        fork.green.reward(100.0)
        assert fork.total_reward() == 3.8125, "it has said nothing, so that no turn has the reward"

    team = spec({"red": {}, "blue": {}, "green": {}}).seat(context(lambda *_: "ok"))
    run_virtual(play(team))


@pytest.mark.parametrize("estimator", [{"type": "atgrpo", "scale": "none"}, {"type": "c3"}, {"type": "default"}])
@pytest.mark.parametrize(("keep", "episodes"), [(1, 1), (2, 1), (2, 3)])
def test_on_trees_with_a_tool_every_call_of_an_act_is_compared_by_the_default_key(estimator, keep, episodes):
    credit = CreditSettings.model_validate({"estimator": estimator, "invalid_action": None})
    plays = [
        grown(4, keep, agents=1, max_turns=2, name="asks_a_tool", script=at_times_a_tool, episode=number, **CALCULATOR)
        for number in range(episodes)
    ]
    group = GroupRecord(
        group=GroupId(0),
        task=TASK,
        step=0,
        episodes=tuple(
            Episode(
                episode=team.context.episode,
                group=GroupId(0),
                task=TASK.input_id,
                status=EpisodeStatus.FINISHED,
                turns=team.turns,
                rewards=team.rewards(),
                call_rewards=team.call_rewards(),
                parts=team.parts(),
            )
            for team in plays
        ),
    )
    rows = credit.shape(credit_rows(group, [PolicyName("p")]))
    found = credit.credit(rows).advantages
    assert any(row.hop != row.act for row in rows), "some calls are not the first of their act"
    for row in rows:
        first = next(other for other in rows if (other.episode, other.hop) == (row.episode, row.act))
        assert found[row.sample_id] == pytest.approx(found[first.sample_id], abs=1e-12)
        if estimator["type"] != "c3":  # which judges by what followed
            assert (found[row.sample_id] > 0) == (row.reward == 0.9), "better than its siblings, or worse"
    assert any(found[row.sample_id] for row in rows if row.hop != row.act), "the calls after a tool learn, too"
