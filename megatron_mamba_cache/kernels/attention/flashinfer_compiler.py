"""Find the compilers that FlashInfer needs on this machine, without importing FlashInfer."""

import os
import shutil
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .interface import is_installed

_COMPILED = "flashinfer_jit_cache"
_DEFAULT_CUDA = "/usr/local/cuda"


def origin_of_kernels() -> str:
    """Return a text for `doctor`: where FlashInfer gets its kernels, or which programs are missing to compile them.

    FlashInfer runs `nvcc`, the C++ compiler and `ninja`. It looks for CUDA in `CUDA_HOME`, in `CUDA_PATH`, next to an
    `nvcc` in `PATH`, and in /usr/local/cuda. Source: FlashInfer 0.5.3 to 0.7.2, jit/cpp_ext.py.
    """
    if is_installed(_COMPILED):
        return "its kernels are in the package flashinfer-jit-cache"
    nvcc = _nvcc()
    with scripts_in_path():
        programs = (str(nvcc), os.environ.get("CXX", "c++"), "ninja")
        missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        lacking = ", ".join(missing)
        return (
            f"its kernels cannot be compiled without {lacking}; install it, or run `flashinfer install-jit-cache-wheel`"
        )
    folder = Path(os.environ.get("FLASHINFER_WORKSPACE_BASE") or Path.home(), ".cache", "flashinfer")
    return f"{nvcc} compiles its kernels when a model is first started; they are cached in {folder}"


@contextmanager
def scripts_in_path() -> Iterator[None]:
    """Context manager that appends this Python's scripts folder to `PATH`, in case its venv is not activated."""
    before = os.environ.get("PATH", os.defpath)
    os.environ["PATH"] = os.pathsep.join((before, sysconfig.get_path("scripts")))
    try:
        yield
    finally:
        os.environ["PATH"] = before


def _nvcc() -> Path:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home is None and (found := shutil.which("nvcc")) is not None:
        return Path(found)
    return Path(home or _DEFAULT_CUDA, "bin", "nvcc")
