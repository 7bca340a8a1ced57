"""Models, checkpoints, draft models and tokenizers."""
