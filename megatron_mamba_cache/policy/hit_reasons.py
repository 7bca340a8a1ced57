"""Why a request skipped no prompt tokens."""

from .requests import RunningRequest

REASONS = ("caching_off", "prompt_log_probs", "short_prompt", "copy_failed", "new_prefix", "no_state")


def reason_for_no_hit(row: RunningRequest, block_size: int, *, enabled: bool, awaited_copy: bool) -> str | None:
    """Return why a newly admitted request computes its prompt from the first token, one of `REASONS`; None on a hit.

    "copy_failed": it waited for what it starts from to come back from a tier below; that failed, or was gone again by
    the time it was admitted. "new_prefix": no cached prompt begins with its first block, or none does any more.
    "no_state": its first blocks are cached, but no state is cached at the end of any of them.
    """
    if row.computed:
        return None
    if not enabled:
        return "caching_off"
    if not row.spec.may_skip:
        return "prompt_log_probs"
    if row.spec.prompt_len <= block_size:
        return "short_prompt"
    if awaited_copy:
        return "copy_failed"
    return "no_state" if row.num_shared_blocks else "new_prefix"
