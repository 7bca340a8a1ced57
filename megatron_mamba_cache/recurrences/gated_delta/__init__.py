"""Gated DeltaNet: sizes and states of its layers, prefill scan, decode and verification of drafts."""
