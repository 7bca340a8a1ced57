"""Tokenizers and chat templates of model directories."""
