"""Refusals of the cache as the errors that Megatron's contexts raise."""

from megatron.core.inference.contexts.dynamic_context import (
    BlockOverflowError,
    ContextOverflowError,
    RequestOverflowError,
    TokenOverflowError,
)

from ..policy.admission import Refusal

_KINDS = {
    Refusal.NO_ROW: RequestOverflowError,
    Refusal.NO_TOKENS: TokenOverflowError,
    Refusal.NO_BLOCKS: BlockOverflowError,
}


def overflow_error(refusal: Refusal, request_id: int) -> ContextOverflowError:
    """Return the error that says why a request does not fit now."""
    return _KINDS.get(refusal, ContextOverflowError)(request_id, refusal.value)
