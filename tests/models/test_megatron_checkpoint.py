"""A Megatron distributed checkpoint holds a model's very bits, and says what is wrong with a damaged one."""

from pathlib import Path

import pytest
import torch

from megatron_mamba_cache.models.hugging_face import LoadedModel, load_hugging_face
from megatron_mamba_cache.models.megatron_checkpoint import (
    ARCHITECTURE_FILE,
    load_megatron_checkpoint,
    save_megatron_checkpoint,
)
from megatron_mamba_cache.models.random_hybrid import random_hybrid_model

SHIPPED = Path(__file__).resolve().parents[2] / "megatron_mamba_cache" / "models" / "small_python_model"


@pytest.fixture(scope="module")
def shipped() -> LoadedModel:
    return load_hugging_face(SHIPPED, torch.float32)


@pytest.fixture(scope="module")
def saved(shipped: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("megatron") / "checkpoint"
    save_megatron_checkpoint(shipped.model, shipped.architecture, directory)
    return directory


def test_a_saved_model_loads_bit_equal(shipped: LoadedModel, saved: Path) -> None:
    loaded = load_megatron_checkpoint(saved, torch.float32)
    assert loaded.architecture == shipped.architecture
    want, have = dict(shipped.model.named_parameters()), dict(loaded.model.named_parameters())
    assert want.keys() == have.keys()
    assert [name for name in want if not torch.equal(want[name], have[name])] == []


def test_saving_over_something_is_refused(shipped: LoadedModel, saved: Path) -> None:
    with pytest.raises(ValueError, match="is not empty"):
        save_megatron_checkpoint(shipped.model, shipped.architecture, saved)


def test_weights_without_an_architecture_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=ARCHITECTURE_FILE):
        load_megatron_checkpoint(tmp_path)


def test_a_damaged_architecture_is_refused(saved: Path, tmp_path: Path) -> None:
    text = (saved / ARCHITECTURE_FILE).read_text()
    for damaged in (text[: len(text) // 2], "[]", text.replace('"pattern"', '"patern"')):
        (tmp_path / ARCHITECTURE_FILE).write_text(damaged)
        with pytest.raises(ValueError, match="is damaged"):
            load_megatron_checkpoint(tmp_path)


def test_an_architecture_without_its_weights_is_refused(saved: Path, tmp_path: Path) -> None:
    (tmp_path / ARCHITECTURE_FILE).write_text((saved / ARCHITECTURE_FILE).read_text())
    with pytest.raises(ValueError, match="does not hold the weights"):
        load_megatron_checkpoint(tmp_path)


def test_random_models_save_too(tmp_path: Path, shipped: LoadedModel) -> None:
    model = random_hybrid_model()
    save_megatron_checkpoint(model, shipped.architecture, tmp_path / "other")
    with pytest.raises(ValueError, match="does not hold the weights"):  # another architecture's
        load_megatron_checkpoint(tmp_path / "other", torch.float32)
