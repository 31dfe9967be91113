"""The workflow of the long notes: a reader sees page after page, then a question on a fact of one of them.

    page 1 ──► reader ──► .            page 2 ──► reader ──► .   ...   question ──► reader ──► fact: paid if right
                    └─► summary ──► carried ─┘          └─► summary ──► carried ─┘

The window holds one page beside a summary. Before the next page and before the question, the reader is asked for a
summary, and goes on from this alone (`context.compact` in cpu.yaml): what is in no summary cannot be answered. The
workflow knows nothing of summaries: the agent's settings ask for them, and they are paid as all its turns are.
"""

from flexmarl.agents.team import Team, workflow
from flexmarl.records import Task


@workflow("long_notes")
async def long_notes(task: Task, team: Team) -> None:
    """Reads all pages, answers the question."""
    *pages, question = task.prompt.split("/")
    for page in pages:
        await team.reader.act(page)
    answer = await team.reader.act(question)
    success = task.score(answer.text)
    team.reader.reward(success)
    kept = set("".join(answer.summaries)).intersection(task.data["facts"])
    team.report(
        success=success,
        facts_carried=len(kept) / len(task.data["facts"]),
        **{f"success/page_{task.data['page']}": success},
    )
