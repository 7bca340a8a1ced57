"""Parsers for replies: convert text deltas to content, reasoning and tool calls."""
