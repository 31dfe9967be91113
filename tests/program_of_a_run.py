"""A program for small runs: it speaks to its seat with Python's own HTTP client, in two turns and an edited one."""

PROGRAM = """
import asyncio
import json
import urllib.request

from flexmarl.agents.black_box import judge, program


def ask(seat, messages):
    body = json.dumps({"messages": messages, "max_tokens": 4}).encode()
    headers = {"authorization": f"Bearer {seat.key}", "content-type": "application/json"}
    request = urllib.request.Request(f"{seat.openai_url}/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())["choices"][0]["message"]


@program("two_turns_and_an_edit")
async def two_turns_and_an_edit(task, seats):
    said = [{"role": "user", "content": task.prompt}]
    reply = await asyncio.to_thread(ask, seats["solver"], said)
    more = [*said, reply, {"role": "user", "content": "1"}]
    await asyncio.to_thread(ask, seats["solver"], more)
    edited = [*said, {"role": "assistant", "content": "2+2"}, {"role": "user", "content": "1"}]
    return (await asyncio.to_thread(ask, seats["solver"], edited))["content"] or ""


@judge("digits_in_calls")
def digits_in_calls(task, team, answer, calls):
    for call in calls:
        call.reward(sum(letter.isdigit() for letter in call.text) / 8)
    team.report(success=sum(letter.isdigit() for letter in answer) / 8)


@program("asks_every_seat")
async def asks_every_seat(task, seats):
    said = [{"role": "user", "content": task.prompt}]
    replies = [await asyncio.to_thread(ask, seat, said) for seat in seats.values()]
    return replies[0]["content"] or ""


@program("tells_its_key")
async def tells_its_key(task, seats):
    raise ValueError(f"{seats['solver'].key} does not work at {seats['solver'].openai_url}")


@program("raises")
async def raises(task, seats):
    raise ValueError("no such tool")
"""

OVERRIDES = (
    "code=[tasks.py, program.py]",
    "team.workflow={type: program, name: two_turns_and_an_edit, judge: digits_in_calls}",
)
"""Settings with which a small run plays it."""
