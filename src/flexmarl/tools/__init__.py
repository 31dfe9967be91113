"""Tools that an agent may call while it answers. In: calls found in its text. Out: observations for its next prompt."""

from typing import Annotated

from flexmarl.plugins import SettingsTable
from flexmarl.tools.calculator import Calculator
from flexmarl.tools.function_tool import Refusal, is_pure, tool_of_function
from flexmarl.tools.interface import BoundTool, Observation, Tool, ToolContext, ToolSet
from flexmarl.tools.syntax import (
    SYNTAXES,
    AnySyntax,
    Found,
    Incomplete,
    Malformed,
    Syntax,
    SyntaxBase,
    ToolCall,
    syntax,
)
from flexmarl.tools.syntaxes import FencedSyntax, FunctionSyntax, LlamaSyntax, MistralSyntax, TagSyntax, XmlSyntax

TOOLS: SettingsTable[Tool | ToolSet] = SettingsTable(
    "tool",
    setting="team.agents.NAME.tools.type",
    group="tools",
    interface=[Tool, ToolSet],
    built_in={
        "calculator": "flexmarl.tools.calculator:Calculator",
        "python": "flexmarl.tools.boxed:PythonTool",
        "shell": "flexmarl.tools.boxed:ShellTool",
        "sql": "flexmarl.tools.sql:SqlTool",
        "search": "flexmarl.tools.search:SearchTool",
        "mcp": "flexmarl.tools.mcp:McpServer",
    },
    of_function=tool_of_function,
)
"""Tools by `type`; the settings class is the tool."""
tool = TOOLS.register
"""Decorator that makes a function, or a settings class, the tool of its name or `type`: `@tool`, `@tool("name")`.

`@tool(pure=True)` marks a function that computes in microseconds and waits for nothing: simulations call it, too."""

AnyTool = Annotated[Tool | ToolSet, TOOLS]
"""Settings field of any tool in the table, chosen by its `type`."""

__all__ = [
    "AnySyntax",
    "AnyTool",
    "BoundTool",
    "Calculator",
    "FencedSyntax",
    "Found",
    "FunctionSyntax",
    "Incomplete",
    "LlamaSyntax",
    "Malformed",
    "MistralSyntax",
    "Observation",
    "Refusal",
    "SYNTAXES",
    "Syntax",
    "SyntaxBase",
    "TOOLS",
    "TagSyntax",
    "Tool",
    "ToolCall",
    "ToolContext",
    "ToolSet",
    "XmlSyntax",
    "is_pure",
    "syntax",
    "tool",
]
