"""An OpenAI-compatible HTTP server for the engine."""
