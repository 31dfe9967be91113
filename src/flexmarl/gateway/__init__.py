"""Agents that we cannot import: programs that speak OpenAI's or Anthropic's API. In: their requests. Out: turns."""
