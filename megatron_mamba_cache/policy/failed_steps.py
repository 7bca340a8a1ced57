"""Find the request that makes steps fail: suspects run isolated, and one that also fails isolated is refused."""

from collections.abc import Iterable

FAILURES_BEFORE_ISOLATION = 2
FAILURES_BEFORE_REFUSAL = 4


class FailedSteps:
    """Counts, for each request, the failed steps that it took part in since its last token.

    One failure may be transient. After `FAILURES_BEFORE_ISOLATION` a request runs isolated until it generates a token,
    so that the failures that bring it to `FAILURES_BEFORE_REFUSAL` are its own.
    """

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def __bool__(self) -> bool:
        return bool(self._counts)

    def count(self, request_ids: Iterable[int]) -> list[int]:
        """Count a failed step against its requests; return those to refuse."""
        request_ids = list(request_ids)
        for request_id in request_ids:
            self._counts[request_id] = self._counts.get(request_id, 0) + 1
        return [request_id for request_id in request_ids if self._counts[request_id] >= FAILURES_BEFORE_REFUSAL]

    def forget(self, request_id: int) -> None:
        """Clear a request: it has generated a token, or has left."""
        self._counts.pop(request_id, None)

    def clear(self) -> None:
        """Clear every request."""
        self._counts.clear()

    def next_isolated(self) -> int | None:
        """Return the request that is to run isolated now; the same one until it is cleared."""
        suspects = (request_id for request_id, count in self._counts.items() if count >= FAILURES_BEFORE_ISOLATION)
        return next(suspects, None)


def refusal_reason(error: Exception) -> str:
    """Return why a request whose last step raised `error` is refused."""
    return (
        f"its steps failed {FAILURES_BEFORE_REFUSAL} times since its last token, the last time isolated, with {error!r}"
    )
