"""Prefix caching for hybrid models of recurrent and attention layers on megatron-core.

Megatron is imported on first use of a name that needs it.
"""

from typing import TYPE_CHECKING

from .public_names import lazy_names

if TYPE_CHECKING:
    from .build import build_engine
    from .config import CacheConfig
    from .mcore.context import MambaCacheContext
    from .mcore.kv_block_allocator import KVBlockAllocator
    from .mcore.specs import with_mamba_cache
    from .policy.align import plan_align_copy
    from .recurrences.mamba2.varlen_chunks import compute_varlen_chunk_metadata
    from .recurrences.mamba_slot_allocator import MambaSlotAllocator

__version__ = "0.1.0"

_HOMES = {
    "CacheConfig": "config",
    "KVBlockAllocator": "mcore.kv_block_allocator",
    "MambaCacheContext": "mcore.context",
    "MambaSlotAllocator": "recurrences.mamba_slot_allocator",
    "build_engine": "build",
    "compute_varlen_chunk_metadata": "recurrences.mamba2.varlen_chunks",
    "plan_align_copy": "policy.align",
    "with_mamba_cache": "mcore.specs",
}

__all__ = [
    "CacheConfig",
    "KVBlockAllocator",
    "MambaCacheContext",
    "MambaSlotAllocator",
    "build_engine",
    "compute_varlen_chunk_metadata",
    "plan_align_copy",
    "with_mamba_cache",
]


__getattr__, __dir__ = lazy_names(__name__, _HOMES)
