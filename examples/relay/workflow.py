"""The workflow of the relay: the speaker sees and says a word, the listener hears the word and names the thing.

    sighting ──► speaker ──► word ──► listener ──► name: both are paid if it is that of the thing

Nothing says which word means what. At the start a word tells the listener nothing, and the speaker's choice of one
changes nothing: neither can get better unless the other does.
"""

from flexmarl.agents.team import Team, workflow
from flexmarl.records import Task


@workflow("relay")
async def relay(task: Task, team: Team) -> None:
    """One sighting, one word, one name."""
    word = await team.speaker.act(task.prompt)
    name = await team.listener.act(word.text)
    success = task.score(name.text)
    team.speaker.reward(success)
    team.listener.reward(success)
    team.report(success=success)
