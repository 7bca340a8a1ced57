"""Find the accepted token of a verify step that reaches a block boundary, and plan its align copy.

The GPU makes the same decision from device tensors; this host version is its reference.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AlignCopy:
    """Copy of the state at a block boundary from one of a request's columns.

    Args:
        source_column: column that holds the SSM state at the boundary.
        shift: accepted drafts before the boundary; the conv window of the request's state column moves left by it.
        destination_column: block that ends on the boundary.
        moves_bytes: False when both states are already in place.
        num_accepted_after: accepted tokens that the next step counts from the request's state column.
    """

    source_column: int
    shift: int
    destination_column: int
    moves_bytes: bool
    num_accepted_after: int


def plan_align_copy(
    num_computed: int, num_scheduled: int, num_draft: int, num_accepted: int, state_column: int, block_size: int
) -> AlignCopy | None:
    """Plan the align copy of one request after verification; None when the request reached no boundary.

    Args:
        num_computed: tokens before the step.
        num_scheduled: tokens fed in the step, drafts included.
        num_accepted: tokens kept, the base token included; 0 counts as 1.
        state_column: column that holds the state after the base token.

    The arguments are not checked for consistency.
    """
    accepted = max(num_accepted, 1)
    running = num_computed + num_scheduled - num_draft
    aligned = (running + accepted - 1) // block_size * block_size
    # Position 0 is not a boundary: no block ends there.
    if aligned < running or aligned <= 0:
        return None
    shift = aligned - running
    destination = aligned // block_size - 1
    in_place = state_column == destination
    return AlignCopy(
        source_column=state_column + shift,
        shift=shift,
        destination_column=destination,
        moves_bytes=shift > 0 or not in_place,
        num_accepted_after=1 if in_place else accepted,
    )
