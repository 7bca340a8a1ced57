"""Decode and verify steps that recompute Mamba2 states from an older state and a ring of the inputs of later tokens."""
