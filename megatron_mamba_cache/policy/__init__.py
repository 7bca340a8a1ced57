"""Decisions of the cache, from plain values to frozen plans. Imports neither torch nor Megatron."""
