"""Check that the requirements in this package's metadata are installed."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packaging.requirements import Requirement

DISTRIBUTION = "megatron-mamba-cache"

EXTRAS: Mapping[str, str] = MappingProxyType(
    {
        "server": "serve, and replicas with a coordinator",
        "hf": "models by hub name, chat templates, and tokenizers without a tokenizer.json",
        "otel": "OpenTelemetry traces of serve",
        "gpu": "attention on an NVIDIA GPU",
        "test": "the test suite",
    }
)
"""Each extra and what it is for."""


@dataclass(frozen=True, slots=True)
class Unmet:
    """Requirement that is missing or has a wrong version.

    Args:
        found: Installed version; None if the distribution is missing.
    """

    requirement: str
    found: str | None

    def __str__(self) -> str:
        return self.requirement if self.found is None else f"{self.requirement} (found {self.found})"


class MissingExtraError(ModuleNotFoundError):
    """Raised if a required extra is not installed; the message contains the install command."""


def unmet_requirements(extra: str = "") -> list[Unmet]:
    """Return the requirements for an extra (or the base install) that are missing or have a wrong version.

    Raises:
        importlib.metadata.PackageNotFoundError: If this package is not installed.
    """
    return [Unmet(str(one), installed_version(one.name)) for one in _requirements(extra) if not _is_met(one)]


def require_extra(extra: str, purpose: str) -> None:
    """Check that every distribution in an extra is installed, with any version.

    Raises:
        MissingExtraError: Naming the missing distributions, the purpose and the install command.
    """
    try:
        missing = [unmet.requirement for unmet in unmet_requirements(extra) if unmet.found is None]
    except PackageNotFoundError:
        return  # this package is not installed, so later imports report what is missing
    if missing:
        raise MissingExtraError(
            f"{purpose} needs {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed: "
            f"{install_command(extra)}"
        )


def install_command(extra: str) -> str:
    """Return the command that installs an extra."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def _requirements(extra: str) -> Iterator["Requirement"]:
    """Yield the requirements that an extra adds; for "", the requirements of the base install."""
    from packaging.requirements import Requirement

    for text in requires(DISTRIBUTION) or []:
        one = Requirement(text)
        if one.marker is None or one.marker.evaluate({"extra": ""}):
            is_added = extra == ""
        else:
            is_added = extra != "" and one.marker.evaluate({"extra": extra})
        if is_added:
            if one.name == DISTRIBUTION:
                for inner in sorted(one.extras):
                    yield from _requirements(inner)
            else:
                one.marker = None
                yield one


def installed_version(name: str) -> str | None:
    """Return the version of an installed distribution; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _is_met(one: "Requirement") -> bool:
    found = installed_version(one.name)
    return found is not None and one.specifier.contains(found, prereleases=True)
