"""Write Megatron distributed checkpoints (torch_dist) without starting processes.

Megatron's own save strategy starts one process for a queue and one per file. Each new process would run a script
without a `__main__` guard again, and if a process dies, the save hangs.
"""

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from queue import Queue
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.dist_checkpointing.utils import apply_prefix_mapping

_FUSED_NORMS = {
    # norm before a layer's first linear → name of the same weights if a checkpoint stores them with that linear
    "norm.": "mixer.in_proj.layer_norm_",
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
_TRAINING_STATE = re.compile(
    r"(chained_\d+\.)?optimizer\.|(rng_state|rerun_state_machine_state|opt_param_scheduler|dataloader_state)\b"
    r"|.*\._extra_state\d*\b"
)


def take_fused_names(sharded_state: dict[str, Any], layers: str, num_layers: int, stored: Collection[str]) -> None:
    """Rename, in place, each norm that the checkpoint stores under the name of the linear layer after the norm.

    Args:
        sharded_state: Sharded state dict of the model to load.
        layers: Prefix of the names of layers, which their numbers follow.
        stored: Names of the tensors in the checkpoint.
    """
    prefixes = (f"{layers}{layer}." for layer in range(num_layers))
    names = ((f"{layer}{norm}", f"{layer}{fused}") for layer in prefixes for norm, fused in _FUSED_NORMS.items())
    apply_prefix_mapping(sharded_state, {norm: fused for norm, fused in names if f"{fused}weight" in stored})


def is_training_state(name: str) -> bool:
    """Return True if a stored tensor is training state, such as optimizer state, rather than a weight."""
    return _TRAINING_STATE.match(name) is not None


class InProcessSaveStrategy(TorchDistSaveShardedStrategy):
    """Megatron save strategy for the torch_dist format that writes each rank's file without starting a process."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1, thread_count=1)

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
        """Write the tensors of a state dict; collective over all ranks.

        Raises:
            CheckpointException: Raised on the first rank if any rank cannot write its file.
        """
        with _results_in_this_process():
            request = self.async_save(sharded_state_dict, Path(checkpoint_dir))
            if request.async_fn is not None:  # it is None on a rank without tensors to write
                request = request._replace(async_fn=partial(_write, *request.async_fn.args))
            request.execute_sync()


@contextmanager
def _results_in_this_process() -> Iterator[None]:
    """Context manager that makes Megatron's writer use a queue in this process instead of starting a queue process."""
    before = filesystem_async._results_queue
    filesystem_async._results_queue = Queue()
    try:
        yield
    finally:
        filesystem_async._results_queue = before


def _write(transforms: list[Any], use_msc: bool, rank: int, buckets: list[Any], results: Queue) -> None:
    """Write all files in this process, then put the write results of each file, or the error, on `results`."""
    try:
        results.put({number: _written(transforms, use_msc, number, bucket) for number, bucket in enumerate(buckets)})
    except Exception as error:  # reported to the other ranks when results are exchanged
        results.put(error)


def _written(transforms: list[Any], use_msc: bool, number: int, bucket: Any) -> list[Any]:
    outcomes: Queue = Queue()
    unfinished: Queue = Queue()
    unfinished.put(number)
    FileSystemWriterAsync.write_preloaded_data(
        transforms, number, bucket, outcomes, unfinished, use_fsync=True, use_msc=use_msc
    )
    _, outcome = outcomes.get_nowait()
    if isinstance(outcome, Exception):
        raise outcome
    found: list[Any] = outcome
    return found
