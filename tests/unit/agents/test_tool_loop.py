import pytest

from flexmarl.agents.interpret import Ending, Next, next_move
from flexmarl.tools import Incomplete, Malformed, ToolCall

CALL, PART, BAD = (
    ToolCall("calculator", "1+1"),
    Incomplete("open"),
    Malformed("what?"),
)


@pytest.mark.parametrize(
    ("calls", "own", "syntax", "length"),
    [
        ((), Next.REPLY, Next.CONTINUE, Next.REPLY),
        ((PART,), Next.USE_TOOLS, Next.CONTINUE, Next.REPLY),
        ((CALL,), Next.USE_TOOLS, Next.USE_TOOLS, Next.USE_TOOLS),
        ((BAD,), Next.USE_TOOLS, Next.USE_TOOLS, Next.USE_TOOLS),
        ((CALL, BAD), Next.USE_TOOLS, Next.USE_TOOLS, Next.USE_TOOLS),
        ((CALL, PART), Next.USE_TOOLS, Next.CONTINUE, Next.USE_TOOLS),
    ],
)
def test_what_follows_depends_on_the_calls_and_on_what_ended_the_text(calls, own, syntax, length):
    followed = {Ending.AGENT: own, Ending.SYNTAX: syntax, Ending.LENGTH: length}
    for ending, follows in followed.items():
        assert next_move(calls, ending, may_call=True) is follows
        # Without budget a call stands as the reply; one that is not yet whole is finished first.
        assert next_move(calls, ending, may_call=False) is (Next.REPLY if follows is Next.USE_TOOLS else follows)
