"""Causal convolution for prefill and for decode steps with drafts, and its windows in state slots."""
