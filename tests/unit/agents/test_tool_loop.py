import pytest

from flexmarl.agents.interpret import Ending, Next, next_move
from flexmarl.tools import Incomplete, Malformed, ToolCall

CALL, PART, BAD = ToolCall("calculator", "1+1"), Incomplete("error: open"), Malformed("error: what?")


@pytest.mark.parametrize(
    ("call", "own", "syntax", "length"),
    [
        (None, Next.REPLY, Next.CONTINUE, Next.REPLY),
        (PART, Next.USE_TOOL, Next.CONTINUE, Next.REPLY),
        (CALL, Next.USE_TOOL, Next.USE_TOOL, Next.USE_TOOL),
        (BAD, Next.USE_TOOL, Next.USE_TOOL, Next.USE_TOOL),
    ],
)
def test_what_follows_depends_on_the_call_and_on_what_ended_the_text(call, own, syntax, length):
    followed = {Ending.AGENT: own, Ending.SYNTAX: syntax, Ending.LENGTH: length}
    for ending, follows in followed.items():
        assert next_move(call, ending, may_call=True) is follows
        # Without budget a call stands as the reply; one that is not yet whole is finished first.
        assert next_move(call, ending, may_call=False) is (Next.REPLY if follows is Next.USE_TOOL else follows)
