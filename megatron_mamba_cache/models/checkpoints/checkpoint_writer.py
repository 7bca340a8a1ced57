"""Write Megatron distributed checkpoints (torch_dist) without starting processes.

Megatron's own strategy starts a process that holds a queue and one for each file: a script without a `__main__` guard
would run itself again there, and a process that dies leaves the save hanging.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from queue import Queue
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy


class InProcessSaveStrategy(TorchDistSaveShardedStrategy):
    """Megatron's torch_dist strategy; writes one file per rank, in the rank's own process."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1, thread_count=1)

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
        """Write the tensors of a state dict; all ranks call it.

        Raises:
            CheckpointException: On the first rank, if any rank cannot write its file.
        """
        with _results_in_this_process():
            request = self.async_save(sharded_state_dict, Path(checkpoint_dir))
            if request.async_fn is not None:  # this rank has something to write
                request = request._replace(async_fn=partial(_write, *request.async_fn.args))
            request.execute_sync()


@contextmanager
def _results_in_this_process() -> Iterator[None]:
    """Give Megatron's writer a plain queue instead of a process that holds one."""
    before = filesystem_async._results_queue
    filesystem_async._results_queue = Queue()
    try:
        yield
    finally:
        filesystem_async._results_queue = before


def _write(transforms: list[Any], use_msc: bool, rank: int, buckets: list[Any], results: Queue) -> None:
    """Write each file, then report their contents; replaces the function that starts Megatron's writer processes."""
    try:
        results.put({number: _written(transforms, use_msc, number, bucket) for number, bucket in enumerate(buckets)})
    except Exception as error:  # the ranks learn of it when they exchange results
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
