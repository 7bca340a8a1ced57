"""Grammars that replies must follow: written, compiled, and matched against a request's tokens."""
