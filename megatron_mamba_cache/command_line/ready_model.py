"""Load a model and its tokenizer, and build its drafter and engine."""

import math
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from ..build import TokenIdTokenizer, build_engine
from ..config import CacheConfig
from ..mcore.engine import MambaCacheEngine
from ..mcore.model_ranks import ranks_of_process
from ..mcore.model_reading import model_shape_of
from ..mcore.mtp_head import MTPHead, RemoteHead
from ..models.checkpoints.hugging_face import ActivationDtype, LoadedModel, load_hugging_face
from ..models.checkpoints.megatron_checkpoint import load_megatron_checkpoint
from ..models.checkpoints.mtp_tensors import MTPLoading
from ..models.drafting.draft_model import DraftModelDrafter
from ..models.drafting.mtp_drafter import drafter_of
from ..models.parameter_shapes import parameters_of
from ..models.random_hybrid import RandomHybridConfig, random_architecture, random_hybrid_model
from ..models.tokenizers.byte_tokenizer import ByteTokenizer
from ..models.tokenizers.hugging_face_tokenizer import HuggingFaceTokenizer, load_tokenizer
from ..models.tokenizers.token_reader import image_tokens_of
from ..speculation.drafter import Drafter
from ..speculation.prompt_lookup import AutoDrafter, PromptLookupDrafter
from .expected_memory import DTYPES, Settings, dtype_of_weights, errors_of_settings
from .flag_sources import UsageError
from .model_choice import ModelDirectory, ModelFormat, draft_directory
from .sizing import DRAFTER_SHARE

_DRAFT_FLAG = "--draft-hf-model"
_MTP_FLAG = "--drafter mtp"
_SYMBOLS = {"*": "attention", "-": "MLP", "E": "experts"}


@dataclass(frozen=True, slots=True)
class ReadyModel:
    """A loaded model, its tokenizer, and a line of text that describes both."""

    model: Any
    tokenizer: HuggingFaceTokenizer | ByteTokenizer | TokenIdTokenizer
    description: str
    dtype: str  # dtype of the weights, "fp32" or "bf16"
    mtp: MTPHead | RemoteHead | None = None  # loaded for `--drafter mtp` and `--drafter auto`

    @property
    def writes_text(self) -> bool:
        """True when the model generates meaningful text; only then are its replies printed."""
        return isinstance(self.tokenizer, HuggingFaceTokenizer)


@dataclass(frozen=True, slots=True)
class WeightFlags:
    """Flags for the weights that are loaded; the fields are as in `load_hugging_face`."""

    dequantizes: bool = False
    activation_dtype: ActivationDtype = "auto"
    mtp: MTPLoading = "none"

    @classmethod
    def of(cls, arguments: Namespace) -> "WeightFlags":
        """Return the flags in the parsed arguments of a command."""
        mtp: MTPLoading = "required" if arguments.drafter == "mtp" else "none"
        if arguments.drafter == "auto" and arguments.num_speculative_tokens != 0:
            mtp = "auto"
        return cls(arguments.dequantize_weights, arguments.activation_dtype, mtp)


_DEFAULT_FLAGS = WeightFlags()


def ready_model(
    directory: ModelDirectory | None, dtype: str | None, device: str, flags: WeightFlags = _DEFAULT_FLAGS
) -> ReadyModel:
    """Load a model onto the current device, or build the random model if `directory` is None. Disables TF32.

    Args:
        dtype: "fp32" or "bf16"; None for the dtype that `dtype_of_weights` returns.
        device: "cpu" or "cuda".

    Raises:
        UsageError: If the directory or its tokenizer cannot be loaded.
    """
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    if directory is None or directory.is_shipped:
        # A model this small does not benefit from more threads; on a busy machine, they can make it 100 times slower.
        torch.set_num_threads(1)
    if flags.mtp == "required" and directory is None:
        raise UsageError(f"{_MTP_FLAG} needs a model with MTP layers; give it with --hf-model or --load")
    stored = dtype_of_weights(directory, dtype, device)
    return _random(stored or "fp32") if directory is None else _loaded(directory, stored, flags)


def engine_for(
    model: ReadyModel, config: CacheConfig, seed: int, make_drafter: Callable[[CacheConfig], Drafter | AutoDrafter]
) -> MambaCacheEngine:
    """Build an engine, with a drafter if `config` enables drafts.

    Raises:
        UsageError: If the settings do not suit the model or need more memory than is free.
    """
    drafter = None
    if config.num_speculative_tokens:
        with errors_of_settings(DRAFTER_SHARE, is_draft=True):
            drafter = make_drafter(config)
    with errors_of_settings(1 - DRAFTER_SHARE if isinstance(drafter, DraftModelDrafter) else 1.0):
        return build_engine(
            model.model, config, drafter=drafter, tokenizer=model.tokenizer, random_seed=seed, scores_prompts=True
        )


def load_weights(
    directory: ModelDirectory, dtype: str | None, flags: WeightFlags = _DEFAULT_FLAGS, *, flag: str
) -> LoadedModel:
    """Load a model directory onto the current device; on failure, raise `UsageError` that starts with `flag`.

    `dtype` is "fp32" or "bf16"; None keeps the dtype of the checkpoint.
    """
    try:
        read_as = None if dtype is None else DTYPES[dtype]
        if directory.format is ModelFormat.MEGATRON:
            return load_megatron_checkpoint(directory.path, read_as, mtp=flags.mtp)
        return load_hugging_face(directory.path, read_as, **asdict(flags))
    except (ValueError, OSError) as error:
        raise UsageError(f"{flag}: {error}") from error
    except (RuntimeError, MemoryError) as error:
        if not (isinstance(error, MemoryError | torch.OutOfMemoryError) or "alloc" in str(error)):
            raise
        sizes = f" ({error})" if isinstance(error, MemoryError) and str(error) else ""
        raise UsageError(f"{flag} {directory.path}: {dtype or 'its'} weights do not fit in memory{sizes}") from error


def drafter_maker(
    arguments: Namespace, model: ReadyModel, settings: Settings
) -> Callable[[CacheConfig], Drafter | AutoDrafter]:
    """Return a function that maps the engine's settings to a new drafter; all drafters share a draft model's weights.

    A draft model has the same dtype as `model`.

    Args:
        model: The model that verifies the drafts.
        settings: Returns the settings of the draft model's cache; called for each drafter.

    Raises:
        UsageError: If the draft model cannot be loaded, or its vocabulary size differs from that of `model`.
    """
    if model.mtp is not None:
        make = partial(drafter_of, model.model, model.mtp)
        return (lambda _: make()) if arguments.drafter == "mtp" else (lambda _: AutoDrafter(make()))
    directory = draft_directory(arguments)
    if directory is None:
        return lambda _: PromptLookupDrafter()
    draft_model = load_weights(directory, model.dtype, WeightFlags.of(arguments), flag=_DRAFT_FLAG).model
    vocab_size = model_shape_of(model.model, ranks_of_process()).vocab_size
    if draft_model.vocab_size != vocab_size:
        raise UsageError(
            f"{_DRAFT_FLAG} {directory.path}: its vocabulary has {draft_model.vocab_size} tokens, but the model's has "
            f"{vocab_size}; a draft model needs the same vocabulary"
        )
    shape = model_shape_of(draft_model, ranks_of_process())

    def drafter(_: CacheConfig) -> Drafter:
        return DraftModelDrafter(draft_model, CacheConfig(**settings(shape, draft_model.max_sequence_length)))

    return drafter


def _random(dtype: str) -> ReadyModel:
    shape = RandomHybridConfig(dtype=DTYPES[dtype])
    try:
        model = random_hybrid_model(shape)
    except ValueError as error:  # the model cannot be split evenly over the ranks
        raise UsageError(f"--random-model: {error}") from error
    layers = _layers(shape.pattern, random_architecture(shape).recurrent.label)
    description = f"built-in random hybrid model, {layers}, vocabulary of {shape.vocab_size} bytes, {dtype}"
    return ReadyModel(model, ByteTokenizer(shape.vocab_size), description, dtype)


def _loaded(directory: ModelDirectory, dtype: str | None, flags: WeightFlags) -> ReadyModel:
    loaded = load_weights(directory, dtype, flags, flag=directory.format.value)
    dtype = next(name for name, value in DTYPES.items() if value == loaded.model.config.params_dtype)
    try:
        tokenizer = load_tokenizer(loaded.directory, loaded.architecture.vocab_size)
        image_tokens = image_tokens_of(loaded.directory)
    except (ValueError, OSError) as error:
        raise UsageError(f"{directory.format.value}: {error}") from error
    return ReadyModel(
        loaded.model,
        tokenizer or TokenIdTokenizer(loaded.architecture.vocab_size, image_tokens),
        _description(directory, loaded, dtype),
        dtype,
        loaded.mtp,
    )


def _description(directory: ModelDirectory, loaded: LoadedModel, dtype: str) -> str:
    name = "the small model of Python source that ships" if directory.is_shipped else str(directory.path)
    count = sum(math.prod(whole.shape) for whole in parameters_of(loaded.architecture).values())
    kept = f", {loaded.num_kept:,} of which stay quantized" if loaded.num_kept else ""
    quantized = f" from {loaded.quantized}{kept}" if loaded.quantized else ""
    layers = _layers(loaded.architecture.pattern, loaded.architecture.recurrent.label)
    return (
        f"{name}, {layers}, {count:,} parameters, "
        f"vocabulary of {loaded.architecture.vocab_size} tokens, {dtype}{quantized}"
    )


def _layers(pattern: str, recurrent: str) -> str:
    """Return a layer pattern as text, followed by the meaning of its symbols."""
    names = {"M": recurrent, **_SYMBOLS}
    meanings = ", ".join(f"{symbol} {name}" for symbol, name in names.items() if symbol in pattern)
    return f"layers {pattern} ({meanings})"
