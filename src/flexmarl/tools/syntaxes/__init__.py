"""Syntaxes of tool calls, a file for each family. In: the text of a message. Out: the calls in it."""

from flexmarl.tools.syntaxes.fenced import FencedSyntax
from flexmarl.tools.syntaxes.function import FunctionSyntax
from flexmarl.tools.syntaxes.llama import LlamaSyntax
from flexmarl.tools.syntaxes.mistral import MistralSyntax
from flexmarl.tools.syntaxes.tag import TagSyntax
from flexmarl.tools.syntaxes.xml import XmlSyntax

__all__ = ["FencedSyntax", "FunctionSyntax", "LlamaSyntax", "MistralSyntax", "TagSyntax", "XmlSyntax"]
