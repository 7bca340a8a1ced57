"""The long description, which has to be computed; all other metadata is in pyproject.toml."""

import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
PAGES = "https://github.com/megatron-mamba-cache/megatron-mamba-cache"
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|#|mailto:)([^)\s]+)\)")


def with_absolute_links(text: str) -> str:
    """Return the README's text with links that also work outside the repository."""

    def absolute(found: re.Match[str]) -> str:
        mark, label, target = found.groups()
        return f"{mark}[{label}]({PAGES}/{'raw' if mark else 'blob'}/main/{target})"

    return LINK.sub(absolute, text)


if __name__ == "__main__":
    setup(
        long_description=with_absolute_links((ROOT / "README.md").read_text(encoding="utf-8")),
        long_description_content_type="text/markdown",
    )
