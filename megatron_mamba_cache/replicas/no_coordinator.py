"""What an engine without a coordinator has in the place of reports to it; needs nothing that reports need."""

from collections.abc import Iterable


class NoReports:
    """Takes the place of `CacheReports` where no coordinator routes by them."""

    def send(self) -> None:
        """Do nothing."""

    def void(self) -> None:
        """Do nothing."""

    def watch(self) -> None:
        """Do nothing."""


class NoProgress:
    """Takes the place of `ProgressReports` without a coordinator, and on ranks that do not speak for their replica."""

    def send(self, _request_ids: Iterable[int]) -> None:
        """Do nothing."""

    def send_state(self) -> None:
        """Do nothing."""
