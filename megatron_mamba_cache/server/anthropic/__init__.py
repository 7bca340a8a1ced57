"""Anthropic's messages API, in terms of chat completions."""
