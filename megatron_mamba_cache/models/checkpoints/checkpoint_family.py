"""Choose the module for a checkpoint's model family, and read the model's architecture with it."""

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
"""`model_type` in config.json → module that maps the configuration and the tensor names."""

_TEXT_PREFIXES = ("language_model.", "model.language_model.", "")


@dataclass(frozen=True, slots=True)
class CheckpointFamily:
    """The language model that a directory's config.json describes, and the module for its model family.

    Attributes:
        module: The module in `FAMILIES` for this `model_type`.
        config: The fields that describe the language model.
        whole: All fields in the file; the same as `config` unless the language model is part of a multimodal model.
        dtype: bfloat16 if the file says that the weights are bfloat16 or quantized, else float32.
        is_wrapped: True if the language model is part of a multimodal model.
        quantization: Quantization formats of the weights; None if they are not quantized.
    """

    module: ModuleType
    config: CheckpointConfig
    whole: CheckpointConfig
    dtype: torch.dtype
    is_wrapped: bool
    quantization: QuantizationConfig | None

    @staticmethod
    def read(directory: Path) -> "CheckpointFamily":
        """Read config.json from a model directory.

        Raises:
            ValueError: If the file or a field is missing, or the family or quantization is not supported.
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
            names: Tensor names in the checkpoint. If both embeddings and output weights are stored, they are untied
                even if the configuration says otherwise, as in transformers.
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
        """Return the rules for alternative tensor names, including the output layer's name for tied embeddings."""
        others, ends = self._other_names(), self.module.ENDS
        tied = {ends["embeddings"]: (ends["output"],)} if architecture.tie_embeddings else {}
        return replace(others, parts={**tied, **others.parts})

    def is_other_part(self, name: str) -> bool:
        """Return True if a tensor belongs to a multimodal model but not to its language model."""
        if name.startswith(self._other_names().left_out):
            return True
        return self.is_wrapped and not name.startswith(tuple(filter(None, _TEXT_PREFIXES)))

    def _other_names(self) -> OtherNames:
        others: OtherNames = self.module.OTHER_NAMES
        return replace(others, prefixes=_TEXT_PREFIXES) if self.is_wrapped else others
