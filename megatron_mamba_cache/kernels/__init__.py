"""Ops on packed batches and state pools: each has a torch reference; Triton forms stand beside them."""
