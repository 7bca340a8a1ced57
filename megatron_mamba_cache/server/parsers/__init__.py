"""Parsers of replies: text deltas in; content, reasoning and tool calls out, however the text was cut."""
