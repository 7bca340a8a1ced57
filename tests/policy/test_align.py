"""Properties of plans for align copies."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_mamba_cache.policy.align import AlignCopy, plan_align_copy

BLOCK = 16


@pytest.mark.parametrize(
    ("arguments", "copy"),
    [
        ((60, 5, 2, 3, 3), AlignCopy(4, 1, 3, True, 1)),
        ((30, 3, 0, 2, 1), None),
        ((45, 8, 3, 4, 2), None),
        ((10, 6, 0, 2, 0), AlignCopy(0, 0, 0, False, 1)),
        ((30, 2, 0, 1, 1), AlignCopy(1, 0, 1, False, 1)),
        ((60, 3, 0, 3, 2), AlignCopy(3, 1, 3, True, 3)),
    ],
)
def test_state_copy_plan_matches_worked_examples(
    arguments: tuple[int, int, int, int, int], copy: AlignCopy | None
) -> None:
    assert plan_align_copy(*arguments, BLOCK) == copy


def test_zero_accepted_tokens_are_treated_as_one() -> None:
    assert plan_align_copy(15, 1, 0, 0, 5, BLOCK) == plan_align_copy(15, 1, 0, 1, 5, BLOCK)


def test_state_is_copied_to_another_column_even_without_a_conv_shift() -> None:
    assert plan_align_copy(15, 1, 0, 1, 5, BLOCK) == AlignCopy(5, 0, 0, True, 1)


def test_state_copy_moves_the_conv_window_even_if_the_ssm_state_stays() -> None:
    copy = plan_align_copy(60, 3, 0, 3, 2, BLOCK)
    assert copy is not None
    assert copy.source_column == copy.destination_column and copy.moves_bytes


def test_no_state_is_copied_at_position_zero() -> None:
    assert plan_align_copy(0, 0, 0, 1, 0, BLOCK) is None
    assert plan_align_copy(0, 1, 3, 1, 0, BLOCK) is None


def test_more_accepted_tokens_than_drafts_are_not_an_error() -> None:
    assert plan_align_copy(60, 3, 0, 20, 2, BLOCK) == AlignCopy(19, 17, 4, True, 20)


@given(
    computed=st.integers(0, 100),
    drafts=st.integers(0, 8),
    base=st.integers(1, 20),
    accepted=st.integers(0, 9),
    column=st.integers(0, 8),
    block=st.integers(1, 20),
)
def test_copy_plan_matches_a_token_by_token_reference(
    computed: int, drafts: int, base: int, accepted: int, column: int, block: int
) -> None:
    expected = None
    for step in range(max(accepted, 1)):
        length = computed + base + step
        if length % block == 0:
            block_index = next(i for i in range(length) if (i + 1) * block == length)
            in_place = column == block_index
            nothing_moves = in_place and step == 0
            expected = AlignCopy(
                column + step, step, block_index, not nothing_moves, 1 if in_place else max(accepted, 1)
            )
    assert plan_align_copy(computed, base + drafts, drafts, accepted, column, block) == expected
