"""Structured output: build the grammars that replies must follow, compile them, and match them against tokens."""
