"""The family of a Hugging Face checkpoint; a larger model, for images or sound, may contain the language model."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import torch

from ..architecture import HybridArchitecture
from ..families import bamba, granite_hybrid, nemotron_h, qwen3_5, qwen3_next
from .checkpoint_config import TEXT_CONFIGS, CheckpointConfig
from .quantization_config import QuantizationConfig
from .stored_names import OtherNames

FAMILIES: dict[str, ModuleType] = {
    "nemotron_h": nemotron_h,
    "bamba": bamba,
    "granitemoehybrid": granite_hybrid,
    "qwen3_next": qwen3_next,
    "qwen3_5_text": qwen3_5,
    "qwen3_5_moe_text": qwen3_5,
}
"""`model_type` of a config → the module that knows its architecture and tensor names."""

_TEXT_PREFIXES = ("language_model.", "model.language_model.", "")


@dataclass(frozen=True, slots=True)
class CheckpointFamily:
    """The language model that a directory's config.json describes.

    Attributes:
        module: The module of `FAMILIES`.
        config: The fields that describe the language model.
        whole: All fields: `config`, or those of the larger model that contains it.
        dtype: bfloat16 if the file says that the weights are stored so or quantized, else float32.
        is_wrapped: True if a larger model contains the language model.
        quantization: How weights are quantized; None if they are not.
    """

    module: ModuleType
    config: CheckpointConfig
    whole: CheckpointConfig
    dtype: torch.dtype
    is_wrapped: bool
    quantization: QuantizationConfig | None

    @staticmethod
    def read(directory: Path) -> "CheckpointFamily":
        """Read the config.json of a directory.

        Raises:
            ValueError: Naming the file and the field, if it is missing, or if the family or its quantization is not
                supported.
        """
        whole = CheckpointConfig.read(directory)
        is_own = any(whole.equals("model_type", name, "") for name in FAMILIES)
        text = whole if is_own else whole.section(*TEXT_CONFIGS)
        is_wrapped = not is_own and text.has("model_type")
        config = text if is_wrapped else whole
        module = FAMILIES[config.one_of("model_type", sorted(FAMILIES))]
        is_bfloat16 = any(
            fields.equals(name, "bfloat16", None) for fields in (config, whole) for name in ("dtype", "torch_dtype")
        )
        quantization = QuantizationConfig.read(directory)
        dtype = torch.bfloat16 if is_bfloat16 or quantization else torch.float32
        return CheckpointFamily(module, config, whole, dtype, is_wrapped, quantization)

    def architecture(self, names: Collection[str] | None = None) -> HybridArchitecture:
        """Return the architecture that the configuration describes.

        Args:
            names: Of the checkpoint's tensors. A model whose configuration ties its ends is untied if the checkpoint
                has weights for both, as transformers does.
        """
        found: HybridArchitecture = self.module.architecture_of(self.config)
        if self.is_wrapped and self.whole.flag("tie_word_embeddings", False):
            found = replace(found, tie_embeddings=True)
        if names is None or not found.tie_embeddings:
            return found
        others, ends = self._other_names(), (self.module.ENDS["embeddings"], self.module.ENDS["output"])
        has_both = all(any(name in names for name in others.of(end)) for end in ends)
        return replace(found, tie_embeddings=not has_both)

    def other_names(self, architecture: HybridArchitecture) -> OtherNames:
        """Return the names that tensors may have; weights of tied ends may have the name of either."""
        others, ends = self._other_names(), self.module.ENDS
        tied = {ends["embeddings"]: (ends["output"],)} if architecture.tie_embeddings else {}
        return replace(others, parts={**tied, **others.parts})

    def is_other_part(self, name: str) -> bool:
        """Return True if a tensor belongs to a larger model, not to its language model."""
        if name.startswith(self._other_names().left_out):
            return True
        return self.is_wrapped and not name.startswith(tuple(filter(None, _TEXT_PREFIXES)))

    def _other_names(self) -> OtherNames:
        others: OtherNames = self.module.OTHER_NAMES
        return replace(others, prefixes=_TEXT_PREFIXES) if self.is_wrapped else others
