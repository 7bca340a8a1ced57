"""Errors that a test injects into one call of a step."""

from collections.abc import Callable
from typing import Any

import pytest

from megatron_mamba_cache.mcore import engine as engine_module
from megatron_mamba_cache.mcore import step_report as step_report_module
from megatron_mamba_cache.mcore.model_reading import RecurrentMixer
from megatron_mamba_cache.mcore.self_attention import CachingSelfAttention
from megatron_mamba_cache.policy import running_requests
from megatron_mamba_cache.step import runner as runner_module
from tests.mcore.engine_runs import EngineRun

ErrorPoints = dict[str, Callable[[EngineRun], tuple[Any, str]]]

ERROR_POINTS: ErrorPoints = {
    "planning an admission": lambda run: (run.context.cache, "plan"),
    "reserving a slot": lambda run: (run.context.cache.slots, "reserve"),
    "scheduling a decode request": lambda run: (run.context.cache, "schedule_decode"),
    "laying out the step": lambda run: (run.context.runner, "lay_out"),
    "the first layer": lambda run: (run.subject.model.decoder.layers[0], "forward"),
    "attention": lambda run: (_modules(run, CachingSelfAttention)[0], "forward"),
    "the last mixer": lambda run: (_modules(run, RecurrentMixer)[-1], "forward"),
    "before publishing": lambda run: (run.context.runner, "publish_prompts"),
    "publishing blocks": lambda run: (run.context.cache.kv, "register"),
    "publishing states": lambda run: (run.context.cache.slots, "publish"),
    "after publishing a state": lambda run: (run.context.cache._reservations, "_note_published"),
    "counting an admission": lambda run: (run.context.cache, "_count_admission"),
    "sampling": lambda _run: (runner_module, "verify_step"),
    "copying states": lambda _run: (runner_module, "copy_reached_boundaries"),
    "before updating requests": lambda run: (run.context.runner, "land"),
    "advancing a request": lambda run: (run.context.cache, "advance"),
    "growing requests": lambda run: (running_requests, "grow_requests"),
    "releasing a finished request's blocks": lambda run: (run.context.cache.kv, "release"),
    "releasing a finished request's live slot": lambda run: (run.context.cache.slots, "release_live"),
    "after updating requests": lambda run: (run.context.block_allocator, "get_active_used"),
}
"""Calls in which a step may fail: an engine's object and a method name, or a module and its function."""

REPORT_ERROR_POINTS: ErrorPoints = {
    "the text of an alternative or a reply": lambda run: (run.engine.controller.tokenizer, "detokenize"),
    "marking what ends": lambda _run: (step_report_module.RecordMark, "of"),
    "before the report": lambda run: (run.engine, "_before_report"),
    "the report": lambda run: (run.engine, "post_process_requests"),
    "the last tokens": lambda _run: (engine_module, "append_tokens"),
    "between two requests": lambda run: (run.engine, "_check_stop_words_for_request_post_append"),
    "forgetting a request that ended": lambda run: (run.engine, "_forget"),
}
"""Calls in which the report of a computed step may fail."""


def _modules(run: EngineRun, kind: type) -> list[Any]:
    return [module for module in run.subject.model.modules() if isinstance(module, kind)]


class InjectedError(RuntimeError):
    """The error that tests raise within a step."""


def raise_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, *, call: int = 1) -> list[int]:
    """Make `owner.name` raise at its `call`-th next call only; return a list with the number of calls so far."""
    original, calls = getattr(owner, name), [0]

    def wrapper(*args: Any, **settings: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            raise InjectedError(f"{name}, call {call}")
        return original(*args, **settings)

    monkeypatch.setattr(owner, name, wrapper)
    return calls


def raise_where(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, is_error: Callable[..., bool]) -> None:
    """Make `owner.name` raise whenever `is_error` of its arguments is True."""
    original = getattr(owner, name)

    def wrapper(*args: Any, **settings: Any) -> Any:
        if is_error(*args, **settings):
            raise InjectedError(f"{name}, as always with these arguments")
        return original(*args, **settings)

    monkeypatch.setattr(owner, name, wrapper)


def finish_through_errors(run: EngineRun) -> int:
    """Run every request to its end through failed steps, and return their number."""
    num_failed = 0
    while run.engine.has_unfinished_requests():
        try:
            run.step()
        except InjectedError:
            run.context.check_integrity()
            num_failed += 1
            assert num_failed < 50
    return num_failed
