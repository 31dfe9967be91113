"""Tools that an agent may call while it answers. In: a call found in its text. Out: a text for its next prompt."""

from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from flexmarl.tools.calculator import Calculator
from flexmarl.tools.interface import Tool, is_refusal
from flexmarl.tools.syntax import AnySyntax, FunctionSyntax, Incomplete, Malformed, Parsed, TagSyntax, ToolCall

TOOLS = {
    "calculator": Calculator,
}
"""A new tool is one file and its entry here; the settings class is the tool."""

if TYPE_CHECKING:
    AnyTool = Tool
else:
    AnyTool = Annotated[reduce(or_, TOOLS.values()), Field(discriminator="type" if len(TOOLS) > 1 else None)]
"""Settings field of any tool in the table, chosen by its `type`."""

__all__ = [
    "AnySyntax",
    "AnyTool",
    "Calculator",
    "FunctionSyntax",
    "Incomplete",
    "Malformed",
    "Parsed",
    "TOOLS",
    "TagSyntax",
    "Tool",
    "ToolCall",
    "is_refusal",
]
