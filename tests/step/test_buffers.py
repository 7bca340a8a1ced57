"""Properties of the buffer with a step's inputs, which is copied to the device."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_mamba_cache.step.buffers import StepBuffers, StepLimits

LIMITS = StepLimits(
    max_tokens=11, max_requests=5, max_chunks=7, max_blocks=3, marks_real_tokens=True, restores_states=True
)


def fill(buffers: StepBuffers, first: int) -> None:
    """Write a distinct value to every element of the host buffer."""
    for name in StepBuffers.SECTIONS:
        section = buffers.host(name)
        section[:] = np.arange(first, first + len(section))
        first += len(section)


def device_values(buffers: StepBuffers) -> dict[str, list[int]]:
    return {name: buffers.device(name).tolist() for name in StepBuffers.SECTIONS}


def host_values(buffers: StepBuffers) -> dict[str, list[int]]:
    return {name: buffers.host(name).tolist() for name in StepBuffers.SECTIONS}


@pytest.mark.parametrize(("max_drafts", "num_logits"), [(0, 5), (1, 10), (2, 11), (8, 11)])
def test_step_buffer_sections_do_not_overlap_and_have_the_expected_sizes(
    max_drafts: int, num_logits: int, device: str
) -> None:
    limits = replace(LIMITS, max_drafts=max_drafts)
    buffers = StepBuffers(limits, device)
    assert limits.max_logits == num_logits
    fill(buffers, first=1)
    values = [value for section in host_values(buffers).values() for value in section]
    assert sorted(values) == list(range(1, len(values) + 1))
    per_logit, per_token, per_request = 3 * 2 + 2, 2 * 2 + 3, 19 + (1 + max_drafts)
    assert len(values) == per_logit * num_logits + per_token * 11 + 4 * 6 + per_request * 5 + 8 + 2 * 7 + 5 * 3


def test_every_step_buffer_section_is_copied_to_the_device(device: str) -> None:
    buffers = StepBuffers(LIMITS, device)
    fill(buffers, first=1)
    buffers.send(LIMITS.max_requests)
    assert device_values(buffers) == host_values(buffers)


@pytest.mark.parametrize("num_requests", range(LIMITS.max_requests + 1))
def test_unused_block_table_rows_are_not_copied_to_the_device(device: str, num_requests: int) -> None:
    buffers = StepBuffers(LIMITS, device)
    fill(buffers, first=1)
    buffers.send(num_requests)
    sent, expected = device_values(buffers), host_values(buffers)
    used = num_requests * LIMITS.max_blocks
    table = sent.pop("block_table")
    whole_table = expected.pop("block_table")
    assert table == whole_table[:used] + [0] * (len(table) - used)
    assert sent == expected


def test_step_with_fewer_requests_leaves_other_block_table_rows_unchanged(device: str) -> None:
    buffers = StepBuffers(LIMITS, device)
    fill(buffers, first=1)
    buffers.send(LIMITS.max_requests)
    before = buffers.device_block_table()[2:].tolist()
    fill(buffers, first=1000)
    buffers.send(2)
    assert buffers.device_block_table()[2:].tolist() == before
    assert buffers.device_block_table()[:2].tolist() == buffers.host_block_table()[:2].tolist()


def test_step_buffer_addresses_never_change(device: str) -> None:
    buffers = StepBuffers(LIMITS, device)

    def addresses() -> list[int]:
        sections = [buffers.device(name).data_ptr() for name in StepBuffers.SECTIONS]
        host = [buffers.host(name).ctypes.data for name in StepBuffers.SECTIONS]
        return [*sections, *host, buffers.device_block_table().data_ptr()]

    before = addresses()
    for num_requests in (1, 5, 0, 3):
        fill(buffers, first=num_requests)
        buffers.send(num_requests)
        assert addresses() == before
    assert len(set(before[:-1])) == len(before) - 1


def test_step_buffers_are_copied_to_the_device_in_one_transfer(device: str) -> None:
    buffers = StepBuffers(LIMITS, device)
    buffers.send(3)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        buffers.send(3)
    assert [event.name for event in profile.events()].count("aten::copy_") == 1


def test_device_views_show_values_that_are_copied_later(device: str) -> None:
    buffers = StepBuffers(LIMITS, device)
    ids, table = buffers.device_int64("token_ids"), buffers.device_block_table()
    fill(buffers, first=1)
    buffers.send(LIMITS.max_requests)
    assert ids.tolist() == buffers.host_int64("token_ids").tolist()
    assert table.tolist() == buffers.host_block_table().tolist()


def test_draft_slots_of_a_request_are_contiguous(device: str) -> None:
    buffers = StepBuffers(replace(LIMITS, max_drafts=2), device)
    columns = np.arange(15).reshape(5, 3)
    buffers.host_columns()[:] = columns
    buffers.send(0)
    assert buffers.device_columns().tolist() == columns.tolist()
    assert buffers.device("columns").tolist() == list(range(15))


def test_floats_in_step_buffers_are_copied_bit_exactly(device: str) -> None:
    buffers = StepBuffers(LIMITS, device)
    temperature = np.array([0.0, 1.0, 1e-30, 3.14159, np.inf], np.float32)
    uniforms = np.array([0.0, 0.5, 2.0**-53, 1 - 2.0**-53, 1 / 3])
    buffers.host("temperature").view(np.float32)[:] = temperature
    buffers.host("uniforms").view(np.float64)[:] = uniforms
    buffers.send(0)
    assert buffers.device("temperature").view(torch.float32).tolist() == temperature.tolist()
    assert buffers.device("uniforms").view(torch.float64).tolist() == uniforms.tolist()


def test_step_buffers_work_with_all_limits_equal_to_1(device: str) -> None:
    buffers = StepBuffers(StepLimits(1, 1, 1, 1), device)
    fill(buffers, first=1)
    buffers.send(1)
    assert device_values(buffers) == host_values(buffers)
    assert buffers.device("uniforms").view(torch.float64).shape == (1,)
