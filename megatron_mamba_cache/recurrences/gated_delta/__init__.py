"""Gated DeltaNet: layer dimensions and states, prefill scan, and decode with drafts."""
