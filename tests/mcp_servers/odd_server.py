"""A server on the SDK, with tools that misbehave: over stdio, or over HTTP on the listening socket that it is given."""

import os
import sys
import time

import anyio
import uvicorn
from mcp.server import _streamable_http_modern
from mcp.server.mcpserver import Context, Image, MCPServer
from pydantic import BaseModel

if os.environ.get("ODD") == "hangs at start":
    time.sleep(600)
if os.environ.get("ODD") == "floods":
    while True:
        os.write(1, b"x" * 2**20)
if os.environ.get("ODD") == "ends at start":
    sys.exit("it does not want to")

server = MCPServer("odd")
counted = 0


class Confirmed(BaseModel):
    """What it asks for."""

    yes: bool


@server.tool()
def echo(text: str) -> str:
    """Says the same."""
    return text


@server.tool()
def count() -> int:
    """Counts its calls."""
    global counted
    counted += 1
    return counted


@server.tool()
async def wait(seconds: float) -> str:
    """Waits, in a program of its own."""
    await anyio.run_process(["sleep", str(seconds)])
    return "waited"


@server.tool()
async def hang() -> str:
    """Does nothing, and lets nothing else be done."""
    time.sleep(600)  # noqa: ASYNC251
    return ""


@server.tool()
def end() -> str:
    """Ends the server."""
    os._exit(3)


@server.tool()
def fail() -> str:
    """Fails."""
    raise ValueError("it fails")


@server.tool()
def picture() -> Image:
    """Shows a picture."""
    return Image(data=b"\x89PNG", format="png")


@server.tool()
async def ask(context: Context) -> str:
    """Asks the user."""
    return str(await context.elicit("May I?", Confirmed))


@server.tool()
async def much(seconds: float) -> str:
    """Says more than a message may have after a while, and counts as `count` does."""
    count()
    await anyio.sleep(seconds)
    return "x" * 2**25


@server.tool()
def colours() -> str:
    """Writes what a terminal would hide."""
    return "a\x1b[2Jb"


if os.environ.get("ODD") == "has another tool":

    @server.tool()
    def another() -> str:
        """Was not there."""
        return ""


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _streamable_http_modern._SSE_PING_INTERVAL = 0.5  # What takes longer is answered by events.
        uvicorn.run(server.streamable_http_app(), fd=int(sys.argv[1]))
    else:
        server.run()
