"""Grammars that replies have to follow: how they are written, compiled, and matched against a row's tokens."""
