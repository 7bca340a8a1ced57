"""Hugging Face model families: map each config to an architecture and each tensor to its destination."""
