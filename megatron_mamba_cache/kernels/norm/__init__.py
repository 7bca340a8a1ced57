"""Gated and plain RMS norms by group."""
