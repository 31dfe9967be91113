"""Tools that an agent may call while it answers. In: a call found in its text. Out: a text for its next prompt."""

from typing import Annotated

from flexmarl.plugins import SettingsTable
from flexmarl.tools.calculator import Calculator
from flexmarl.tools.interface import Tool, is_refusal
from flexmarl.tools.syntax import (
    SYNTAXES,
    AnySyntax,
    FunctionSyntax,
    Incomplete,
    Malformed,
    Parsed,
    Syntax,
    TagSyntax,
    ToolCall,
    syntax,
)

TOOLS: SettingsTable[Tool] = SettingsTable(
    "tool",
    setting="team.agents.NAME.tools.type",
    group="tools",
    interface=[Tool],
    built_in={"calculator": "flexmarl.tools.calculator:Calculator"},
)
"""Tools by `type`; the settings class is the tool."""
tool = TOOLS.register
"""Decorator that makes a settings class the tool of its `type`: `@tool`."""

AnyTool = Annotated[Tool, TOOLS]
"""Settings field of any tool in the table, chosen by its `type`."""

__all__ = [
    "AnySyntax",
    "AnyTool",
    "Calculator",
    "FunctionSyntax",
    "Incomplete",
    "Malformed",
    "Parsed",
    "SYNTAXES",
    "Syntax",
    "TOOLS",
    "TagSyntax",
    "Tool",
    "ToolCall",
    "is_refusal",
    "syntax",
    "tool",
]
