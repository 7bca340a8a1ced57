"""One of several tensor-parallel ranks on the CPU: load checkpoints of both kinds, compare them, save one again.

`test_tensor_parallel.py` runs `main` in a separate process. For each folder below its folder: `hugging_face`,
`from_one_rank` (a Megatron checkpoint) and, where it is there, `from_training` (one as Megatron-LM's training leaves
it) are read; `from_all_ranks` (another one) and `logits.pt` are written.
"""

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron_mamba_cache.models.checkpoints.hugging_face import LoadedModel, load_hugging_face
from megatron_mamba_cache.models.checkpoints.megatron_checkpoint import (
    load_megatron_checkpoint,
    save_megatron_checkpoint,
)
from tests.fork_server import write_output_to

HUGGING_FACE, FROM_ONE_RANK, FROM_ALL_RANKS, LOGITS = "hugging_face", "from_one_rank", "from_all_ranks", "logits.pt"
FROM_TRAINING = "from_training"
TIMEOUT = timedelta(seconds=120)
PROMPT_LENGTH = 40


def log_of(folder: Path, rank: int) -> Path:
    """Return the log file of a rank."""
    return folder / f"{rank}.log"


def some_prompts(vocab_size: int) -> Tensor:
    """Return the same prompts [2, tokens] on every rank."""
    return torch.randint(vocab_size, (2, PROMPT_LENGTH), generator=torch.Generator().manual_seed(0))


def logits_of(loaded: LoadedModel) -> Tensor:
    """Return the logits [batch, prompt, vocab / ranks] of this rank's shard of the vocabulary."""
    prompts = some_prompts(loaded.architecture.vocab_size)
    batch, length = prompts.shape
    hidden_from = ~torch.ones(1, 1, length, length, dtype=torch.bool).tril()
    with torch.inference_mode():
        return loaded.model(prompts, torch.arange(length).expand(batch, -1), hidden_from)


def main(rank: int, size: int, folder: Path) -> None:
    """Run one rank; its output goes to its log file."""
    write_output_to(log_of(folder, rank))
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
    for case in sorted(found for found in folder.iterdir() if found.is_dir()):
        _run_case(case, rank, size)
    dist.destroy_process_group()


def _run_case(case: Path, rank: int, size: int) -> None:
    loaded = load_hugging_face(case / HUGGING_FACE, torch.float32)
    resharded = load_megatron_checkpoint(case / FROM_ONE_RANK, torch.float32)
    assert_same_weights(loaded, resharded)
    if (case / FROM_TRAINING).exists():
        assert_same_weights(loaded, load_megatron_checkpoint(case / FROM_TRAINING, torch.float32))
    save_megatron_checkpoint(resharded.model, resharded.architecture, case / FROM_ALL_RANKS)
    assert_same_weights(loaded, load_megatron_checkpoint(case / FROM_ALL_RANKS, torch.float32))
    local = logits_of(loaded).contiguous()
    parts = [torch.empty_like(local) for _ in range(size)]
    dist.all_gather(parts, local)
    if rank == 0:
        torch.save(torch.cat(parts, dim=-1), case / LOGITS)


def assert_same_weights(one: LoadedModel, other: LoadedModel) -> None:
    """Assert that parameters and buffers are bit-equal."""
    weights, others = weights_of(one), weights_of(other)
    assert weights.keys() == others.keys()
    assert [name for name, tensor in weights.items() if not torch.equal(tensor, others[name])] == []


def weights_of(loaded: LoadedModel) -> dict[str, Tensor]:
    """Return the parameters and buffers of a checkpoint."""
    return {name: tensor for name, tensor in loaded.model.state_dict().items() if isinstance(tensor, Tensor)}
