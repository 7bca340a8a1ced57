"""Triton kernels for packed batches and state pools, each with a torch reference."""
