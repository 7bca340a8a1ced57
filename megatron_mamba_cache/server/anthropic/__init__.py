"""Anthropic's messages API, translated to chat completions."""
