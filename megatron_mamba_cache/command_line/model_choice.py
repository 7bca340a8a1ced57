"""Determine which model the flags select; torch and megatron are imported only where noted."""

from argparse import Namespace
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from ..models.tokenizers.hugging_face_tokenizer import has_tokenizer
from .flag_sources import UsageError
from .prompts import PromptLine

if TYPE_CHECKING:
    from ..models.architecture import HybridArchitecture
    from ..recurrences.model_shape import HybridModelShape

SHIPPED_MODEL = Path(__file__).parents[1] / "models" / "small_python_model"
MODEL_FLAGS = ("--hf-model", "--model")
"""The flag that selects a Hugging Face model, and its alias."""
_SHIPPED_FILES = ("config.json", "model.safetensors")


class ModelFormat(Enum):
    """Storage format of a model's weights; the value is the flag that selects a model in this format."""

    HUGGING_FACE = "--hf-model"
    MEGATRON = "--load"


@dataclass(frozen=True, slots=True)
class ModelDirectory:
    """Directory from which to load a model, and its format."""

    path: Path  # if --hf-model gives a hub name, this path does not exist
    format: ModelFormat

    @property
    def is_shipped(self) -> bool:
        """True for the model that ships with the package."""
        return self.path == SHIPPED_MODEL

    def check_prompts(self, lines: list[PromptLine], file: str | None) -> None:
        """Raise `UsageError` if a prompt in `file` is text and the model directory has no tokenizer."""
        if self.path.is_dir() and not has_tokenizer(self.path):
            require_token_ids(lines, file, self.path)


def chosen_directory(arguments: Namespace) -> ModelDirectory | None:
    """Return the directory of the model that the flags select, which is None for the random model."""
    if arguments.hf_model is not None:
        return ModelDirectory(Path(arguments.hf_model), ModelFormat.HUGGING_FACE)
    if arguments.load is not None:
        return ModelDirectory(Path(arguments.load), ModelFormat.MEGATRON)
    if arguments.random_model or not has_shipped_model():
        return None
    return ModelDirectory(SHIPPED_MODEL, ModelFormat.HUGGING_FACE)


def draft_directory(arguments: Namespace) -> ModelDirectory | None:
    """Return the directory of the draft model; None if there is no draft model."""
    if arguments.draft_hf_model is None:
        return None
    return ModelDirectory(Path(arguments.draft_hf_model), ModelFormat.HUGGING_FACE)


def has_shipped_model() -> bool:
    """Return True if this installation includes the small trained model."""
    return all((SHIPPED_MODEL / name).is_file() for name in _SHIPPED_FILES)


def fills_card(directory: ModelDirectory | None, device: str) -> bool:
    """Return True if the model is the user's and runs on a GPU; its cache then fills the GPU's memory by default."""
    return device == "cuda" and directory is not None and not directory.is_shipped


def described_shape(directory: Path) -> "tuple[HybridArchitecture, HybridModelShape]":
    """Return the architecture and shape of the model in a directory, with the MTP head in its files; imports torch.

    Raises:
        ValueError, OSError: If the configuration cannot be read or describes an unsupported model.
    """
    from ..models.checkpoints.hugging_face import read_head_pattern, read_sizes
    from ..models.shard_shape import shard_shape

    architecture, dtype = read_sizes(directory)
    pattern = architecture.pattern
    if not ("M" in pattern and "*" in pattern):
        raise ValueError(
            f"the model must have both recurrent (M) and attention (*) layers, found the layer pattern {pattern}"
        )
    head_pattern = ""
    with suppress(ValueError, OSError):  # the configuration may be there without the weights
        head_pattern = read_head_pattern(directory)
    return architecture, shard_shape(architecture, dtype, head_pattern=head_pattern)


def require_token_ids(lines: list[PromptLine], file: str | None, directory: Path) -> None:
    """Raise `UsageError` that names the first line whose prompt is text, if there is one."""
    line = next((line for line in lines if isinstance(line.prompt, str)), None)
    if line is None:
        return
    if file is None:
        raise UsageError(
            f'{directory} has no tokenizer, so prompts must be token ids; give a file with "prompt_tokens" as --prompts'
        )
    raise UsageError(
        f'--prompts {file}, line {line.request_id + 1} (request_id {line.request_id}): "prompt" is text, and '
        f'{directory} has no tokenizer; give "prompt_tokens"'
    )
