"""Parsers of replies: from text deltas to content, reasoning and tool calls."""
