"""The causal convolution: prefill of packed requests, verification of drafts, and its windows."""
