"""Which lines may run: those of one session one after another, everything else at once."""

from collections import deque
from collections.abc import Iterable

from .prompts import PromptLine


class SessionQueue:
    """Hands out lines so that each session's run in order; nothing else delays a line."""

    def __init__(self, lines: Iterable[PromptLine]) -> None:
        self._first: list[PromptLine] = []
        self._later: dict[str | int, deque[PromptLine]] = {}
        for line in lines:
            if line.session is None:
                self._first.append(line)
            elif line.session in self._later:
                self._later[line.session].append(line)
            else:
                self._later[line.session] = deque()
                self._first.append(line)

    def initial_lines(self) -> list[PromptLine]:
        """Return the lines that wait for no other, in the file's order."""
        return list(self._first)

    def line_after(self, finished: PromptLine) -> PromptLine | None:
        """Remove and return the line that waited only for `finished`; None if there is none."""
        if finished.session is None or not self._later[finished.session]:
            return None
        return self._later[finished.session].popleft()
