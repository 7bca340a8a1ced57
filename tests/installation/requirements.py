"""Environments of the documentation: their programs, imports and declared requirements."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.installation.imports import Sources
from tests.server.client_environments import CLIENTS, SCRIPTS

REPOSITORY = Path(__file__).parents[2]
PACKAGE = "megatron_mamba_cache"
OWN_NAME = "megatron-mamba-cache"

THROUGH_MEGATRON = {
    "einops": "parallel_state.py",
    "psutil": "dist_checkpointing/strategies/filesystem_async.py",
}
"""Undeclared packages that the used modules of megatron-core need."""

BY_NAME = {"fastapi_offline": f"{PACKAGE}/server/endpoints.py"}
"""Packages of the server that a file finds by their name, without an import."""

NAMED_EXTRAS = {
    ("gpu", "flashinfer-python"): (f"{PACKAGE}/kernels/attention/flashinfer.py", 'version("flashinfer-python")'),
    ("otel", "opentelemetry-sdk"): (f"{PACKAGE}/server/traces.py", "from opentelemetry.sdk.trace import "),
    ("otel", "opentelemetry-exporter-otlp-proto-http"): (
        f"{PACKAGE}/server/traces.py",
        "from opentelemetry.exporter.otlp.proto.http.",
    ),
}
"""Distributions that a file uses where they are installed and else names an extra for, and the words that show it."""

COMMANDS = {
    "pytest-xdist": ("pyproject.toml", r'addopts = "[^"]*-n \d'),
    "ruff": (".ci/run", r"\bruff check\b"),
    "mypy": (".ci/run", r"\bmypy\b"),
}
"""Distributions that a command needs rather than an import, and the file and words that show it."""

Declared = Mapping[str, frozenset[str]]
"""The names of the distributions that the base install ("") and each extra declare."""


@dataclass(frozen=True, slots=True)
class Environment:
    """An installation from the documentation, and the programs started in it.

    Args:
        extras: In addition to the base install.
        entries: Modules in which the programs start.
        followed: Extras whose guarded imports are reached.
    """

    extras: tuple[str, ...]
    entries: tuple[str, ...]
    followed: tuple[str, ...] = ()


CLIENT_NAMES = {"agents": "openai-agents", "aider": "aider-chat", "pydantic_ai": "pydantic-ai-slim"}
"""Distributions of clients whose modules have other names; the tests' environment lacks them."""
THROUGH_CLIENTS = {"with_lm_eval.py": "transformers"}
"""Packages that a client imports for its script but does not declare."""
_RUNS_MODULE = re.compile(r'sys\.executable, "-m", "(\w+)"')
BASE_FACES = ("mcore", "models", "speculation")
"""Parts of the package whose public names need the base install only."""


@cache
def sources() -> Sources:
    """Return the package, its examples, its tests and the benchmarks that these import."""
    roots = {name: REPOSITORY / name for name in (PACKAGE, "tests", "benchmarks")}
    examples = {f"example_{file.stem}": file for file in (REPOSITORY / "examples").glob("*.py")}
    benchmarks = {file.stem: file for file in (REPOSITORY / "benchmarks").glob("*.py")}
    clients = {file.stem: file for file in SCRIPTS.glob("*.py")}
    return Sources(roots | examples | benchmarks | clients)


def environments() -> dict[str, Environment]:
    """Return the environments that the documentation names."""
    command = (f"{PACKAGE}.__main__", "example_generate")
    public = (*_public_homes(), *(home for face in BASE_FACES for home in _public_homes(face)))
    tests = tuple(
        ".".join(file.relative_to(REPOSITORY).with_suffix("").parts)
        for file in sorted((REPOSITORY / "tests").rglob("*.py"))
        if "clients" not in file.relative_to(REPOSITORY).parts  # which have environments of their own
    )
    return {
        "base": Environment((), (*command, *public)),
        "server": Environment(
            ("server", "hf"), (*command, *public, *_public_homes("replicas"), f"{PACKAGE}.server.app"), ("server", "hf")
        ),
        "test": Environment(("test",), (*command, *tests), ("server", "hf", "test")),
        **_client_environments(),
    }


def _client_environments() -> dict[str, Environment]:
    """Return the environment of each extra for clients: its scripts."""
    scripts: dict[str, list[str]] = {}
    for name, client in CLIENTS.items():
        if client.environment.startswith("client-"):
            scripts.setdefault(client.environment, []).append(name.removesuffix(".py"))
    return {extra: Environment((extra,), tuple(names)) for extra, names in scripts.items()}


def declared(without: tuple[str, str] = ("", "")) -> dict[str, frozenset[str]]:
    """Return the declared distributions of each extra, those of named extras included.

    Args:
        without: An extra, "" for the base install, and a distribution that is taken out of its list.
    """
    lists = {
        extra: [one for one in requirements if (extra, canonicalize_name(one.name)) != without]
        for extra, requirements in _lists().items()
    }

    def names(extra: str) -> frozenset[str]:
        found = {str(canonicalize_name(one.name)) for one in lists[extra]} - {OWN_NAME}
        inner = (names(other) for one in lists[extra] if one.name == OWN_NAME for other in one.extras)
        return frozenset(found.union(*inner))

    return {extra: names(extra) for extra in lists}


def own_requirements() -> list[tuple[str, str]]:
    """Return each extra with each distribution that it declares itself; "" is the base install."""
    found = [(extra, str(canonicalize_name(one.name))) for extra, ones in _lists().items() for one in ones]
    return [(extra, name) for extra, name in found if name != OWN_NAME]


def requirements_of(extra: str) -> list[Requirement]:
    """Return the declared requirements of an extra."""
    return _lists()[extra]


def _lists() -> dict[str, list[Requirement]]:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    texts = {"": project["dependencies"], **project["optional-dependencies"]}
    return {extra: list(map(Requirement, found)) for extra, found in texts.items()}


def missing(found: Declared) -> list[str]:
    """Return one sentence for each requirement that an environment lacks."""
    complaints = []
    for name, environment in environments().items():
        available = found[""].union(*(found[extra] for extra in environment.extras))
        for top, module in sorted(_needed(environment).items()):
            distributions = distributions_of(top)
            if not distributions & available:
                complaints.append(
                    f"{name}: {module} needs {top} ({' or '.join(sorted(distributions))}), which "
                    f"{'[' + ','.join(environment.extras) + ']' if environment.extras else 'the base install'} lacks"
                )
    needed_extras = {("hf", top): module for top, module in _optional_of_hub().items()}
    for (extra, distribution), (file, words) in NAMED_EXTRAS.items():
        text = (REPOSITORY / file).read_text()
        assert words in text and re.search(rf"the extra `?{extra}\b", text), (distribution, file)
        needed_extras[extra, distribution] = file
    for (extra, top), module in needed_extras.items():
        if not distributions_of(top) & found[extra]:
            complaints.append(f"{module} names the extra {extra} for {top}, which [{extra}] lacks")
    return complaints


def distributions_of(top: str) -> set[str]:
    """Return the distributions that a top-level package comes from."""
    found = [CLIENT_NAMES[top]] if top in CLIENT_NAMES else _distributions_by_package().get(top, [top])
    return {str(canonicalize_name(name)) for name in found}


@cache
def _distributions_by_package() -> Mapping[str, list[str]]:
    return packages_distributions()  # which reads the metadata of everything that is installed


@cache
def _needed(environment: Environment) -> dict[str, str]:
    """Return the packages that an environment needs, with the modules that import them."""
    found = sources().third_parties(environment.entries, environment.followed)
    found = {top: module for top, module in found.items() if not top.startswith("example_")}
    for script in CLIENTS.keys() & {f"{entry}.py" for entry in environment.entries}:
        for top in _RUNS_MODULE.findall((SCRIPTS / script).read_text()):
            found.setdefault(top, script)
        if script in THROUGH_CLIENTS:
            found.setdefault(THROUGH_CLIENTS[script], script)
    for top, file in THROUGH_MEGATRON.items():
        assert re.search(rf"^\s*import {top}\b", (_megatron() / file).read_text(), re.M), (top, file)
        found.setdefault(top, f"megatron.core ({file})")
    if "server" in environment.followed:
        for top, file in BY_NAME.items():
            assert f'"{top}"' in (REPOSITORY / file).read_text(), (top, file)
            found.setdefault(top, file)
    if "test" in environment.extras:
        for name, (file, words) in COMMANDS.items():
            if re.search(words, (REPOSITORY / file).read_text()):
                found.setdefault(name, file)
    return found


def _megatron() -> Path:
    spec = find_spec("megatron.core")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def _public_homes(face: str = "") -> list[str]:
    """Return the modules of the public names of the package, or of one of its parts."""
    text = (REPOSITORY / PACKAGE / face / "__init__.py").read_text()
    homes = re.findall(r'"\w+": "([\w.]+)"', text[text.index("_HOMES = {") :].partition("}")[0])
    assert homes, face
    return [".".join(filter(None, (PACKAGE, face, home))) for home in homes]


def _optional_of_hub() -> dict[str, str]:
    """Return optional imports whose absence is reported as the missing extra `hf`."""
    found = {}
    for module in (f"{PACKAGE}.models.tokenizers.text_codec", f"{PACKAGE}.models.checkpoints.hugging_face"):
        for one in sources().imports(module):
            if one.is_optional:
                found[one.target.partition(".")[0]] = module
    return found
