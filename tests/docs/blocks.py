"""Fenced code blocks of the documentation and their marks; standard library only.

A block is marked by an HTML comment right before it:

    <!-- run: base -->            executed in an environment with the base install; `server` and `test` likewise
    <!-- run: server, serves -->  a server: started, waited for, and stopped where the page ends or starts another
    <!-- run: base, continues --> Python that continues the Python block before it
    <!-- prints -->               what the block before it prints; a line `...` stands for any lines
    <!-- prints: times vary -->   the same, but times and rates are not compared
    <!-- file: NAME -->           a file that later blocks of the page read
    <!-- needs: gpu, hub -->      not executed here: checked by parsers only
"""

import re
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
ENVIRONMENTS = ("base", "server", "test")
NEEDS = frozenset({"docker", "gpu", "hub", "kubernetes", "nginx", "prometheus", "several hosts"})

_BLOCK = re.compile(
    r"^(?:<!-- (?P<kind>\w+)(?:: (?P<values>[^>]*?))? -->\n\n?)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S
)
_TIME = re.compile(r"\d+\.\d+(?! %)|\d+(?= (?:tokens/s|ms|s)\b)")
_ELLIPSIS = "..."


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: where it is, its text, and its mark."""

    page: Path
    line: int
    language: str
    text: str
    kind: str
    values: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page.relative_to(REPOSITORY)}:{self.line}"

    @property
    def serves(self) -> bool:
        """True for a server, which runs until it is stopped."""
        return "serves" in self.values


def pages() -> list[Path]:
    """Return the README and the pages of docs/."""
    return [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]


def blocks_of(page: Path) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            page,
            text.count("\n", 0, match.start()) + 1,
            match["language"],
            match["text"],
            match["kind"] or "",
            tuple(value.strip() for value in (match["values"] or "").split(",")) if match["values"] else (),
        )
        for match in _BLOCK.finditer(text)
    ]


def error_of(blocks: list[Block], index: int) -> str | None:
    """Return the error of a block's mark; None if it is valid."""
    block = blocks[index]
    before = blocks[index - 1] if index else None
    match block.kind:
        case "run":
            first, *rest = block.values
            if first not in ENVIRONMENTS or not set(rest) <= {"serves", "continues"}:
                return f"{block}: run what, where? {block.values}"
            return None if block.language in ("bash", "python") else f"{block}: {block.language!r} cannot be run"
        case "prints":
            return None if before is not None and before.kind == "run" else f"{block}: printed by what?"
        case "file":
            return None if len(block.values) == 1 else f"{block}: a file without a name"
        case "needs":
            return None if set(block.values) <= NEEDS and block.values else f"{block}: needs what? {block.values}"
        case _:
            return f"{block}: it has no mark; it is neither run nor checked"


def without_pip(text: str) -> str:
    """Return a shell block without its `pip install` commands: the environment holds what they install."""
    return re.sub(r"^(?:python -m )?pip install [^&\n]*(?:&& |\n)", "", text, flags=re.M)


def pip_lines(text: str) -> list[str]:
    """Return the `pip install` commands of a shell block."""
    return [line.strip() for line in re.findall(r"^(?:python -m )?pip install [^&\n]*", text, flags=re.M)]


def matches(expected: str, printed: str, *, times_vary: bool) -> bool:
    """Return True if a program printed the output on the page.

    Args:
        times_vary: Decimal numbers that are no percentages, whole numbers of s, ms and tokens/s, and the width of gaps
            are not compared.
    """
    lines = [_comparable(line, times_vary) for line in printed.strip("\n").split("\n")]
    runs = [[]]  # type: list[list[str]]
    for line in expected.strip("\n").split("\n"):
        if line == _ELLIPSIS:
            runs.append([])
        else:
            runs[-1].append(_comparable(line, times_vary))
    next_line, last = 0, len(runs) - 1
    for number, run in enumerate(runs):
        starts = range(next_line, len(lines) - len(run) + 1)
        if number == 0:
            starts = range(0, min(1, len(starts)))
        if number == last and run:
            starts = starts[-1:]
        found = next((start for start in starts if lines[start : start + len(run)] == run), None)
        if found is None:
            return False
        next_line = found + len(run)
    return next_line == len(lines) or not runs[-1]


def _comparable(line: str, times_vary: bool) -> str:
    return " ".join(_TIME.sub("#", line).split()) if times_vary else line.rstrip()
