"""Ranks that hold one model: shared settings, and detection of differing decisions. Does not import Megatron."""
