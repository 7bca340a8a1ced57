"""Causal attention over the paged KV cache, by any installed library."""
