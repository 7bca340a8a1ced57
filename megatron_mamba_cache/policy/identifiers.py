"""Distinct types for ids that must never be mixed: KV blocks, state slots and draft buffers."""

from typing import NewType

BlockId = NewType("BlockId", int)
"""A physical KV block."""

SlotId = NewType("SlotId", int)
"""A slot of the state pool, across all recurrent layers."""

BlockKey = NewType("BlockKey", int)
"""The SHA-256 digest of a block and everything before it, as a positive integer."""

DraftBufferId = NewType("DraftBufferId", int)
"""The buffer of a running request that keeps its drafts' inputs instead of their states."""
