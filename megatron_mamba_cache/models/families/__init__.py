"""Hugging Face model families: how each config becomes an architecture and each tensor finds its place."""
