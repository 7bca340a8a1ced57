"""Signals to all replicas, one at a time, and their answers."""

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from megatron.core.inference.headers import Headers

ANSWERS = {Headers.PAUSE: Headers.PAUSE_ACK, Headers.STOP: Headers.STOP_ACK}
"""Signals that every replica answers, and the header of the answer."""

SIGNALS = frozenset({Headers.PAUSE, Headers.UNPAUSE, Headers.SUSPEND, Headers.RESUME, Headers.STOP})

_MOST_WAITING = 1000


@dataclass(frozen=True, slots=True)
class Announcement:
    """A message to all replicas, and to all clients if it is an answer."""

    header: Headers

    @property
    def is_for_clients(self) -> bool:
        """True when clients wait for it."""
        return self.header in ANSWERS.values()


class ControlSignals:
    """Orders the signals of clients. A repeated signal is answered again.

    No signal follows a PAUSE or a STOP until all living replicas have answered it: a Megatron engine that is unpaused
    while its answer is in flight stays paused forever.
    """

    def __init__(self) -> None:
        self._waiting: deque[Headers] = deque()
        self._asked: Headers | None = None  # the signal that is being answered
        self._answered: set[str] = set()
        self._steady: list[Headers] = []  # the signals that a joining replica has missed

    @property
    def is_stopping(self) -> bool:
        """True when a STOP was requested; engines accept no requests after it."""
        return self._asked is Headers.STOP or Headers.STOP in self._waiting or self.is_over

    @property
    def is_over(self) -> bool:
        """True when all replicas have answered a STOP."""
        return Headers.STOP_ACK in self._steady

    def ask(self, signal: Headers) -> None:
        """Queue a client's signal; raise `ValueError` if too many wait for the replicas' answers."""
        if len(self._waiting) >= _MOST_WAITING:
            raise ValueError(f"{_MOST_WAITING} signals wait already; those before have to be answered")
        if not self.is_stopping:
            self._waiting.append(signal)

    def answer(self, replica: str, header: Headers) -> None:
        """Note a replica's answer; an unexpected one is ignored."""
        if self._asked is not None and ANSWERS[self._asked] is header:
            self._answered.add(replica)

    def missed(self) -> tuple[Headers, ...]:
        """Return the signals that bring a newly joined replica to the state of the others."""
        return tuple(self._steady) if self._asked is None else (*self._steady, self._asked)

    def due(self, living: Collection[str]) -> Iterator[Announcement]:
        """Yield, in order, what to send now; only the answers of `living` replicas count."""
        while not self.is_over:
            if self._asked is not None:
                if not self._answered >= set(living):
                    return
                answer = ANSWERS[self._asked]
                self._asked = None
                self._settle(answer)
                yield Announcement(answer)
            elif self._waiting:
                signal = self._waiting.popleft()
                if signal in ANSWERS:
                    self._asked = signal
                    self._answered.clear()
                else:
                    self._settle(signal)
                yield Announcement(signal)
            else:
                return

    def _settle(self, header: Headers) -> None:
        if header is Headers.STOP_ACK:
            self._steady = [Headers.STOP_ACK]
        elif header is Headers.PAUSE_ACK and header not in self._steady:
            self._steady += [Headers.PAUSE, Headers.PAUSE_ACK]
        elif header is Headers.SUSPEND and header not in self._steady:
            self._steady.append(header)
        elif header is Headers.UNPAUSE:
            self._steady = [kept for kept in self._steady if kept is Headers.SUSPEND]
        elif header is Headers.RESUME:
            self._steady = [kept for kept in self._steady if kept is not Headers.SUSPEND]
