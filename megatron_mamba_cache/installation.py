"""Check that the distributions required by this package and its extras are installed."""

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
"""Map from each extra to a description of the features that need it."""


@dataclass(frozen=True, slots=True)
class Unmet:
    """Requirement that is not satisfied by the installed distributions.

    Args:
        requirement: Requirement such as "torch>=2.9".
        found: Installed version, which does not satisfy the requirement; None if the distribution is not installed.
    """

    requirement: str
    found: str | None

    def __str__(self) -> str:
        return self.requirement if self.found is None else f"{self.requirement} (found {self.found})"


class MissingExtraError(ModuleNotFoundError):
    """Raised if a required extra is not installed; the message contains the install command."""


def unmet_requirements(extra: str = "") -> list[Unmet]:
    """Return the requirements of an extra, or of the base install for "", that are not satisfied.

    Raises:
        importlib.metadata.PackageNotFoundError: If this package is not installed.
    """
    return [Unmet(str(one), installed_version(one.name)) for one in _requirements(extra) if not _is_met(one)]


def require_extra(extra: str, purpose: str) -> None:
    """Check that every distribution required by an extra is installed; versions are not checked.

    Args:
        purpose: Feature that needs the extra, for the error message, such as "a coordinator".

    Raises:
        MissingExtraError: If a distribution is missing; the message names it, the purpose and the install command.
    """
    try:
        missing = [unmet.requirement for unmet in unmet_requirements(extra) if unmet.found is None]
    except PackageNotFoundError:
        return  # requirements are unknown without metadata; later imports report missing modules
    if missing:
        raise MissingExtraError(
            f"{purpose} needs {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed; "
            f"run {install_command(extra)}"
        )


def install_command(extra: str) -> str:
    """Return the shell command that installs an extra."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def _requirements(extra: str) -> Iterator["Requirement"]:
    """Yield the requirements that an extra adds to the base install; for "", those of the base install."""
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
