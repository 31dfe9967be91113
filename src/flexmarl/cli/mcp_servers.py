"""`flexmarl mcp`: asks the MCP servers of a config for their tools, and pins them."""

from flexmarl.cli.options import Config, Overrides, boxes
from flexmarl.cli.terminal import print_text
from flexmarl.config import load_run
from flexmarl.errors import ConfigError


def mcp(config: Config, overrides: Overrides = None) -> None:
    """Ask each MCP server of CONFIG for its tools, and write them into its `tools_file`.

    Look at the files: their texts reach the models. A run fails the episodes of a server that lists other tools.
    """
    settings = load_run(config, overrides or [])
    if not boxes.servers_of(settings):
        raise ConfigError("team.agents.NAME.tools: no agent has a tool of type mcp, so there is nothing to ask for")
    for server, names in boxes.pin_tools(settings):
        print_text(f"{server.tools_file}: {', '.join(names) or 'no tools'}")
