"""The workflow of the store assistant: the router names the helper of each line, the helper answers it.

    customer's lines ──► router ──► helper of the first line (──► its tool) ──► answer
                         router ──► helper of the second line ...
                         router ──► bye

Each reply is a word of one letter or digit, repeated: who writes much takes long. The router is paid for naming the
helper, and asked for `b` (bye) at the end; a helper is paid for the digit. A wrong name is not obeyed: every line comes
to its helper, so that the calls are the same, whatever is learned.
"""

from examples.store_assistant.tasks import HELPERS, answer_of
from flexmarl.agents.team import Team, workflow
from flexmarl.records import Task

BYE = "b"


@workflow("store_assistant")
async def serve(task: Task, team: Team) -> None:
    """Serves one customer."""
    named: list[float] = []
    answered: list[float] = []
    for line in task.prompt.split(";"):
        helper = HELPERS[line.split()[0]]
        name = await team.router.act(line)
        named.append(share(name.text, helper.letter))
        name.reward(named[-1])
        answer = await team[helper.agent].act(line)
        answered.append(share(answer.text, answer_of(line)))
        answer.reward(answered[-1])
    end = await team.router.act("")
    named.append(share(end.text, BYE))
    end.reward(named[-1])
    team.report(success=sum(answered) / len(answered), routed=sum(named) / len(named))


def share(text: str, wanted: str) -> float:
    """The share of a reply's letters that are the wanted one; 0 for an empty reply."""
    return text.count(wanted) / len(text) if text else 0.0
