"""OpenAI's responses API, in terms of chat completions."""
