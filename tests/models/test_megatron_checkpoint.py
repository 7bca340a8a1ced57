"""A Megatron distributed checkpoint stores a model bit for bit, and a damaged one is refused with the reason."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.models.mamba.mamba_model import MambaModel

from megatron_mamba_cache.models.checkpoints import megatron_checkpoint
from megatron_mamba_cache.models.checkpoints.architecture_file import ARCHITECTURE_FILE
from megatron_mamba_cache.models.checkpoints.hugging_face import LoadedModel, load_hugging_face
from megatron_mamba_cache.models.checkpoints.megatron_checkpoint import (
    load_megatron_checkpoint,
    save_megatron_checkpoint,
)
from megatron_mamba_cache.models.random_hybrid import random_hybrid_model
from tests.command_line.command_runs import run_process
from tests.models.checkpoint_edits import copy_of, edit_json
from tests.models.tensor_parallel_worker import assert_same_weights
from tests.models.tiny_checkpoints import FAMILIES

SHIPPED = Path(__file__).resolve().parents[2] / "megatron_mamba_cache" / "models" / "small_python_model"
SCRIPT = """\
import sys
from megatron_mamba_cache.models.checkpoints.hugging_face import load_hugging_face
from megatron_mamba_cache.models.checkpoints.megatron_checkpoint import save_megatron_checkpoint
loaded = load_hugging_face(sys.argv[1])
save_megatron_checkpoint(loaded.model, loaded.architecture, "saved")
"""


@pytest.fixture(scope="module")
def shipped() -> LoadedModel:
    return load_hugging_face(SHIPPED, torch.float32)


@pytest.fixture(scope="module")
def saved(shipped: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("megatron") / "checkpoint"
    save_megatron_checkpoint(shipped.model, shipped.architecture, directory)
    return directory


def test_saved_weights_load_bit_identically(shipped: LoadedModel, saved: Path) -> None:
    loaded = load_megatron_checkpoint(saved, torch.float32)
    assert loaded.architecture == shipped.architecture
    assert_same_weights(shipped, loaded)


@pytest.mark.parametrize("portion_bytes", [400_000, 1])
def test_large_checkpoint_is_read_in_chunks(
    shipped: LoadedModel, saved: Path, portion_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []
    load = dist_checkpointing.load

    def counted(wanted: dict[str, Any], *arguments: Any, **options: Any) -> dict[str, Any]:
        reads.append(len(wanted))
        return load(wanted, *arguments, **options)

    monkeypatch.setattr(megatron_checkpoint, "PORTION_BYTES", portion_bytes)
    monkeypatch.setattr(dist_checkpointing, "load", counted)
    assert_same_weights(shipped, load_megatron_checkpoint(saved, torch.float32))
    assert 1 < len(reads) <= 16 and max(reads) - min(reads) <= 1, reads


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_saved_weights_of_every_family_load_bit_identically(
    family: str, dtype: torch.dtype, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    loaded = load_hugging_face(checkpoints[family], dtype)
    save_megatron_checkpoint(loaded.model, loaded.architecture, tmp_path / "saved")
    assert_same_weights(loaded, load_megatron_checkpoint(tmp_path / "saved", dtype))


def test_script_without_a_main_guard_can_save_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "save.py").write_text(SCRIPT)
    finished = run_process("save.py", SHIPPED, cwd=tmp_path)
    assert finished.status == 0, finished.stderr
    assert sorted(file.suffix for file in (tmp_path / "saved").glob("*.distcp")) == [".distcp"]


def test_saving_without_psutil_fails_without_hanging(
    shipped: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filesystem_async, "HAVE_PSUTIL", False)
    with pytest.raises(OSError, match=f"{tmp_path}.*psutil"):
        save_megatron_checkpoint(shipped.model, shipped.architecture, tmp_path / "saved")


def test_checkpoint_path_that_is_a_file_is_refused(shipped: LoadedModel, tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    with pytest.raises(ValueError, match=f"cannot create the directory {tmp_path / 'taken'}"):
        save_megatron_checkpoint(shipped.model, shipped.architecture, tmp_path / "taken")


def test_saving_into_a_nonempty_directory_is_refused(shipped: LoadedModel, saved: Path) -> None:
    with pytest.raises(ValueError, match="is not empty"):
        save_megatron_checkpoint(shipped.model, shipped.architecture, saved)


def test_weights_without_an_architecture_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=ARCHITECTURE_FILE):
        load_megatron_checkpoint(tmp_path)


def test_damaged_architecture_file_is_refused(saved: Path, tmp_path: Path) -> None:
    text = (saved / ARCHITECTURE_FILE).read_text()
    for damaged in (text[: len(text) // 2], "[]", text.replace('"pattern"', '"patern"')):
        (tmp_path / ARCHITECTURE_FILE).write_text(damaged)
        with pytest.raises(ValueError, match=f"{tmp_path / ARCHITECTURE_FILE}.*(JSON|'pattern' is missing)"):
            load_megatron_checkpoint(tmp_path)


def test_directory_with_only_an_architecture_file_is_refused(saved: Path, tmp_path: Path) -> None:
    (tmp_path / ARCHITECTURE_FILE).write_text((saved / ARCHITECTURE_FILE).read_text())
    with pytest.raises(ValueError, match="does not hold the weights"):
        load_megatron_checkpoint(tmp_path)


def test_tensors_unknown_to_the_architecture_are_refused(saved: Path, tmp_path: Path) -> None:
    directory = copy_of(saved, tmp_path)
    edit_json(directory / ARCHITECTURE_FILE, lambda fields: fields.update(tie_embeddings=True))
    with pytest.raises(ValueError, match=r"has 1 tensors: output_layer\.weight, which .* does not have"):
        load_megatron_checkpoint(directory, torch.float32)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("tie_embeddings", True, "does not have"),
        ("pattern", "M*-M*-M", "lacks"),
        ("vocab_size", 2**24, "has shape"),
        (None, None, None),
    ],
)
def test_checkpoint_of_another_model_is_refused_before_allocation(
    field: str | None, value: object, reason: str | None, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, devices, build = copy_of(saved, tmp_path), [], megatron_checkpoint.build_hybrid_model
    if field is not None:
        edit_json(directory / ARCHITECTURE_FILE, lambda fields: fields.update({field: value}))

    def noted_build(*arguments: Any) -> MambaModel:
        model = build(*arguments)
        devices.append({parameter.device.type for parameter in (*model.parameters(), *model.buffers())})
        return model

    monkeypatch.setattr(megatron_checkpoint, "build_hybrid_model", noted_build)
    fits = reason is None
    with nullcontext() if fits else pytest.raises(ValueError, match=reason):
        load_megatron_checkpoint(directory, torch.float32)
    print(f"{field}: built on {devices}")
    assert devices == [{"meta"}, {torch.empty(0, device=torch.cuda.current_device()).device.type}][: 1 + fits]


def test_error_names_missing_tensors(shipped: LoadedModel, tmp_path: Path) -> None:
    model = load_hugging_face(SHIPPED, torch.float32).model
    model.decoder.final_norm = torch.nn.Identity()
    save_megatron_checkpoint(model, shipped.architecture, tmp_path / "saved")
    with pytest.raises(ValueError, match=r"lacks 1 tensors: decoder\.final_norm\.weight of the model"):
        load_megatron_checkpoint(tmp_path / "saved", torch.float32)


def test_architecture_file_with_a_changed_value_builds_or_is_refused(saved: Path, tmp_path: Path) -> None:
    directory = copy_of(saved, tmp_path)
    file = directory / ARCHITECTURE_FILE
    whole = json.loads(file.read_text())
    parts = [("", whole), *((f"{name}.", part) for name, part in whole.items() if isinstance(part, dict))]
    outcomes = set()
    for prefix, fields in parts:
        for name in fields:
            before = fields[name]
            for value in ("x", [], {}, None, True, -1, 0, 1.5):
                fields[name] = value
                file.write_text(json.dumps(whole))
                refusal = refusal_of(directory)
                outcomes.add(refusal is None)
                assert refusal is None or str(directory) in refusal, (prefix, name, value, refusal)
                if value == "x" or (value == -1 and not name.endswith("_multiplier")):
                    assert refusal is not None and (f"{prefix}{name}" in refusal or "pattern" in refusal)
            fields[name] = before
    assert outcomes == {True, False}


def refusal_of(directory: Path) -> str | None:
    """Return the message of the `ValueError` that loading raises; None if it succeeds. Other errors are not caught."""
    try:
        load_megatron_checkpoint(directory, torch.float32)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("fields", [{"pattern": "MMMM"}, {"pattern": "M*X"}, {"pattern": "M*E"}])
def test_unbuildable_architecture_is_refused(fields: dict[str, str], saved: Path, tmp_path: Path) -> None:
    directory = copy_of(saved, tmp_path)
    edit_json(directory / ARCHITECTURE_FILE, lambda architecture: architecture.update(fields))
    with pytest.raises(ValueError, match=f"{ARCHITECTURE_FILE} describes a model that Megatron cannot build"):
        load_megatron_checkpoint(directory, torch.float32)


def test_missing_or_truncated_weights_file_is_refused(saved: Path, tmp_path: Path) -> None:
    directory = copy_of(saved, tmp_path)
    (file,) = directory.glob("*.distcp")
    content = file.read_bytes()
    for length in (len(content) - 100, len(content) // 2, 10, 0):
        file.write_bytes(content[:length])
        with pytest.raises(ValueError, match=f"{directory} does not hold the weights"):
            load_megatron_checkpoint(directory, torch.float32)
    file.unlink()
    with pytest.raises(ValueError, match=f"{directory} does not hold the weights"):
        load_megatron_checkpoint(directory, torch.float32)


@pytest.mark.parametrize("name", [".metadata", "common.pt", "metadata.json"])
def test_missing_or_truncated_metadata_is_refused(name: str, saved: Path, tmp_path: Path) -> None:
    file = copy_of(saved, tmp_path) / name
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=f"{file.parent} does not hold the weights"):
        load_megatron_checkpoint(file.parent, torch.float32)
    file.write_bytes(b"")
    with pytest.raises(ValueError, match=f"{file} is empty"):
        load_megatron_checkpoint(file.parent, torch.float32)
    file.unlink()
    with pytest.raises(ValueError, match=f"{file} is missing"):
        load_megatron_checkpoint(file.parent, torch.float32)


def test_random_models_can_be_saved(tmp_path: Path, shipped: LoadedModel) -> None:
    model = random_hybrid_model()
    save_megatron_checkpoint(model, shipped.architecture, tmp_path / "other")
    with pytest.raises(ValueError, match=r"lacks \d+ tensors"):  # another architecture's
        load_megatron_checkpoint(tmp_path / "other", torch.float32)
