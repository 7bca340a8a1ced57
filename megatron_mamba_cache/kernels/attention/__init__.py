"""Causal attention over the paged KV cache, by whichever library is installed."""
