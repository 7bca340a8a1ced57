"""The outputs of all graphs share one buffer."""

import pytest
import torch

from megatron_mamba_cache.step.shapes import StepShape
from megatron_mamba_cache.step.step_graph import OutputMemory

# The first shape has the most tokens, because graphs are captured in this order; the last has the most logits.
SHAPES = (StepShape(3, 1, 4, 40), StepShape(0, 1, 4, 20), StepShape(6, 4))


@pytest.mark.parametrize("of_tokens", [False, True])
def test_graphs_share_one_output_buffer_sized_for_the_largest_output(of_tokens: bool) -> None:
    outputs = OutputMemory(SHAPES)
    assert outputs.num_bytes == 0
    row_indices = set()
    for shape in SHAPES:
        num_requests = shape.num_tokens if of_tokens else shape.num_logits
        output = torch.randn(num_requests, 1, 16) if of_tokens else torch.randn(1, num_requests, 16)
        kept = outputs.keep(output, shape)
        assert kept.shape == output.shape and torch.equal(kept, output)
        again = outputs.keep(-output, shape)
        assert torch.equal(kept, -output) and again.data_ptr() == kept.data_ptr()
        row_indices.add(kept.data_ptr())
    most = 43 if of_tokens else 24
    assert len(row_indices) == 1 and outputs.num_bytes == most * 16 * 4


def test_graphs_of_decode_shapes_share_one_output_buffer() -> None:
    outputs = OutputMemory([StepShape(5, 1), StepShape(3, 3)])
    kept = [
        outputs.keep(torch.ones(1, requests, 8), shape)
        for requests, shape in ((9, StepShape(3, 3)), (5, StepShape(5, 1)))
    ]
    assert outputs.num_bytes == 9 * 8 * 4 and kept[0].data_ptr() == kept[1].data_ptr()
