"""Two ranks share a model: checkpoints of both kinds load into shards, and are saved with the same bits."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from megatron.core import parallel_state

from megatron_mamba_cache.models.checkpoints.hugging_face import LoadedModel, load_hugging_face
from megatron_mamba_cache.models.checkpoints.megatron_checkpoint import (
    load_megatron_checkpoint,
    save_megatron_checkpoint,
)
from tests.fork_server import fork_server
from tests.models.checkpoint_edits import assert_refused, set_fields
from tests.models.served_run import full_sequence_logits
from tests.models.tensor_parallel_worker import (
    FROM_ALL_RANKS,
    FROM_ONE_RANK,
    FROM_TRAINING,
    HUGGING_FACE,
    LOGITS,
    assert_same_weights,
    log_of,
    main,
    some_prompts,
)
from tests.models.tiny_checkpoints import tiny_checkpoint
from tests.models.training_checkpoints import write_training_checkpoint

NUM_RANKS = 2
TOLERANCE = 1e-5  # of the largest logit: partial sums of two ranks round otherwise
TIMEOUT_S = 240
CASES = (  # groups of 2 and 8, with and without conv bias, tied and not, dense and with experts, with shared key heads
    "nemotron_h-1",
    "nemotron_h-6",
    "nemotron_h_moe-0",
    "nemotron_h_moe-5",
    "bamba-2",
    "bamba-10",
    "bamba-5",  # both ranks have the one KV head, as of qwen3_next-0
    "granite-1",
    "granite_moe-4",
    "granite_moe-7",
    "qwen3_next-0",
    "qwen3_next-5",
    "qwen3_5-3",
    "qwen3_5_moe-1",
)

STACKED_CASES = ("nemotron_h_moe-5", "granite_moe-7", "qwen3_5_moe-1")  # with one tensor for all experts of a layer
TRAINED_CASES = ("nemotron_h-6", "nemotron_h_moe-0", "bamba-10", "bamba-5")  # with the conv bias that training has


@pytest.fixture(scope="module")
def one_rank(
    tmp_path_factory: pytest.TempPathFactory, one_world_at_a_time: Callable[[], AbstractContextManager[None]]
) -> dict[str, LoadedModel]:
    """Load each checkpoint in this process and, once for all workers of this run, in two ranks."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "checkpoints of two ranks"
    with one_world_at_a_time():
        if not folder.exists():
            made = tmp_path_factory.mktemp("ranks")
            for name in CASES:
                write_checkpoints(name, made / name)
            run_ranks(made)
            made.rename(folder)
    return {name: load_hugging_face(folder / name / HUGGING_FACE, torch.float32) for name in CASES}


def write_checkpoints(name: str, folder: Path) -> None:
    """Write a case as each kind of checkpoint that a single process writes."""
    case = tiny_checkpoint(name)
    case.config.vocab_size = 128  # the drawn ones are odd on purpose
    if name in STACKED_CASES:
        case.model().save_pretrained(folder / HUGGING_FACE, save_original_format=False)
    else:
        case.write(case.model(), folder / HUGGING_FACE)
    loaded = load_hugging_face(folder / HUGGING_FACE, torch.float32)
    save_megatron_checkpoint(loaded.model, loaded.architecture, folder / FROM_ONE_RANK)
    if name in TRAINED_CASES:
        write_training_checkpoint(loaded.model, loaded.architecture, folder / FROM_TRAINING)


def run_ranks(folder: Path) -> None:
    """Run the worker once per rank, on the CPU; none outlives this call."""
    ranks = [fork_server().Process(target=main, args=(rank, NUM_RANKS, folder)) for rank in range(NUM_RANKS)]
    try:
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(TIMEOUT_S)
    finally:
        for rank in ranks:
            rank.kill()
    outputs = [log_of(folder, rank).read_text() for rank in range(NUM_RANKS)]
    assert [rank.exitcode for rank in ranks] == [0] * NUM_RANKS, "\n".join(output[-3000:] for output in outputs)


@pytest.mark.parametrize("name", CASES)
def test_logits_on_two_ranks_equal_logits_on_one(name: str, one_rank: dict[str, LoadedModel]) -> None:
    loaded = one_rank[name]
    expected = full_sequence_logits(loaded, some_prompts(loaded.architecture.vocab_size))
    gathered = torch.load(loaded.directory.parent / LOGITS)
    assert gathered.shape == expected.shape
    assert (gathered - expected).abs().max() <= TOLERANCE * expected.abs().max()


@pytest.mark.parametrize("name", CASES)
def test_weights_saved_by_two_ranks_are_bit_identical(name: str, one_rank: dict[str, LoadedModel]) -> None:
    folder = one_rank[name].directory.parent
    for saved in (FROM_ONE_RANK, FROM_ALL_RANKS):
        assert_same_weights(one_rank[name], load_megatron_checkpoint(folder / saved, torch.float32))


@pytest.mark.parametrize("name", TRAINED_CASES)
def test_training_run_weights_saved_by_two_ranks_load_into_one(
    name: str, one_rank: dict[str, LoadedModel]
) -> None:  # the ranks have compared theirs
    folder = one_rank[name].directory.parent
    assert_same_weights(one_rank[name], load_megatron_checkpoint(folder / FROM_TRAINING, torch.float32))


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("nemotron_h-6", {"vocab_size": 127}, "vocab_size 127"),
        ("nemotron_h-6", {"num_attention_heads": 6, "num_key_value_heads": 3}, "number of KV heads 3"),
        ("nemotron_h-6", {"n_groups": 1}, "number of Mamba groups 1"),
        ("nemotron_h-6", {"intermediate_size": 49}, "feed-forward size 49"),
        ("qwen3_5-3", {"linear_num_key_heads": 1}, "number of key heads 1"),
        ("qwen3_5-3", {"linear_num_key_heads": 1, "linear_num_value_heads": 7}, "number of value heads 7"),
    ],
)
def test_unsplittable_model_is_refused_before_building(
    name: str, fields: dict[str, int], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = tiny_checkpoint(name)
    case.config.vocab_size = fields.get("vocab_size", 128)
    case.write(case.model(), tmp_path)
    set_fields(tmp_path, **fields)
    for name in ("get_tensor_model_parallel_world_size", "get_expert_tensor_parallel_world_size"):
        monkeypatch.setattr(parallel_state, name, lambda: NUM_RANKS)
    assert_refused(tmp_path, str(tmp_path / "config.json"), f"{message} is not divisible by 2 tensor-parallel ranks")


def test_context_parallelism_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = tiny_checkpoint("nemotron_h_moe-0")
    case.write(case.model(), tmp_path)
    monkeypatch.setattr(parallel_state, "get_context_parallel_world_size", lambda: 2)
    assert_refused(tmp_path, "context parallel size is 2")


@pytest.mark.parametrize(
    ("case", "size", "message"), [("nemotron_h_moe-0", 1024, "is not divisible by 1024"), ("bamba-2", 2, "no experts")]
)
def test_unsplittable_experts_are_refused(
    case: str, size: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = tiny_checkpoint(case)
    checkpoint.write(checkpoint.model(), tmp_path)
    monkeypatch.setattr(parallel_state, "get_expert_model_parallel_world_size", lambda: size)
    assert_refused(tmp_path, message)
