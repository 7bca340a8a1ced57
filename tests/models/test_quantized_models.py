"""Models whose weights stay quantized compute what their dequantized weights mean."""

from pathlib import Path

import pytest
import torch

from megatron_mamba_cache import build_engine
from megatron_mamba_cache.models.checkpoints.hugging_face import load_hugging_face
from tests.mcore.engine_runs import EngineRun
from tests.models.kept_weights import num_kept
from tests.models.quantized_kinds import KINDS
from tests.models.quantized_writer import quantize
from tests.models.served_run import full_sequence_logits, served_config, some_prompt
from tests.models.tensor_parallel_worker import some_prompts
from tests.models.tiny_checkpoints import wide_checkpoint

NAMES = ("nemotron_h_moe-0", "qwen3_5-0", "qwen3_5_moe-0", "bamba-2")
FORMATS = ("transformers F32", "modelopt FP8", "compressed-tensors FP8 a row", "modelopt NVFP4", "modelopt mixed")


@pytest.fixture(params=[(name, kind) for name in NAMES for kind in FORMATS], ids=" ".join)
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a quantized checkpoint."""
    name, kind = request.param
    case = wide_checkpoint(name)
    case.write(case.model(), tmp_path)
    quantize(tmp_path, KINDS[kind])
    return tmp_path


def test_logits_are_as_exact_as_with_dequantized_weights(directory: Path) -> None:
    kept, dequantized = load_hugging_face(directory), load_hugging_face(directory, dequantizes=True)
    exact = load_hugging_face(directory, torch.float32)
    assert num_kept(kept) > 0 == num_kept(dequantized) == num_kept(exact)
    prompts = some_prompts(kept.architecture.vocab_size)
    found, bf16, expected = (full_sequence_logits(loaded, prompts).float() for loaded in (kept, dequantized, exact))
    spread = expected.std()
    errors = [float((logits - expected).pow(2).mean().sqrt() / spread) for logits in (found, bf16)]
    # Rounding may choose other experts of a token, in either model.
    assert errors[0] <= (3 if kept.architecture.experts else 1.25) * errors[1] + 1e-3


@pytest.mark.parametrize("kind", ["transformers F32", "modelopt mixed"])
@pytest.mark.parametrize("name", ["nemotron_h_moe-0", "qwen3_5_moe-0", "bamba-2"])
def test_a_hit_changes_no_token_of_a_quantized_model(name: str, kind: str, tmp_path: Path) -> None:
    case = wide_checkpoint(name)
    case.write(case.model(), tmp_path)
    quantize(tmp_path, KINDS[kind])
    loaded = load_hugging_face(tmp_path)
    assert num_kept(loaded) > 0
    prompt = some_prompt(case, 2 * case.block_size + 9)
    run = EngineRun(loaded, build_engine(loaded.model, served_config(case)))
    for request in range(2):
        run.add(request, prompt, 12)
        run.finish()
    assert run.engine.cached_tokens(0) == 0 < run.engine.cached_tokens(1)
    assert run.tokens(0) == run.tokens(1)
    run.assert_nothing_held()
