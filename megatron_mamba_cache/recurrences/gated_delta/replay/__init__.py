"""Decode and verify steps that recompute Gated DeltaNet states from an older state and a ring of later updates."""
