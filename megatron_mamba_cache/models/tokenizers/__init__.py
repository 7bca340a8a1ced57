"""Tokenizers, and text from tokens as they come."""
