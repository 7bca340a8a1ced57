"""Hugging Face model families: how each config maps to an architecture and each tensor to its destination."""
