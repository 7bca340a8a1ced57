"""Send control signals to all replicas, one at a time, and collect the answers."""

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
    """Message to all replicas; an answer also goes to all clients."""

    header: Headers

    @property
    def is_for_clients(self) -> bool:
        """True if clients also receive this message."""
        return self.header in ANSWERS.values()


class ControlSignals:
    """Queue of signals from clients; a repeated signal is answered again.

    After a PAUSE or a STOP, the next signal is sent only when all living replicas have answered: a Megatron engine that
    is unpaused while its answer is in flight stays paused forever.
    """

    def __init__(self) -> None:
        self._waiting: deque[Headers] = deque()
        self._asked: Headers | None = None  # signal whose answers are pending
        self._answered: set[str] = set()
        self._steady: list[Headers] = []  # signals to send to a replica that joins later

    @property
    def is_stopping(self) -> bool:
        """True after a STOP was requested; engines then accept no requests."""
        return self._asked is Headers.STOP or Headers.STOP in self._waiting or self.is_over

    @property
    def is_over(self) -> bool:
        """True after all replicas have answered a STOP."""
        return Headers.STOP_ACK in self._steady

    def ask(self, signal: Headers) -> None:
        """Queue a signal from a client; raise `ValueError` if too many signals are pending."""
        if len(self._waiting) >= _MOST_WAITING:
            raise ValueError(f"{_MOST_WAITING} signals are already pending; wait until they are answered")
        if not self.is_stopping:
            self._waiting.append(signal)

    def answer(self, replica: str, header: Headers) -> None:
        """Record a replica's answer; ignore an unexpected answer."""
        if self._asked is not None and ANSWERS[self._asked] is header:
            self._answered.add(replica)

    def missed(self) -> tuple[Headers, ...]:
        """Return the signals that put a newly joined replica into the same state as the other replicas."""
        return tuple(self._steady) if self._asked is None else (*self._steady, self._asked)

    def due(self, living: Collection[str]) -> Iterator[Announcement]:
        """Yield the messages to send now, in order; wait only for answers from `living` replicas."""
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
