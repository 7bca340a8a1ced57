"""Triton kernels of mamba-ssm, imported without its CUDA extensions and models, if it is installed.

MAMBA_SKIP_CUDA_BUILD=TRUE pip install --no-deps --no-build-isolation mamba-ssm==2.3.2.post1
"""

import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType


def peer_function(module: str, name: str) -> Callable[..., object] | None:
    """Return a function of mamba_ssm.ops.triton; None if mamba-ssm is not installed."""
    if missing_peer() is not None:
        return None
    function: Callable[..., object] = getattr(import_module(f"mamba_ssm.ops.triton.{module}"), name)
    return function


@cache
def missing_peer() -> str | None:
    """Return why mamba-ssm cannot be imported; None if it can."""
    spec = find_spec("mamba_ssm")
    if spec is None or spec.submodule_search_locations is None:
        return "mamba-ssm is not installed"
    if "mamba_ssm" not in sys.modules:
        package = ModuleType("mamba_ssm")  # its own __init__ imports models and their dependencies
        package.__path__ = list(spec.submodule_search_locations)
        package.__spec__ = spec
        sys.modules["mamba_ssm"] = package
    try:
        import_module("mamba_ssm.ops.triton.ssd_combined")
    except ImportError as error:
        return f"mamba-ssm cannot be imported: {error}"
    return None
