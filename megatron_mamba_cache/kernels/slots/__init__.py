"""Copies between state slots: restore, commit, clear, and the align copy of speculative decoding."""
