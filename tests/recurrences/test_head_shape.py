"""A multi-token prediction head adds layers to each KV block, and hidden states to each slot."""

import pytest

from megatron_mamba_cache.recurrences.cached_form import CACHED_FORMS
from megatron_mamba_cache.recurrences.hidden_states import HIDDEN
from megatron_mamba_cache.recurrences.model_shape import HybridModelShape
from megatron_mamba_cache.recurrences.pool import StatePool
from tests.mcore.engine_runs import cache_config, tiny_sizes
from tests.mcore.engine_runs import hybrid as hybrid_of
from tests.mcore.mtp_drafters import with_head

SIZES = tiny_sizes(pattern="MM*-M*")


@pytest.fixture
def shapes() -> tuple[HybridModelShape, HybridModelShape]:
    """Return the shapes of a model without its head and with it."""
    subject = hybrid_of(SIZES)
    return subject.shape, with_head(subject).shape


def test_blocks_have_one_more_layer_per_attention_layer_of_the_head(
    shapes: tuple[HybridModelShape, HybridModelShape],
) -> None:
    plain, headed = shapes
    assert (plain.num_attention_layers, headed.num_attention_layers) == (2, 3)
    assert 2 * headed.block_bytes(16) == 3 * plain.block_bytes(16)


@pytest.mark.parametrize("form", ["window", "replay"])
@pytest.mark.parametrize("num_drafts", [1, 3])
def test_slots_have_the_hidden_states_of_a_step(
    shapes: tuple[HybridModelShape, HybridModelShape], form: str, num_drafts: int
) -> None:
    plain, headed = shapes
    config = cache_config(SIZES, num_speculative_tokens=num_drafts, draft_states=form)
    num_bytes = SIZES.hidden_size * SIZES.dtype.itemsize
    before, after = (shape.state_layout(config) for shape in shapes)
    assert after.slot_bytes - before.slot_bytes == (1 + num_drafts) * num_bytes
    quantized = [
        CACHED_FORMS["int8"].layout(shape.state_groups(config), shape.state_layout(config)) for shape in shapes
    ]
    assert quantized[1].slot_bytes - quantized[0].slot_bytes == num_bytes
    assert plain.request_buffer_bytes(config) == headed.request_buffer_bytes(config)
    pool = StatePool.zeros(headed.state_groups(config), 4, "cpu")
    assert pool.hidden_states.live[HIDDEN].shape == (4, 1 + num_drafts, SIZES.hidden_size)


def test_cached_states_are_found_only_with_the_same_head(shapes: tuple[HybridModelShape, HybridModelShape]) -> None:
    plain, headed = shapes
    config = cache_config(SIZES)
    assert plain.cache_fingerprint(config) != headed.cache_fingerprint(config)
