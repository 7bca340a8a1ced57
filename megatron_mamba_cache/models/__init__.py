"""Models, tokenizers and draft models: loaded from checkpoints, built with random weights, or shipped here."""

from typing import TYPE_CHECKING

from ..public_names import lazy_names

if TYPE_CHECKING:
    from .checkpoints.hugging_face import load_hugging_face
    from .checkpoints.megatron_checkpoint import load_megatron_checkpoint, save_megatron_checkpoint
    from .drafting.draft_model import DraftModelDrafter
    from .random_hybrid import RandomHybridConfig, random_hybrid_model
    from .tokenizers.byte_tokenizer import ByteTokenizer
    from .tokenizers.hugging_face_tokenizer import load_tokenizer

_HOMES = {
    "ByteTokenizer": "tokenizers.byte_tokenizer",
    "DraftModelDrafter": "drafting.draft_model",
    "RandomHybridConfig": "random_hybrid",
    "load_hugging_face": "checkpoints.hugging_face",
    "load_megatron_checkpoint": "checkpoints.megatron_checkpoint",
    "load_tokenizer": "tokenizers.hugging_face_tokenizer",
    "random_hybrid_model": "random_hybrid",
    "save_megatron_checkpoint": "checkpoints.megatron_checkpoint",
}

__all__ = [
    "ByteTokenizer",
    "DraftModelDrafter",
    "RandomHybridConfig",
    "load_hugging_face",
    "load_megatron_checkpoint",
    "load_tokenizer",
    "random_hybrid_model",
    "save_megatron_checkpoint",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
