"""Settings for comparisons with transformers, and checkpoints to load or to damage."""

import importlib
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_mamba_cache.models.checkpoints import hugging_face
from tests.models.tiny_checkpoints import FAMILIES, tiny_checkpoint, wide_checkpoint

CONVOLUTIONS = ("causal_conv1d_fn", "causal_conv1d_update")
MAMBA_FUNCTIONS = ("mamba2_chunk_scan", "mamba2_selective_state_update", "mamba2_split_conv1d_scan_combined")
DELTA_FUNCTIONS = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
FUNCTIONS = {
    **dict.fromkeys(("bamba", "granitemoehybrid", "nemotron_h"), CONVOLUTIONS + MAMBA_FUNCTIONS),
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_moe"), CONVOLUTIONS + DELTA_FUNCTIONS),
}
"""transformers' torch functions, which it replaces by those of other packages if they are installed."""


@pytest.fixture(autouse=True, scope="session")
def transformers_in_torch() -> None:
    """Make transformers' models use their torch code, even if mamba-ssm or fla is installed."""
    for family, names in FUNCTIONS.items():
        module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        for name in names:
            setattr(module, name, getattr(module, name).__wrapped__)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write one checkpoint of each family, in one file; tests change copies of them."""
    written = {}
    for family in FAMILIES:
        case = replace(tiny_checkpoint(f"{family}-0"), max_shard_size="5GB")
        written[family] = tmp_path_factory.mktemp(family)
        case.write(case.model(), written[family])
    return written


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a checkpoint with experts and enough columns for blocks of 128 and groups of 32; tests change copies."""
    case, directory = wide_checkpoint("nemotron_h_moe-0"), tmp_path_factory.mktemp("wide")
    case.write(case.model(), directory)
    return directory


@pytest.fixture
def no_model_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if a model is built; an invalid checkpoint must be refused before memory is allocated."""

    def fail(*_: object) -> None:
        raise RuntimeError("a model was built")

    monkeypatch.setattr(hugging_face, "build_hybrid_model", fail)
