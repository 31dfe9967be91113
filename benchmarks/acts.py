"""Acts that a workflow starts together: what one costs the event loop, however many there are.

1 000, 4 000 and 16 000 acts of one episode are started by one `asyncio.gather`, on the production player, caller and
pool; the engine is a script that answers at once. Times are CPU seconds of this process: what the event loop spends.
"""

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

from common import parser, report

from flexmarl.agents import Team, TeamSpec
from flexmarl.agents.characters import character_renderer
from flexmarl.agents.settings import TeamSettings
from flexmarl.inference.pool import InferencePool
from flexmarl.records import GenerationRequest, GroupId, GroupRecord, PolicyName, Task
from flexmarl.rollout.player import Player
from flexmarl.testing.inference import ScriptedEngine

SIZES = (1_000, 4_000, 16_000)
POLICY = PolicyName("solver")
SETTINGS = {
    "agents": {"solver": {"policy": POLICY}},
    "workflow": {"type": "sequential", "agents": ["solver"]},
}


def team_of(number: int) -> TeamSpec:
    """A team of one whose workflow starts so many acts together."""

    async def together(task: Task, team: Team) -> None:
        await asyncio.gather(*(team["solver"].act(task.prompt) for _ in range(number)))
        team["solver"].reward(1.0)

    spec = TeamSpec.build(TeamSettings.model_validate(SETTINGS), {POLICY: character_renderer()}, [POLICY])
    return replace(spec, run=together)


async def seconds_of(number: int) -> float:
    """CPU seconds of an episode of so many acts."""
    renderer = character_renderer()

    def say(request: GenerationRequest) -> Sequence[int]:
        return [*renderer.encode("7"), renderer.stop_ids[0]]

    engine = ScriptedEngine(say, encode=renderer.encode, decode=renderer.decode)
    async with InferencePool({POLICY: [engine]}).open() as pool:
        player = Player(team=team_of(number), generate=pool.generate, run_seed=0, timeout_s=3600.0)
        group = GroupRecord(group=GroupId(0), task=Task(input_id="sum", prompt="3+4"), step=0)
        began = time.process_time()
        episode = await player.play(group, 0)
        took = time.process_time() - began
    assert episode.finished, episode.reason
    assert len(episode.turns) == number
    return took


def main() -> None:
    """Prints the table."""
    options = parser(__doc__.splitlines()[0] if __doc__ else None).parse_args()
    asyncio.run(seconds_of(SIZES[0]))  # A warm-up.
    taken: dict[int, list[float]] = {number: [] for number in SIZES}
    for _ in range(options.repeats):
        for number in SIZES:
            taken[number].append(asyncio.run(seconds_of(number)))

    def ratio(larger: int, smaller: int) -> float:
        return statistics.median(a / b for a, b in zip(taken[larger], taken[smaller], strict=True))

    middle = {number: statistics.median(seconds) for number, seconds in taken.items()}
    report(
        "Acts that are started together",
        ("acts", "CPU seconds", "ms per act"),
        [(f"{number}", f"{middle[number]:.2f}", f"{1000 * middle[number] / number:.3f}") for number in SIZES],
        {
            "ratio_16000_4000": ratio(16_000, 4_000),
            "ratio_4000_1000": ratio(4_000, 1_000),
            "ms_per_act": 1000 * middle[16_000] / 16_000,
        },
        as_json=options.json,
        wanted_at_most={"ratio_16000_4000": 5.0},
    )


if __name__ == "__main__":
    main()
