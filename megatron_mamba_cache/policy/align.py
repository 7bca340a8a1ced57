"""Plan the align copy, which saves a request's state when its accepted tokens reach a block boundary.

The GPU makes the same plan from device tensors; this version is its reference.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AlignCopy:
    """Plan to copy the state at a block boundary from a column of the draft window to the column of its block.

    Args:
        source_column: Column of the draft window that holds the SSM state at the boundary.
        shift: Number of accepted drafts before the boundary, by which the conv window is shifted left.
        destination_column: Index of the request's block that ends at the boundary.
        moves_bytes: False if the state is already in its destination, so nothing is copied.
        num_accepted_after: Number of accepted tokens from which the next step computes the column that it starts from.
    """

    source_column: int
    shift: int
    destination_column: int
    moves_bytes: bool
    num_accepted_after: int


def plan_align_copy(
    num_computed: int, num_scheduled: int, num_draft: int, num_accepted: int, state_column: int, block_size: int
) -> AlignCopy | None:
    """Return the align copy for a request after verification; None if the request reached no boundary.

    Args:
        num_computed: Number of tokens computed before the step.
        num_scheduled: Number of input tokens in the step, including drafts.
        num_accepted: Number of accepted tokens, including the base token (the last input that is not a draft); 0
            counts as 1.
        state_column: Column that holds the state after the base token.

    The function does not check that the arguments are consistent.
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
