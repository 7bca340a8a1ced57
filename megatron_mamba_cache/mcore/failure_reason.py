"""Why a request failed, read from Megatron's record of it."""

from typing import Any

from megatron.core.inference.inference_request import Status


def failure_reason(request: Any) -> str | None:
    """Return why a request failed; None if it did not."""
    if request.status is not Status.FAILED:
        return None
    errors = [event.payload for event in request.events if event.payload is not None]
    return str(getattr(errors[-1], "message", None) or errors[-1]) if errors else "failed without a reason"
