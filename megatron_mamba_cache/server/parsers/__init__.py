"""Reply parsers: convert streamed text to content, reasoning and tool calls."""
