"""Causal attention over the paged KV cache, by whichever library a machine has."""
