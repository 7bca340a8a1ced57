"""The main loop of a coordinator: listen, wait for replicas, serve, stop."""

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from .mailbox import Mailbox
from .settings import RoutingSettings


class CoordinatorLoop(ABC):
    """Serves messages in rounds.

    Megatron's own loop would wait for replicas forever, and bind before any option could be set.

    Args:
        port: Tried first; None: any.
        num_replicas: Replicas that `wait_for_replicas` waits for.
        starter_has_left: Returns whether the starting process has left; its end counts as well.
    """

    def __init__(
        self, port: int | None, settings: RoutingSettings, num_replicas: int, starter_has_left: Callable[[], bool]
    ) -> None:
        self._settings = settings
        self._num_replicas = settings.num_replicas or num_replicas
        self._parent = os.getppid()
        self._starter_has_left = starter_has_left
        self._next_probe = 0.0
        self._mailbox = Mailbox(port, settings.access(), settings.max_message_bytes)
        self.addr = self._mailbox.address

    def wait_for_replicas(self) -> None:
        """Serve until all expected replicas have joined.

        Raises:
            TimeoutError: If they do not join within `join_timeout_s`.
        """
        end = time.monotonic() + self._settings.join_timeout_s
        while self._num_serving() < self._num_replicas and not self._is_abandoned():
            self._serve_round()
            if time.monotonic() > end:
                raise TimeoutError(
                    f"{self._num_serving()} of {self._num_replicas} replicas joined {self.addr} in "
                    f"{self._settings.join_timeout_s:g} s; see why the others did not start"
                )

    def start(self) -> None:
        """Serve until clients have stopped the engines, or the starter, all replicas and all clients have left."""
        while not self._is_over() and not self._is_abandoned():
            self._serve_round()

    def stop(self) -> None:
        """Close all connections."""
        self._mailbox.close()

    def _is_abandoned(self) -> bool:
        return not self._is_used() and (os.getppid() != self._parent or self._starter_has_left())

    def _serve_round(self) -> None:
        """Handle incoming messages, at most until the next probe is due."""
        for frames in self._mailbox.receive(max(self._next_probe - time.monotonic(), 0.0)):
            self._handle_frames(frames)
        if time.monotonic() >= self._next_probe:
            self._probe()
            self._mailbox.summarize()
            self._next_probe = time.monotonic() + self._settings.probe_interval_s
        self._announce()

    @abstractmethod
    def _handle_frames(self, frames: list[bytes]) -> None:
        """Handle a message."""

    @abstractmethod
    def _probe(self) -> None:
        """Check which connections are alive."""

    @abstractmethod
    def _announce(self) -> None:
        """Send the control signals that are due."""

    @abstractmethod
    def _num_serving(self) -> int:
        """Return the number of serving replicas."""

    @abstractmethod
    def _is_used(self) -> bool:
        """Return whether any replica or client is connected."""

    @abstractmethod
    def _is_over(self) -> bool:
        """Return whether all engines have been stopped."""
