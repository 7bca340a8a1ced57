"""Causal attention over the paged KV cache, with one backend per library."""
