"""Ops on packed batches and state pools: Triton kernels, each with a torch reference."""
