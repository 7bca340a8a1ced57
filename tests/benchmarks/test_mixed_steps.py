"""The mixed-step benchmarks run with a tiny model and time the steps that they describe."""

from importlib import import_module

import pytest
import torch
from pytest import approx

from tests.command_line.command_runs import REPOSITORY


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(REPOSITORY / "benchmarks")


@pytest.mark.parametrize("prompts", [1, 3])
def test_mixed_steps_are_timed_for_every_prompt_length(prompts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    mixed, serving = import_module("mixed_steps"), import_module("loads.serving_engine")
    monkeypatch.setattr(mixed, "REPEATED", 2)
    monkeypatch.setattr(mixed, "NUM_ALONE", 3)
    shape = serving.SHAPES["tiny"]
    alone_ms, found = mixed.mixed_steps(serving.model_of(shape), shape, 3, 6, prompts, (40, 70))
    assert alone_ms > 0 and [(one.length, len(one.ms)) for one in found] == [(40, 2), (70, 2)]
    assert "| 70 | " in mixed.table(3, prompts, alone_ms, found)


def test_long_prompt_is_prefilled_while_requests_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    long_context, serving = import_module("long_context"), import_module("loads.serving_engine")
    monkeypatch.setattr(long_context, "NUM_UNDISTURBED", 5)
    shape = serving.SHAPES["tiny"]
    model = serving.model_of(shape)
    lone = long_context.long_row(model, shape, 300)
    found = [long_context.disturbed(model, shape, 2, chunk, 300) for chunk in (300, 100)]
    assert lone.history == 300 and lone.step_ms > 0 and lone.prefill_s > 0
    whole, cut = found
    num_steps = 1 + torch.cuda.is_available()  # on a GPU, an overlapped step ends before the prompt's step
    assert num_steps * whole.median_ms == approx(1e3 * whole.prefill_s)
    assert num_steps > 1 or whole.p99_ms == whole.median_ms
    assert 3 * cut.median_ms <= 1e3 * cut.prefill_s * 1.5 and cut.p99_ms < 1e3 * cut.prefill_s  # at least three steps
    assert "| 100 | " in long_context.table(lone, found)


def test_dense_gemms_exclude_only_routed_experts() -> None:
    dense, scales = import_module("dense_gemms"), import_module("engine_8b").SCALES
    model = import_module("loads.random_checkpoint").random_model(scales["tiny-experts"].shape.fields, torch.float32)
    weights = dense.dense_weights(model)
    assert (
        0
        < len(weights)
        == sum(
            isinstance(getattr(module, "weight", None), torch.Tensor) and module.weight.dim() == 2
            for name, module in model.decoder.named_modules()
            if "router" not in name
        )
    )
    products = dense.DenseGemms(weights, 3)
    products()
    last = weights[-1]
    torch.testing.assert_close(products.outputs[last.shape[0]], products.inputs[last.shape[1]] @ last.t())
    assert "| 1,024 | 2.00 | 1 |" in dense.table([dense.Products(1024, 2000.0, 2e9)])
