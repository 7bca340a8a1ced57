"""Split replays without CUDA: the part before the split is computed when the replay begins."""

import inspect
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_mamba_cache.kernels.attention.reference import CapturedReference
from megatron_mamba_cache.step.recorder import Compute, Prepare, Replay, nothing
from tests.mcore.graph_stand_ins import ComputesAgain, capture_without_cuda


class ComputesInParts(ComputesAgain):
    """Like `ComputesAgain`, but a split computation waits in a thread until the replay finishes.

    Attributes:
        begun, dropped: Replays that began, and those of them that never finished.
    """

    def __init__(self) -> None:
        self.begun = self.dropped = 0
        self._splits = False

    def split(self) -> None:
        """Wait, if a replay is in its first part."""
        self._splits = True
        if isinstance(thread := threading.current_thread(), _HalfDone):
            thread.wait_at_split()

    def record(self, compute: Compute, prepare: Prepare = nothing) -> tuple[tuple[Tensor, ...], Replay]:
        self._splits = False
        results, whole = super().record(compute, prepare)
        if not self._splits:
            return results, whole
        runner, halves = inspect.getclosurevars(compute).nonlocals["runner"], []

        def begin() -> None:
            while halves:
                halves.pop().drop()
                self.dropped += 1
            self.begun += 1
            halves.append(_HalfDone(compute, runner))
            halves[-1].begin()

        @torch.inference_mode()
        def finish() -> None:
            half = halves.pop()
            prepare()
            for result, again in zip(results, half.finish(), strict=True):
                result.copy_(again)

        return results, Replay(begin, finish)


def capture_in_parts(patch: pytest.MonkeyPatch) -> None:
    """Let engines on a CPU capture, and split captured steps before attention; with CUDA, do nothing."""
    if not torch.cuda.is_available():
        capture_without_cuda(patch, recorder=ComputesInParts)
        patch.setattr(CapturedReference, "is_planned", True)


class _Dropped(BaseException):
    """Ends a thread whose replay is not finished."""


class _HalfDone(threading.Thread):
    """Computes; while it waits at the split, the runner shows its previous state."""

    def __init__(self, compute: Compute, runner: Any) -> None:
        super().__init__(daemon=True)
        self._compute, self._runner, self._shown = compute, runner, _shown(runner)
        self._stops, self._goes_on, self._is_dropped = threading.Event(), threading.Event(), False
        self._results: tuple[Tensor, ...] = ()
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            with torch.inference_mode():
                self._results = self._compute()
        except BaseException as broken:  # raised where the replay is
            self._error = broken
        self._stops.set()

    def wait_at_split(self) -> None:
        self._stops.set()
        self._goes_on.wait()
        if self._is_dropped:
            raise _Dropped

    def begin(self) -> None:
        self.start()
        self._stops.wait()
        self._swap_shown()
        if self._error is not None:
            raise self._error

    def finish(self) -> tuple[Tensor, ...]:
        self._swap_shown()
        self._goes_on.set()
        self.join()
        self._swap_shown()
        if self._error is not None:
            raise self._error
        return self._results

    def drop(self) -> None:
        self._is_dropped = True
        self._swap_shown()
        self._goes_on.set()
        self.join()
        self._swap_shown()

    def _swap_shown(self) -> None:
        """Exchange the visible state of the runner between the computation and the engine."""
        shown = _shown(self._runner)
        self._runner._step, self._runner.step_requests.counts = self._shown
        self._shown = shown


def _shown(runner: Any) -> tuple[Any, Any]:
    return runner._step, runner.step_requests.counts
