"""Multi-token prediction layers, and no other tensors, are skipped with one log line."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from transformers import AutoConfig

from megatron_mamba_cache.models.checkpoints.checkpoint_writer import InProcessSaveStrategy
from megatron_mamba_cache.models.checkpoints.hugging_face import LoadedModel, load_hugging_face
from megatron_mamba_cache.models.checkpoints.megatron_checkpoint import load_megatron_checkpoint
from megatron_mamba_cache.models.checkpoints.stored_names import mtp_names
from tests.models.checkpoint_edits import assert_refused, copy_of, set_fields, tensors_of, write_tensors
from tests.models.mtp_heads import head_tensors
from tests.models.tensor_parallel_worker import assert_same_weights
from tests.models.training_checkpoints import DENSE, random_model, write_training_checkpoint

QWEN_NAMES = [
    "mtp.fc.weight",
    "mtp.layers.0.self_attn.q_norm.weight",
    "mtp.norm.weight",
    "mtp.pre_fc_norm_embedding.weight",
]
RELEASED_NAMES = {
    "nemotron_h": [
        "mtp.layers.0.eh_proj.weight",
        "mtp.layers.0.enorm.weight",
        "mtp.layers.1.mixer.experts.7.up_proj.weight",
    ],
    "bamba": [
        "mtp.fc.weight",
        "mtp.layers.0.self_attn.q_proj.weight",
        "mtp.norm.weight",
        "mtp.pre_fc_norm_hidden.weight",
    ],
    "granite_moe": [
        "model.mtp.layers.0.enorm.weight",
        "backbone.mtp.norm.weight",
        "model.mtp_layers.0.hidden_layernorm.weight",
    ],
    "qwen3_next": QWEN_NAMES,
    "qwen3_5": QWEN_NAMES,
}


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    own = [record for record in caplog.records if record.name.startswith("megatron_mamba_cache")]
    assert all(record.levelno == logging.WARNING for record in own)
    return [record.getMessage() for record in own]


@pytest.mark.parametrize("family", RELEASED_NAMES)
def test_directory_with_mtp_tensors_loads_without_them_and_logs_it_once(
    family: str, checkpoints: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory, names = copy_of(checkpoints[family], tmp_path), RELEASED_NAMES[family]
    write_tensors(directory, tensors_of(directory) | {name: torch.ones(4) for name in names})
    fields: dict[str, Any] = {
        "num_nextn_predict_layers": 1,
        "mtp_hybrid_override_pattern": "*E",
        "mtp_num_layers": None,
    }
    set_fields(directory, **fields)
    loaded = load_hugging_face(directory, torch.float32)
    assert_same_weights(load_hugging_face(checkpoints[family], torch.float32), loaded)
    (warning,) = warnings_of(caplog)
    assert warning.startswith(f"{directory} has layers for multi-token prediction (MTP), which are not used; ")
    assert warning.endswith(f"their {len(names)} tensors are left out")


def test_incomplete_head_is_skipped_with_a_warning(
    checkpoints: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = copy_of(checkpoints["qwen3_5"], tmp_path)
    head = head_tensors(AutoConfig.from_pretrained(directory))
    del head["mtp.fc.weight"]
    write_tensors(directory, tensors_of(directory) | head)
    load_hugging_face(directory, torch.float32)
    assert len(warnings_of(caplog)) == 1


def test_extra_layers_are_skipped_as_mtp_when_configured(
    checkpoints: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = copy_of(checkpoints["bamba"], tmp_path)
    tensors = tensors_of(directory)
    num_layers = 1 + max(int(name.split(".")[2]) for name in tensors if name.startswith("model.layers."))
    first, second = (f"model.layers.{num_layers + index}.eh_proj.weight" for index in range(2))
    write_tensors(directory, tensors | {first: torch.ones(4)})
    assert_refused(directory, f"has 1 tensors: {first}, which the model does not have")
    set_fields(directory, num_nextn_predict_layers=1)
    load_hugging_face(directory, torch.float32)
    assert len(warnings_of(caplog)) == 1
    write_tensors(directory, tensors | {first: torch.ones(4), second: torch.ones(4)})
    assert_refused(directory, f"has 1 tensors: {second}, which the model does not have")


@pytest.mark.usefixtures("no_model_is_built")
@pytest.mark.parametrize("name", ["mtps.weight", "model.layers.0.mtp.weight", "mtp", "head.mtp.layers.0.weight"])
def test_unknown_tensors_are_refused_when_mtp_tensors_are_present(
    name: str, checkpoints: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = copy_of(checkpoints["bamba"], tmp_path)
    write_tensors(directory, tensors_of(directory) | {name: torch.ones(4), "mtp.norm.weight": torch.ones(4)})
    assert_refused(directory, f"has 1 tensors: {name}, which the model does not have")
    assert warnings_of(caplog) == []


def test_training_run_with_mtp_layers_loads_without_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = LoadedModel(random_model(DENSE), DENSE, tmp_path / "run")
    changed = {"mtp_num_layers": 1, "hybrid_override_pattern": f"{DENSE.pattern}/*E"}
    write_training_checkpoint(given.model, DENSE, tmp_path / "run", **changed)
    assert_same_weights(given, load_megatron_checkpoint(tmp_path / "run", torch.float32))
    assert warnings_of(caplog) == []  # it has no such tensors
    state = given.model.sharded_state_dict()
    for name in ("mtp.layers.0.eh_proj.weight", "mtp.layers.0.enorm.weight"):
        state[name] = ShardedTensor.from_rank_offsets(name, torch.ones(4))
    (tmp_path / "saved").mkdir()
    dist_checkpointing.save(state, str(tmp_path / "saved"), InProcessSaveStrategy())
    loaded = load_megatron_checkpoint(tmp_path / "saved", torch.float32, architecture=DENSE)
    assert_same_weights(given, loaded)
    (warning,) = warnings_of(caplog)
    assert "multi-token prediction (MTP), which are not used; their 2 tensors are left out" in warning


def test_mtp_tensors_are_found_by_name_prefix() -> None:
    names = ["mtp.a", "model.mtp.b", "language_model.model.mtp.c", "x.mtp.d", "model.layers.3.e", "model.layers.4.f"]
    assert mtp_names(names) == ["language_model.model.mtp.c", "model.mtp.b", "mtp.a"]
    assert mtp_names(names, ["norm", "model.layers.2.a", "model.layers.3.a"], 1) == [
        "language_model.model.mtp.c",
        "model.layers.4.f",
        "model.mtp.b",
        "mtp.a",
    ]
