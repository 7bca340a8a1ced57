"""Every third-party import that a command reaches is declared for the environment that the documentation names."""

from pathlib import Path

import pytest

from megatron_mamba_cache.installation import EXTRAS
from megatron_mamba_cache.kernels.attention.flashinfer import OLDEST
from tests.installation.imports import Import, Sources
from tests.installation.requirements import declared, missing, own_requirements, requirements_of
from tests.server.client_environments import CLIENTS, NODE, SCRIPTS


def test_every_imported_distribution_is_a_requirement() -> None:
    assert missing(declared()) == []


@pytest.mark.parametrize(("extra", "name"), own_requirements(), ids=lambda value: value or "base")
def test_imports_without_a_requirement_are_detected(extra: str, name: str) -> None:
    complaints = missing(declared(without=(extra, name)))
    print(*complaints, sep="\n")
    assert complaints


def test_doctor_lists_every_extra_except_those_of_client_scripts() -> None:
    assert set(EXTRAS) == {extra for extra in declared() if extra and not extra.startswith("client-")}


def test_every_client_script_and_every_client_extra_is_listed() -> None:
    assert {path.name for path in SCRIPTS.glob("with_*")} == set(CLIENTS)
    extras = {client.environment for client in CLIENTS.values()} - {NODE, ""}
    assert extras == {extra for extra in declared() if extra.startswith("client-")}


def test_gpu_extra_starts_at_the_oldest_supported_release() -> None:
    (flashinfer,) = requirements_of("gpu")
    assert flashinfer.specifier.contains(OLDEST)
    assert not flashinfer.specifier.contains("0.5.2") and not flashinfer.specifier.contains("0.7.0")


def write(folder: Path, files: dict[str, str]) -> Sources:
    """Write a package `pkg` and return its sources."""
    for name, text in files.items():
        path = folder / "pkg" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Sources({"pkg": folder / "pkg"})


def test_imports_in_functions_and_subpackages_are_found(tmp_path: Path) -> None:
    files = {"deep/__init__": "import one", "deep/work": "import two.x"}
    sources = write(tmp_path, {"__init__": "", "main": "def run():\n    from .deep import work", **files})
    assert sources.third_parties(["pkg.main"]) == {"one": "pkg.deep", "two": "pkg.deep.work"}


def test_optional_imports_are_ignored(tmp_path: Path) -> None:
    text = (
        "import os\ntry:\n    import maybe\nexcept ImportError:\n    import instead\n"
        "if TYPE_CHECKING:\n    import types_only\n"
        "def serve():\n    require_extra('server', 'serve')\n    import web\n"
    )
    sources = write(tmp_path, {"__init__": "", "main": text})
    assert sources.third_parties(["pkg.main"]) == {"instead": "pkg.main"}
    assert sources.third_parties(["pkg.main"], ["server"]) == {"instead": "pkg.main", "web": "pkg.main"}
    assert Import("maybe", "", is_optional=True) in sources.imports("pkg.main")
