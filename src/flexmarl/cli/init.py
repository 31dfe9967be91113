"""Command that begins a project: `flexmarl init NAME` writes a folder with a team that trains."""

import os
import re
from pathlib import Path
from typing import Annotated

import typer

from flexmarl.cli.terminal import print_text
from flexmarl.errors import ConfigError, boundary

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""Small enough to learn these sums on a few CPU cores within minutes."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

RUN = """\
# A run: flexmarl train run.yaml. README.md says where every key is described.
name: {name}
seed: 0
steps: 40
code: [team.py]                      # tasks and workflow

cluster: {{backend: inline}}           # all in this process; ray: a process for each engine and trainer

tasks: {{type: generator, name: additions}}

policies:
  shared:                            # both agents act with it; give each its own for level L3
    model: {model}
    engine: {{type: embedded, slots: 64, max_len: 256}}
    training:
      optimizer: {{learning_rate: 1e-5}}
      schedule: {{type: linear, warmup_steps: 4, min_ratio: 0.1}}
      micro_batch: 32

team:
  workflow: {{type: custom, name: solve_and_check}}
  agents:
    solver:
      policy: shared
      system: You add two numbers. Answer with the number alone.
      sampling: {{max_tokens: 16}}
    checker:
      policy: shared
      system: You check a sum. Answer yes if it is right, no if it is wrong.
      sampling: {{max_tokens: 8}}

batch: {{groups: 8, episodes: 8}}      # tasks of a step, and how often each is played
evaluate: {{tasks: 64, every: 10, every_tasks: 64}}
checkpoint: {{every: 10, best: {{metric: success}}}}
stop: {{metric: success, patience: 3}}

# What flexmarl simulate models; every other command ignores it. Replies of drawn lengths earn drawn rewards.
simulation:
  replies:
    solver: {{type: lengths, mean: 8}}
    checker: {{type: lengths, mean: 3}}
  rewards: {{success: 0.5}}
"""

TEAM = '''\
"""Tasks and workflow of {name}: a solver adds two numbers, a checker says whether the sum is right."""

import random
import re

from flexmarl.agents import Team, workflow
from flexmarl.records import Task
from flexmarl.tasks import Split, scorer, task_generator


@scorer("last_number")
def last_number(answer: str, reference: str) -> float:
    """1.0 if the last number of the answer is that of the reference."""
    numbers = re.findall(r"\\d+", answer)
    return float(bool(numbers) and numbers[-1] == reference)


@task_generator("additions")
def addition(seed: int, index: int, split: Split) -> Task:
    """Task number `index`. Sums of an even first number are trained on; those of an odd one are held out."""
    rng = random.Random(f"{{seed}}/{{split}}/{{index}}")
    first, second = 2 * rng.randrange(10, 50) + (split == "held_out"), rng.randrange(10, 100)
    return Task(
        input_id=f"{{split}}-{{seed}}-{{index}}",
        prompt=f"{{first}} + {{second}} = ?",
        reference=str(first + second),
        scorer=last_number,
    )


@workflow("solve_and_check")
async def solve_and_check(task: Task, team: Team) -> None:
    """One answer, one verdict. Each agent is rewarded for being right; `report` names the figures of evaluations."""
    answer = await team.solver.act(task.prompt)
    verdict = await team.checker.act(f"{{task.prompt}} {{answer.text}}")
    right = task.score(answer.text)
    team.solver.reward(right)
    team.checker.reward(float(("yes" in verdict.text.lower()) == bool(right)))
    team.report(success=right)
'''

README = """\
# {name}

A team of language-model agents, trained with reinforcement learning by flexmarl.

    flexmarl check run.yaml                     is everything there?
    flexmarl train run.yaml                     the last line printed is the run folder
    flexmarl train run.yaml steps=2             any setting can be given on the command line
    flexmarl simulate run.yaml steps=4          how long would it take? no model is loaded
    flexmarl show runs/RUN --best 1             what the agents wrote
    flexmarl eval runs/RUN                      held-out tasks
    flexmarl export runs/RUN models --best      the policy as a Hugging Face folder

| file | holds |
|---|---|
| run.yaml | the settings |
| team.py | the tasks, how an answer is scored, and the workflow: who says what to whom, and who is rewarded for what |

To make it yours: write your tasks in place of `additions` (or `tasks: {{type: jsonl, file: tasks.jsonl}}`), then your
workflow. An exception in a workflow is a failed episode; the run goes on.

Every key of run.yaml is in docs/howto/config.md of flexmarl's source folder{docs}, the other pages are beside
it. `flexmarl check` names a key that does not exist, and `flexmarl COMMAND --help` prints what a command takes.
"""


def init(
    name: Annotated[str, typer.Argument(help="Name of the project, and of the folder that is made here.")],
    model: Annotated[str, typer.Option(help="A model folder, or a name on the Hugging Face hub.")] = MODEL,
) -> None:
    """Make a folder NAME with a team that trains: run.yaml, team.py, README.md."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"NAME must be letters, digits, '.', '_' and '-', got {name!r}; use for example 'my_team'")
    path, folder = Path(model).expanduser(), Path(name)
    is_model = (path / "config.json").is_file()
    if not is_model and (path.is_absolute() or model.startswith((".", "~"))):  # No name on the hub begins so.
        what = "it has no config.json" if path.exists() else "it does not exist"
        raise ConfigError(f"--model: '{model}' is no model folder: {what}; give one, or a name on the hub, {MODEL!r}")
    with boundary(ConfigError, f"NAME: making the folder '{name}'"):
        if folder.exists():
            raise ConfigError(f"NAME: '{name}' exists already; use another name, or remove it")
        folder.mkdir()
        source = os.path.relpath(path, folder) if is_model else model
        here = Path(__file__).parents[3]  # In an installed package, no folder of docs is beside it.
        docs = f" ({here})" if (here / "docs/howto/config.md").is_file() else ""
        for file, text in {"run.yaml": RUN, "team.py": TEAM, "README.md": README}.items():
            (folder / file).write_text(text.format(name=name, model=source, docs=docs), encoding="utf-8")
    print_text(f"{name}: next, cd {name} and flexmarl check run.yaml")
