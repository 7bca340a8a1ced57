"""The public API, and the cost of importing it."""

import re
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
FACES = {
    "mcore": {"initialize_single_process", "local_hybrid_spec"},
    "models": {
        "ByteTokenizer",
        "DraftModelDrafter",
        "RandomHybridConfig",
        "load_hugging_face",
        "load_megatron_checkpoint",
        "load_tokenizer",
        "random_hybrid_model",
        "save_megatron_checkpoint",
    },
    "replicas": {"KeyedInferenceClient", "ReplicaClient", "ReplicaEngine", "RoutingSettings"},
    "speculation": {"AutoDrafter", "Draft", "DraftRequest", "Drafter", "PromptLookupDrafter", "ReadsHiddenStates"},
}
"""Names that the documentation imports from subpackages."""

DOCUMENTED_IMPORT = re.compile(r"from (megatron_mamba_cache[\w.]*) import ([\w, ]+)")
NEED_NO_MEGATRON = ("CacheConfig", "MambaSlotAllocator", "compute_varlen_chunk_metadata", "plan_align_copy")


def modules_after(code: str) -> set[str]:
    """Run code in a fresh interpreter and return the top-level names of the modules that it imported."""
    report = "import sys; print('imported:', *{name.partition('.')[0] for name in sys.modules})"
    root = Path(str(megatron_mamba_cache.__file__)).parents[1]
    command = [sys.executable, "-c", f"{code}\n{report}"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    return set(done.stdout.rpartition("imported:")[2].split())


def test_all_lists_the_public_api() -> None:
    assert set(megatron_mamba_cache.__all__) == PUBLIC_NAMES
    assert len(megatron_mamba_cache.__all__) == len(PUBLIC_NAMES)


@pytest.mark.parametrize("name", sorted(PUBLIC_NAMES))
def test_public_name_is_found_in_its_module(name: str) -> None:
    value = getattr(megatron_mamba_cache, name)
    assert value.__name__ == name
    assert getattr(import_module(value.__module__), name) is value
    assert value.__module__.startswith("megatron_mamba_cache.")
    assert value.__doc__


def test_star_import_imports_only_public_names() -> None:
    names: dict[str, object] = {}
    exec("from megatron_mamba_cache import *", names)
    assert names.keys() - {"__builtins__"} == PUBLIC_NAMES


def test_dir_lists_lazy_names_before_their_import() -> None:
    assert set(dir(megatron_mamba_cache)) >= PUBLIC_NAMES


def test_unknown_name_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'MambaCache'"):
        megatron_mamba_cache.MambaCache  # noqa: B018


def test_importing_the_package_imports_neither_megatron_nor_torch() -> None:
    imported = modules_after("import megatron_mamba_cache")
    assert "megatron_mamba_cache" in imported
    assert not imported & {"megatron", "torch", "triton"}


def test_names_that_do_not_need_megatron_do_not_import_it() -> None:
    assert "megatron" not in modules_after(f"from megatron_mamba_cache import {', '.join(NEED_NO_MEGATRON)}")


def test_settings_and_plans_need_no_torch() -> None:
    assert "torch" not in modules_after("from megatron_mamba_cache import CacheConfig, plan_align_copy")


def test_engine_names_import_megatron_on_first_use() -> None:
    assert "megatron" in modules_after("from megatron_mamba_cache import build_engine")


@pytest.mark.parametrize("face", FACES)
def test_subpackages_have_public_names_in_their_modules(face: str) -> None:
    package = import_module(f"megatron_mamba_cache.{face}")
    assert set(package.__all__) == FACES[face] <= set(dir(package))
    for name in FACES[face]:
        value = getattr(package, name)
        assert getattr(import_module(value.__module__), name) is value and value.__doc__
        assert value.__module__.startswith(f"megatron_mamba_cache.{face}.")
    with pytest.raises(AttributeError, match=f"module 'megatron_mamba_cache.{face}' has no attribute 'nothing'"):
        package.nothing  # noqa: B018


def test_documentation_imports_only_public_names() -> None:
    root = Path(str(megatron_mamba_cache.__file__)).parents[1]
    texts = [path.read_text(encoding="utf-8") for path in (root / "README.md", *(root / "docs").glob("*.md"))]
    found = [match for text in texts for match in DOCUMENTED_IMPORT.findall(text)]
    assert len(found) > 10
    for module, names in found:
        face = module.removeprefix("megatron_mamba_cache").lstrip(".")
        assert {name.strip() for name in names.split(",")} <= (FACES[face] if face else PUBLIC_NAMES), module
