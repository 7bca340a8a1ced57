"""Grammars that replies must follow: build them, compile them, and match them against a request's tokens."""
