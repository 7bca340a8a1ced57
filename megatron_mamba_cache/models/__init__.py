"""Where models come from: what ships with the package, and tokenizers for it."""
