"""The pages of the documentation and what is in them: code blocks, links, headings, tables."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    str(page.relative_to(ROOT))
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"))
)

_FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block. Its head may say more: `python file=team.py`."""

    language: str
    notes: dict[str, str]
    text: str


@cache
def read(page: str) -> str:
    """The text of a page."""
    return (ROOT / page).read_text("utf-8")


def blocks(page: str, language: str) -> list[Block]:
    """The fenced blocks in one language, in order."""
    found = [Block(kind, _notes(head), text) for kind, head, text in _FENCE.findall(read(page))]
    return [block for block in found if block.language == language]


def files(page: str, note: str = "file") -> dict[str, str]:
    """Text by path of the blocks whose head names one."""
    every = [block for language in ("python", "yaml", "toml") for block in blocks(page, language)]
    return {block.notes[note]: block.text for block in every if note in block.notes}


def commands(page: str) -> list[str]:
    """The lines of the bash blocks."""
    joined = [block.text.replace("\\\n", " ") for block in blocks(page, "bash")]
    return [line for text in joined for line in text.splitlines() if line.strip()]


def prose(page: str) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", read(page), flags=re.MULTILINE | re.DOTALL)


def links(page: str) -> list[str]:
    """The targets of all links, pictures included."""
    return _LINK.findall(prose(page))


def anchors(page: str) -> set[str]:
    """The anchors of the headings, as GitHub makes them."""
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in _HEADING.findall(prose(page))}


def rows(page: str, heading: str) -> Iterator[list[str]]:
    """The cells of the table rows below a heading, up to the next one, without the head of the table."""
    section = prose(page).split(f"{heading}\n", 1)[1].split("\n#", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    for line in lines[2:]:
        yield [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))]


def _notes(head: str) -> dict[str, str]:
    return dict(note.split("=", 1) for note in head.split())
