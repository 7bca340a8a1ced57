"""Null objects for the reports of an engine without a coordinator; they need none of the reports' dependencies."""

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
    """Takes the place of `ProgressReports` without a coordinator, and on ranks other than their replica's first."""

    def send(self, _request_ids: Iterable[int]) -> None:
        """Do nothing."""

    def send_state(self) -> None:
        """Do nothing."""
