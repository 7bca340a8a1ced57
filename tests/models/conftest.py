"""Settings of torch under which models are compared with transformers, and checkpoints to load or to damage."""

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from megatron_mamba_cache.models import hugging_face
from tests.models.tiny_checkpoints import FAMILIES, tiny_checkpoint

# When they are imported, transformers' models choose GPU kernels of these packages, whatever device they then run on.
with patch.dict(sys.modules, {"mamba_ssm": None, "causal_conv1d": None}):
    for family in ("bamba", "granitemoehybrid", "nemotron_h"):
        importlib.import_module(f"transformers.models.{family}.modeling_{family}")


@pytest.fixture(autouse=True, scope="session")
def exact_fp32() -> None:
    """Switch TF32 off; one thread is the fastest for models this small."""
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write one checkpoint of each family, in one file; tests change copies of them."""
    written = {}
    for family in FAMILIES:
        case = replace(tiny_checkpoint(f"{family}-0"), max_shard_size="5GB")
        written[family] = tmp_path_factory.mktemp(family)
        case.write(case.model(), written[family])
    return written


@pytest.fixture
def no_model_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where a model is built, that is, where memory is spent on a checkpoint that could have been refused."""

    def fail(*_: object) -> None:
        raise RuntimeError("a model was built")

    monkeypatch.setattr(hugging_face, "build_hybrid_model", fail)
