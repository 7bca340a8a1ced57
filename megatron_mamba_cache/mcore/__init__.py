"""Subclasses of megatron-core's engine, context and layers; lower layers of the package do not import Megatron."""

from importlib.metadata import version
from typing import TYPE_CHECKING

from ..public_names import lazy_names

if TYPE_CHECKING:
    from .local_spec import local_hybrid_spec
    from .model_ranks import initialize_single_process

_HOMES = {"initialize_single_process": "model_ranks", "local_hybrid_spec": "local_spec"}

__all__ = ["initialize_single_process", "local_hybrid_spec"]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)

SUPPORTED_MEGATRON_CORE = "0.16.1"


def _check_megatron_core(installed: str) -> None:
    if installed != SUPPORTED_MEGATRON_CORE:
        raise ImportError(
            f"megatron-core {installed} is installed, but this package extends megatron-core "
            f"{SUPPORTED_MEGATRON_CORE} by subclassing: pip install megatron-core=={SUPPORTED_MEGATRON_CORE}"
        )


_check_megatron_core(version("megatron-core"))

from . import cpu as _cpu  # noqa: E402  (after the version check, whose error is clearer than one from here)

_cpu.install()
