"""What the package offers, and what importing it costs."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import megatron_mamba_cache

PUBLIC_NAMES = {
    "CacheConfig",
    "KVBlockAllocator",
    "MambaCacheContext",
    "MambaSlotAllocator",
    "build_engine",
    "compute_varlen_chunk_metadata",
    "plan_align_copy",
    "with_mamba_cache",
}
NEED_NO_MEGATRON = ("CacheConfig", "MambaSlotAllocator", "compute_varlen_chunk_metadata", "plan_align_copy")


def modules_after(code: str) -> set[str]:
    """Run code in a fresh interpreter and return the top-level names of the modules that it imported."""
    report = "import sys; print('imported:', *{name.partition('.')[0] for name in sys.modules})"
    root = Path(str(megatron_mamba_cache.__file__)).parents[1]
    command = [sys.executable, "-c", f"{code}\n{report}"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    return set(done.stdout.rpartition("imported:")[2].split())


def test_all_is_the_public_api() -> None:
    assert set(megatron_mamba_cache.__all__) == PUBLIC_NAMES
    assert len(megatron_mamba_cache.__all__) == len(PUBLIC_NAMES)


@pytest.mark.parametrize("name", sorted(PUBLIC_NAMES))
def test_public_name_is_found_where_it_lives(name: str) -> None:
    value = getattr(megatron_mamba_cache, name)
    assert value.__name__ == name
    assert getattr(import_module(value.__module__), name) is value
    assert value.__module__.startswith("megatron_mamba_cache.")
    assert value.__doc__


def test_star_import_brings_the_public_names_only() -> None:
    names: dict[str, object] = {}
    exec("from megatron_mamba_cache import *", names)
    assert names.keys() - {"__builtins__"} == PUBLIC_NAMES


def test_dir_lists_names_that_are_not_imported_yet() -> None:
    assert set(dir(megatron_mamba_cache)) >= PUBLIC_NAMES


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'MambaCache'"):
        megatron_mamba_cache.MambaCache  # noqa: B018


def test_importing_the_package_imports_neither_megatron_nor_torch() -> None:
    imported = modules_after("import megatron_mamba_cache")
    assert "megatron_mamba_cache" in imported
    assert not imported & {"megatron", "torch", "triton"}


def test_names_that_need_no_megatron_import_none() -> None:
    assert "megatron" not in modules_after(f"from megatron_mamba_cache import {', '.join(NEED_NO_MEGATRON)}")


def test_settings_and_plans_need_no_torch() -> None:
    assert "torch" not in modules_after("from megatron_mamba_cache import CacheConfig, plan_align_copy")


def test_names_of_the_engine_import_megatron_when_used() -> None:
    assert "megatron" in modules_after("from megatron_mamba_cache import build_engine")
