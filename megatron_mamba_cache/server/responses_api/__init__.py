"""OpenAI's responses API, translated to chat completions."""
