"""Gated DeltaNet: layer sizes and states, prefill scan, and decode with drafts."""
