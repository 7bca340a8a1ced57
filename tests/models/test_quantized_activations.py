"""Prompt tokens of FP8 layers are quantized as the file says, and all other tokens are not."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_mamba_cache import build_engine
from megatron_mamba_cache.kernels.activations import activated_ref
from megatron_mamba_cache.kernels.quantized import product
from megatron_mamba_cache.mcore.linear import QuantizableLinear, prompt_tokens_of
from megatron_mamba_cache.mcore.stacked_experts import EXPERT_WEIGHTS, StackedExperts
from megatron_mamba_cache.models.checkpoints.hugging_face import LoadedModel, load_hugging_face
from megatron_mamba_cache.models.tokenizers.hugging_face_tokenizer import load_tokenizer
from tests.mcore.engine_runs import EngineRun, greedy
from tests.models.checkpoint_edits import edit_json
from tests.models.quantized_kinds import KINDS
from tests.models.quantized_writer import quantize
from tests.models.served_run import full_sequence_logits, served_config, some_prompt
from tests.models.tiny_checkpoints import TinyCheckpoint, wide_checkpoint

SHIPPED = Path(__file__).resolve().parents[2] / "megatron_mamba_cache" / "models" / "small_python_model"
GROUPS, TOKENS, TENSOR = "transformers F32", "compressed-tensors FP8 a row", "modelopt FP8"
SCHEMES = [GROUPS, TOKENS, TENSOR]
NAMES = ["nemotron_h-6", "qwen3_5-0"]
WITH_EXPERTS = ["nemotron_h_moe-0", "qwen3_5_moe-0"]


def checkpoint(name: str, kind: str, directory: Path) -> TinyCheckpoint:
    case = wide_checkpoint(name)
    case.write(case.model(), directory)
    quantize(directory, KINDS[kind])
    return case


def quantizing_layers(loaded: LoadedModel) -> list[QuantizableLinear]:
    """Return the layers that quantize activations."""
    layers = [module for module in loaded.model.modules() if isinstance(module, QuantizableLinear)]
    return [layer for layer in layers if layer.prompt_tokens is not None]


def nearest_codes(x: Tensor, inverse: Tensor, scales: Tensor) -> Tensor:
    """Return codes * scales in float64, by the definition of e4m3: three bits below the first, down to 2^-9."""
    scaled = (x.float() * inverse).double().clamp(-448, 448)
    steps = 2.0 ** (scaled.abs().clamp_min(2.0**-6).log2().floor() - 3)
    return (scaled / steps).round() * steps * scales.double()


def quantized_by_definition(x: Tensor, kind: str) -> Tensor:
    if kind == TENSOR:
        return nearest_codes(x, torch.tensor(2.0), torch.tensor(0.5))
    groups = x.split(128 if kind == GROUPS else x.shape[1], dim=1)
    amax = [group.float().abs().amax(1, keepdim=True) for group in groups]
    most = torch.full((len(x), 1), 448.0, device=x.device)
    found = [nearest_codes(x, most / size, size / most) for x, size in zip(groups, amax, strict=True)]
    return torch.cat(found, 1)


@pytest.mark.parametrize("kind", SCHEMES)
@pytest.mark.parametrize("name", NAMES)
def test_layers_quantize_prompt_tokens_only_by_the_scheme_of_the_file(name: str, kind: str, tmp_path: Path) -> None:
    checkpoint(name, kind, tmp_path)
    loaded = load_hugging_face(tmp_path)
    shared, layers = prompt_tokens_of(loaded.model), quantizing_layers(loaded)
    assert shared is not None and len(layers) > 3
    for layer in layers:
        x = torch.randn(9, 1, layer.quantized.shape[1], device=layer.quantized.words.device).bfloat16()
        exact, _ = layer(x)
        for first in (0, 4):
            with shared.beginning_at(first), torch.inference_mode():
                found, _ = layer(x)
            assert torch.equal(found[:first], exact[:first])
            given = x[first:, 0]
            expected = quantized_by_definition(given, kind) @ layer.quantized.dequantized(torch.float64).T
            rest = found[first:, 0, : expected.shape[1]]
            assert (rest.double() - expected).abs().max() <= 2**-7 * expected.abs().max()
            assert not torch.equal(rest, exact[first:, 0, : expected.shape[1]])
            assert torch.equal(found[:, :, expected.shape[1] :], exact[:, :, expected.shape[1] :])
    assert shared.first is None


@pytest.mark.parametrize("kind", SCHEMES)
@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_experts_quantize_prompt_tokens_only_by_the_scheme_of_the_file(name: str, kind: str, tmp_path: Path) -> None:
    checkpoint(name, kind, tmp_path)
    loaded = load_hugging_face(tmp_path)
    shared = prompt_tokens_of(loaded.model)
    layers = [module for module in loaded.model.modules() if isinstance(module, StackedExperts)]
    on_gpu = torch.cuda.is_available()
    torch.manual_seed(0)  # with one in some 300 inputs, a library of a CPU rounds 4 tokens otherwise than 9
    assert shared is not None and any(layer.activations for layer in layers)
    for layer in (layer for layer in layers if layer.activations):
        first, second = (layer.weight(name) for name in EXPERT_WEIGHTS)
        device = first.words.device
        x = torch.randn(9, first.shape[2], device=device).bfloat16()
        addend, shares = torch.randn_like(x), torch.rand(9, 2, device=device)
        ids = torch.stack([torch.randperm(layer.num_experts, device=device)[:2] for _ in x]).to(torch.int32)
        exact = layer(x, ids, shares, addend.clone)
        for begin in (0, 4, 9):
            with shared.beginning_at(begin), torch.inference_mode():
                found = layer(x, ids, shares, addend.clone)
            if on_gpu:  # other tiles of its kernels add in another order
                torch.testing.assert_close(found[:begin], exact[:begin], rtol=2**-6, atol=2**-6)
            else:
                assert torch.equal(found[:begin], exact[:begin])
            assert begin == 9 or not torch.equal(found[begin:], exact[begin:])
            expected = addend.double()
            for slot in range(2):
                chosen, given = ids[:, slot].long(), quantized_by_definition(x, kind)
                inner = torch.einsum("ti,toi->to", given, first.dequantized(torch.float64)[chosen])
                inner = activated_ref(inner, layer._activation).bfloat16()
                given = quantized_by_definition(inner, kind)
                rows = torch.einsum("ti,toi->to", given, second.dequantized(torch.float64)[chosen])
                expected = expected + shares[:, slot, None] * rows
            error = (found.double() - expected)[begin:].abs() / expected.abs().max()
            # Sums of FP8 tensor cores may move an inner value to the next code.
            assert (error > 2**-6).sum() <= (0.03 * error.numel() if on_gpu else 0)
            assert (error <= 2**-5).all()


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        ("modelopt FP8_PB_WO", None, None),
        ("modelopt MXFP8", None, None),
        ("modelopt NVFP4", None, None),
        (TOKENS, "input_activations", None),
        (TOKENS, "input_activations", {"num_bits": 8, "type": "int", "dynamic": True}),
    ],
)
def test_files_that_quantize_weights_only_quantize_no_activations(
    kind: str, field: str | None, value: object, tmp_path: Path
) -> None:
    checkpoint("qwen3_5-0", kind, tmp_path)
    if field is not None:
        edit_json(
            tmp_path / "config.json",
            lambda fields: fields["quantization_config"]["config_groups"]["group_0"].update({field: value}),
        )
    assert not quantizing_layers(load_hugging_face(tmp_path))


def test_a_static_scheme_without_scales_is_dynamic(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint("qwen3_5-0", "modelopt mixed", tmp_path / "none")
    layers = quantizing_layers(load_hugging_face(tmp_path / "none"))
    assert layers and all(layer.activation_scale is None for layer in layers)
    checkpoint("qwen3_5-0", TENSOR, tmp_path / "some")
    with caplog.at_level(logging.WARNING):
        layers = quantizing_layers(load_hugging_face(tmp_path / "some"))
    assert layers and all(layer.activation_scale.tolist() == [0.5] for layer in layers)
    assert not any("input_scale" in record.getMessage() for record in caplog.records)


def test_bf16_activations_are_exact_and_other_values_are_refused(tmp_path: Path) -> None:
    checkpoint("qwen3_5-0", GROUPS, tmp_path)
    assert not quantizing_layers(load_hugging_face(tmp_path, activation_dtype="bf16"))
    with pytest.raises(ValueError, match="activation_dtype must be 'auto' or 'bf16', found 'fp8'"):
        load_hugging_face(tmp_path, activation_dtype="fp8")  # type: ignore[arg-type]


@contextmanager
def counted_tokens() -> Iterator[dict[str, int]]:
    """Count the tokens of all products by their rule."""
    counts = {"quantized": 0, "exact": 0}
    quantize_activations, multiply = product.quantize_activations, product._multiply_exactly

    def quantizing(x: Tensor, scheme: object) -> object:
        counts["quantized"] += len(x)
        return quantize_activations(x, scheme)

    def exactly(tokens: Tensor, *rest: object) -> None:
        counts["exact"] += len(tokens)
        multiply(tokens, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(product, "quantize_activations", quantizing)
        patch.setattr(product, "_multiply_exactly", exactly)
        yield counts


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_each_prompt_token_is_quantized_once_and_no_decode_token_is(num_drafts: int, tmp_path: Path) -> None:
    case = checkpoint("qwen3_5-0", GROUPS, tmp_path)
    loaded = load_hugging_face(tmp_path)
    num_layers, length = len(quantizing_layers(loaded)), 2 * case.block_size + 9
    config = served_config(case, max_tokens=case.block_size + 5, num_speculative_tokens=num_drafts)
    run = EngineRun(loaded, build_engine(loaded.model, config))
    in_graphs = torch.cuda.is_available()  # decode steps are captured once, and replays call no function
    with counted_tokens() as counts:
        run.add(0, some_prompt(case, length), 12)
        run.finish()
        assert counts["quantized"] == num_layers * length  # in chunks
        assert counts["exact"] >= num_layers * 11 or in_graphs
        before = counts["exact"]
        run.add(1, some_prompt(case, length), 12)
        for _ in range(3):
            run.step()
        run.add(2, some_prompt(case, 7, seed=2), 12)  # a prompt next to a decoding request
        run.finish()
        assert counts["quantized"] == num_layers * (length + length - run.engine.cached_tokens(1) + 7)
        assert counts["exact"] >= before + num_layers * 22 or in_graphs
    assert run.engine.cached_tokens(1) > 0
    run.assert_nothing_held()


@pytest.mark.parametrize("kind", SCHEMES)
@pytest.mark.parametrize("name", NAMES + WITH_EXPERTS)
def test_hits_branches_and_chunks_change_no_token(name: str, kind: str, tmp_path: Path) -> None:
    case = checkpoint(name, kind, tmp_path)
    loaded = load_hugging_face(tmp_path)
    prompt = some_prompt(case, 2 * case.block_size + 9)
    branch = [*prompt[: case.block_size + 3], *some_prompt(case, 17, seed=3)]
    alone = EngineRun(loaded, build_engine(loaded.model, served_config(case, prefix_caching=False)))
    for number, text in enumerate((prompt, branch)):
        alone.run(number, text, greedy(12, return_log_probs=True, skip_prompt_log_probs=True, top_n_logprobs=5))
    run = EngineRun(loaded, build_engine(loaded.model, served_config(case, max_tokens=case.block_size)))
    run.run(0, prompt, 12)
    run.add(1, prompt, 12)
    run.add(2, branch, 12)
    run.finish()
    assert run.engine.cached_tokens(1) > 0 and run.engine.cached_tokens(2) > 0
    for request, number in ((0, 0), (1, 0), (2, 1)):
        assert_same_or_tied(run.tokens(request), alone.finished[number])


def assert_same_or_tied(found: list[int], expected: Any) -> None:
    """Assert the tokens of a request; on a GPU, whose libraries round by the number of tokens, the first may be tied.

    A rounding may change the code of an activation, so more than a rounding error is allowed.
    """
    tokens = list(expected.generated_tokens)
    if found == tokens or not torch.cuda.is_available():
        assert found == tokens
        return
    first = next(index for index, pair in enumerate(zip(found, tokens, strict=True)) if pair[0] != pair[1])
    best = expected.generated_top_n_logprobs[first]
    print(f"token {first} of the reply is {found[first]}; the most probable ones without a cache: {best}")
    assert best[str(tokens[first])] - best.get(str(found[first]), float("-inf")) < 0.2


def test_models_with_other_activations_share_no_states(tmp_path: Path) -> None:
    case = checkpoint("qwen3_5-0", GROUPS, tmp_path)
    contexts = []
    for dtype in ("auto", "bf16"):
        loaded = load_hugging_face(tmp_path, activation_dtype=dtype)
        contexts.append(build_engine(loaded.model, served_config(case)).context)
    assert contexts[0].shape.fingerprint != contexts[1].shape.fingerprint


@pytest.mark.parametrize("kind", SCHEMES)
def test_log_probs_of_the_shipped_model_stay_near_those_of_bf16_activations(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "shipped"
    copytree(SHIPPED, directory)
    quantize(directory, KINDS[kind])
    loaded = load_hugging_face(directory)
    shared = prompt_tokens_of(loaded.model)
    assert shared is not None
    tokenizer = load_tokenizer(directory, loaded.architecture.vocab_size)
    assert tokenizer is not None
    tokens = torch.tensor([tokenizer.tokenize(Path(__file__).read_text())[:512]])
    sizes: dict[QuantizableLinear, float] = {}

    def note_size(layer: QuantizableLinear, given: tuple[Tensor, ...]) -> None:
        sizes.setdefault(layer, given[0].abs().max().item())

    for layer in quantizing_layers(loaded):
        layer.register_forward_pre_hook(note_size)
    exact = full_sequence_logits(loaded, tokens).float().log_softmax(-1)
    for layer, size in sizes.items() if kind == TENSOR else ():
        layer.activation_scale.data.fill_(size / 448)
    with shared.beginning_at(0):
        found = full_sequence_logits(loaded, tokens).float().log_softmax(-1)
    following = tokens[:, 1:, None]
    difference = (found - exact)[:, :-1].gather(2, following).abs().mean().item()
    with capsys.disabled():
        print(f"\n{kind}: mean |delta log-prob| of FP8 against bf16 activations, shipped model: {difference:.4f}")
    assert 0 < difference < 0.25
