"""Prefix caching for hybrid Mamba2 + attention models on megatron-core.

Megatron is imported when a name that needs it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .build import build_engine
    from .config import CacheConfig
    from .kernels.ssm.varlen_chunks import compute_varlen_chunk_metadata
    from .mcore.context import MambaCacheContext
    from .mcore.kv_block_allocator import KVBlockAllocator
    from .mcore.specs import with_mamba_cache
    from .policy.align import plan_align_copy
    from .state.mamba_slot_allocator import MambaSlotAllocator

__version__ = "0.1.0"

_HOMES = {
    "CacheConfig": "config",
    "KVBlockAllocator": "mcore.kv_block_allocator",
    "MambaCacheContext": "mcore.context",
    "MambaSlotAllocator": "state.mamba_slot_allocator",
    "build_engine": "build",
    "compute_varlen_chunk_metadata": "kernels.ssm.varlen_chunks",
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


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
