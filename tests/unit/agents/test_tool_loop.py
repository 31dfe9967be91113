import pytest

from flexmarl.agents.interpret import Ending, Next, next_move
from flexmarl.tools import Incomplete, Malformed, ToolCall

CALL, PART, BAD = ToolCall("calculator", "1+1"), Incomplete("error: open"), Malformed("error: what?")


@pytest.mark.parametrize(
    ("call", "own", "syntax", "length"),
    [
        (None, Next.STAND, Next.GO_ON, Next.STAND),
        (PART, Next.USE_TOOL, Next.GO_ON, Next.STAND),
        (CALL, Next.USE_TOOL, Next.USE_TOOL, Next.USE_TOOL),
        (BAD, Next.USE_TOOL, Next.USE_TOOL, Next.USE_TOOL),
    ],
)
def test_what_follows_depends_on_the_call_and_on_what_ended_the_text(call, own, syntax, length):
    followed = {Ending.OWN: own, Ending.SYNTAX: syntax, Ending.LENGTH: length}
    for ending, follows in followed.items():
        assert next_move(call, ending, may_call=True) is follows
        # Without budget a call stands as the reply; one that is not yet whole is finished first.
        assert next_move(call, ending, may_call=False) is (Next.STAND if follows is Next.USE_TOOL else follows)
