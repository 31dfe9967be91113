"""Servers for the tests: of PyPI and npm, and one that misbehaves; each in a box of this machine."""

import asyncio
import json
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flexmarl.sandbox.backends.bubblewrap import Bubblewrap
from flexmarl.sandbox.probe import probe_now
from flexmarl.tools import mcp_session
from flexmarl.tools.mcp import McpServer, as_text
from tests.sandbox.conftest import remains

HERE = Path(__file__).parent
MODULES = HERE / "node_modules"
PACKAGES = sysconfig.get_path("purelib")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without bubblewrap or Node, tests of servers say so."""
    lacking = [
        need
        for need, there in (("bubblewrap", shutil.which("bwrap")), ("the servers of npm", MODULES.is_dir()))
        if not there
    ]
    for item in items:
        if lacking and "mcp_servers" in item.path.parts:
            item.add_marker(pytest.mark.skip(reason=f"{lacking[0]} is not installed: make test-mcp"))


@pytest.fixture(scope="session")
def sandbox() -> Bubblewrap:
    """The sandbox of this machine."""
    missing = [one for one in probe_now(Bubblewrap()) if not one.held]
    if missing:
        pytest.skip(f"this machine cannot guarantee {missing[0].name}: {missing[0].found}")
    return Bubblewrap()


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """After each test, no box is left."""
    yield
    assert remains() == []


def of_pypi(module: str, **settings: Any) -> dict[str, Any]:
    """Settings of a server in an installed package."""
    return {
        "name": module.removeprefix("mcp_server_"),
        "command": ("python3", "-m", module),
        "reads": (PACKAGES,),
        "environment": {"PYTHONPATH": PACKAGES},
        **settings,
    }


def of_npm(name: str, *arguments: str, **settings: Any) -> dict[str, Any]:
    """Settings of a server of npm."""
    program = MODULES / "@modelcontextprotocol" / f"server-{name}" / "dist" / "index.js"
    return {"name": name, "command": ("node", str(program), *arguments), "reads": (MODULES,), **settings}


def odd(misbehaving: str = "", **settings: Any) -> dict[str, Any]:
    """Settings of the server that misbehaves."""
    program = HERE / "odd_server.py"
    environment = {"PYTHONPATH": PACKAGES, "ODD": misbehaving}
    return {
        "name": "odd",
        "command": ("python3", str(program)),
        "reads": (PACKAGES, program),
        "environment": environment,
        **settings,
    }


@pytest.fixture(scope="session")
def pinned(sandbox: Bubblewrap, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., McpServer]:
    """A server with its tools in a file, which is written once for each program."""
    folder = tmp_path_factory.mktemp("tools")

    def make(settings: dict[str, Any], *, listed_by: dict[str, Any] | None = None) -> McpServer:
        server = McpServer(tools_file=folder / f"{settings['name']}.json", **settings)
        if not server.tools_file.exists():
            asker = McpServer(tools_file=server.tools_file, **(listed_by or settings))
            server.tools_file.write_text(as_text(asyncio.run(mcp_session.listed_tools(asker, sandbox))))
            assert json.loads(server.tools_file.read_text())
        return server

    return make


@pytest.fixture(scope="session")
def odd_over_http() -> Iterator[str]:
    """The address of the server that misbehaves, over HTTP."""
    with socket.create_server(("127.0.0.1", 0)) as listener:  # Who connects waits until the server is there.
        number, port = listener.fileno(), listener.getsockname()[1]
        program = subprocess.Popen([sys.executable, HERE / "odd_server.py", str(number)], pass_fds=[number])
    try:
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        program.kill()
        program.wait()
