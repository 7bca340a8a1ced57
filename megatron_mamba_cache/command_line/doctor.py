"""The doctor command: report what this machine and the installed packages support."""

import platform
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec
from pathlib import Path

from ..config import CacheConfig
from ..installation import EXTRAS, install_command, installed_version, unmet_requirements
from .model_choice import described_shape, has_shipped_model
from .quiet import quiet_libraries

_RECURRENCE = "recurrences.mamba2.recurrence"
_VERSIONS = ("torch", "triton", "megatron-core", "safetensors", "tokenizers")


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """The implementation that is used for an operation, and why it was chosen."""

    operation: str
    module: str
    functions: tuple[str, ...]  # functions in `module` that implement the operation
    reason: str


KERNELS = (
    KernelChoice(
        "attention", "step.memory", ("choose_attention",), "selects a backend that supports the KV blocks; see below"
    ),
    KernelChoice("KV append", "mcore.context", ("append_kv",), "Triton on CUDA, its torch twin on the CPU"),
    KernelChoice("conv", _RECURRENCE, ("causal_conv", "conv_verify"), "Triton on CUDA, torch twins on the CPU"),
    KernelChoice(
        "norm",
        "mcore.mixers.caching_mixer",
        ("gated_group_norm", "norm_and_gate"),
        "gated norms of the mixers: Triton on CUDA, its torch twin on the CPU; other norms are those of the model's "
        "spec (torch's in models that the command loads)",
    ),
    KernelChoice(
        "scan",
        _RECURRENCE,
        ("ssd_scan",),
        "Gluon on Hopper GPUs for bf16, otherwise Triton on CUDA; its torch twin on the CPU and for odd sizes",
    ),
    KernelChoice("decode update", _RECURRENCE, ("state_verify",), "Triton on CUDA, its torch twin on the CPU"),
    KernelChoice(
        "align copy",
        "recurrences.cached_form",
        ("align_copy",),
        "caches states at block boundaries reached in decode: Triton on CUDA, its torch twin on the CPU",
    ),
    KernelChoice(
        "quantized states",
        "recurrences.cached_form",
        ("restore_states",),
        "with --cached-state-dtype int8: Triton on CUDA, its torch twin on the CPU",
    ),
)

_UNUSED = {
    "mamba_ssm": "the scan and decoding run this package's kernels",
    "causal_conv1d": "the convolution runs this package's kernels",
    "transformer_engine": "by models that the command loads; your own spec may use its layers",
}

_USUAL_MODEL = "models in bfloat16 with 128 channels a head and KV blocks of 256 tokens"


def print_diagnosis(arguments: Namespace) -> int:
    """Print a report on this machine and the model; return 1 if the package or the model is unusable, otherwise 0."""
    with quiet_libraries(arguments.log_level):
        obstacle = _obstacle()
        for line in _diagnosis(obstacle):
            print(line)
        found = None if arguments.hf_model is None else _model(Path(arguments.hf_model))
    if found is not None:
        print(f"\nmodel              {found.line}")
    return 0 if obstacle is None and (found is None or found.can_be_used) else 1


@dataclass(frozen=True, slots=True)
class _Model:
    line: str
    can_be_used: bool


def _model(directory: Path) -> _Model:
    try:
        return _Model(_needs(directory), True)
    except Exception as error:  # a broken installation may raise any error
        return _Model(f"cannot be used: {_one_line(error)}", False)


def _needs(directory: Path) -> str:
    """Return a line about a model: its layers, maximum length, cache bytes and quantization."""
    architecture, shape = described_shape(directory)
    from ..models.checkpoints.quantization_config import QuantizationConfig  # imports torch

    state = shape.cached_layout(CacheConfig().resolved())
    quantization = QuantizationConfig.read(directory)
    quantized = f"; weights in {quantization}" if quantization is not None else ""
    return (
        f"{directory}: layers {architecture.pattern}, {architecture.max_sequence_length:,} positions, "
        f"recurrence's chunk of {shape.grain} tokens; {shape.block_bytes(1):,} bytes of KV a token and "
        f"{state.slot_bytes:,} bytes a state, all ranks together{quantized}"
    )


def _diagnosis(obstacle: str | None) -> Iterator[str]:
    yield f"device             {_device()}"
    yield f"python             {platform.python_version()}"
    for name in _VERSIONS:
        yield f"{name:<18} {installed_version(name) or 'not installed'}"
    yield f"this package       {'ready' if obstacle is None else f'cannot be used: {obstacle}'}"
    yield f"default model      {_default_model()}"
    yield "\nkernels in use (all other operations are plain torch)"
    for kernel in KERNELS:
        yield f"  {kernel.operation:<16} {', '.join(kernel.functions)}: {kernel.reason}"
    yield f"\ncache memory       {_cache_memory()}"
    yield f"tiers              {_tiers()}"
    yield f"compiled kernels   {_compiled_kernels()}"
    yield f"\nattention backends for {_USUAL_MODEL}; --attention-backend selects one, by default the first available"
    yield from _attention_backends()
    yield "\nextras"
    for name, purpose in EXTRAS.items():
        yield f"  {name:<18} {_extra_state(name, purpose)}"
    yield "\noptional packages"
    for name, reason in _UNUSED.items():
        yield f"  {name:<18} {_package_state(name, reason)}"
    yield f"  {'apex':<18} {_apex_state()}"


def _device() -> str:
    try:
        import torch
    except Exception as error:  # a broken installation may raise any error
        return f"unknown: torch cannot be imported ({_one_line(error)})"
    if not torch.cuda.is_available():
        return "cpu: torch finds no CUDA device"
    major, minor = torch.cuda.get_device_capability()
    return f"cuda: {torch.cuda.get_device_name()}, compute capability {major}.{minor}, CUDA {torch.version.cuda}"


def _obstacle() -> str | None:
    """Return the reason why this package cannot be used on this machine; None if it can be used."""
    try:
        import_module("..build", __package__)
        unmet = unmet_requirements()
    except PackageNotFoundError:
        return None  # not installed but run from a checkout, so its requirements are unknown
    except Exception as error:  # a broken installation may raise any error
        return _one_line(error)
    return f"it requires {', '.join(map(str, unmet))}" if unmet else None


def _extra_state(name: str, purpose: str) -> str:
    try:
        unmet = unmet_requirements(name)
    except PackageNotFoundError:
        return f"unknown: the package is not installed, only imported. For {purpose}"
    except Exception as error:  # a broken installation may raise any error
        return f"unknown: {_one_line(error)}"
    if not unmet:
        return f"present: {purpose}"
    return f"missing {', '.join(map(str, unmet))}; for {purpose}: {install_command(name)}"


def _compiled_kernels() -> str:
    try:
        directory = import_module("triton").knobs.cache.dir
    except Exception as error:  # a broken installation may raise any error
        return f"unknown: Triton cannot be imported ({_one_line(error)})"
    return f"Triton compiles each at its first use or in engine.warmup(), and stores it in {directory}"


def _cache_memory() -> str:
    budget = (
        "--cache-gb G gives KV blocks and live, draft and cached states one budget of G GiB; --kv-gb and "
        "--state-gb add up to it. --cached-state-dtype int8 quantizes cached states to 8 bits, about a quarter of "
        "float32's bytes. A running server shows its use in /metrics (mamba_cache_cache_bytes) and at /dashboard"
    )
    try:
        import torch

        if torch.cuda.is_available():
            free, total = (num_bytes / 2**30 for num_bytes in torch.cuda.mem_get_info())
            return f"{free:.1f} of the GPU's {total:.1f} GiB are free now. {budget}"
    except Exception as error:  # a broken installation may raise any error
        return f"unknown: {_one_line(error)}"
    return budget


def _tiers() -> str:
    flags = (
        "--host-cache-gb G offloads prefixes to G GiB of it, and --disk-cache-dir DIR, with --disk-cache-gb G, to "
        "files in DIR"
    )
    try:
        available = import_module("..tiers.host_budget", __package__).available_bytes() / 2**30
        return f"{available:.1f} GiB of host memory are available now, {_pinning()}. {flags}"
    except Exception as error:  # a broken installation may raise any error
        return f"unknown: {_one_line(error)}. {flags}"


def _pinning() -> str:
    import torch

    if not torch.cuda.is_available():
        return "not pinned: torch finds no CUDA device"
    try:
        torch.empty(1, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        return f"but cannot be pinned ({_one_line(error)})"
    return "and can be pinned"


def _attention_backends() -> Iterator[str]:
    try:
        choice = import_module("..kernels.attention.choice", __package__)
        refusals = choice.refusals_for_usual_model()
    except Exception as error:  # a broken installation may raise any error
        yield f"  unknown: {_one_line(error)}"
        return
    used = next(name for name, reason in refusals.items() if reason is None)
    for name, reason in refusals.items():
        state = "in use" if name == used else "could be used" if reason is None else f"no: {reason}"
        if name == "flashinfer" and reason is None:
            origin = import_module("..kernels.attention.flashinfer_compiler", __package__).origin_of_kernels()
            state = f"{state}, {installed_version('flashinfer-python') or 'release unknown'}; {origin}"
        yield f"  {name:<16} {state}"


def _default_model() -> str:
    if has_shipped_model():
        return "the small model of Python source that ships; --random-model builds one with random weights"
    return "random weights; the trained model is not part of this installation"


def _package_state(name: str, reason: str) -> str:
    if not _is_installed(name):
        return "not installed; not needed"
    return f"{installed_version(name) or 'installed'}, not used: {reason}"


def _apex_state() -> str:
    if not _is_installed("apex"):
        return "not installed; not needed"
    found = installed_version("apex") or "installed"
    try:
        is_nvidia = hasattr(import_module("apex.normalization"), "FusedRMSNorm")
    except Exception:  # the package may belong to another project, or be a broken build
        is_nvidia = False
    if is_nvidia:
        return f"{found}, not used: norms are torch's"
    return (
        f"{found}, but not NVIDIA's: it has no apex.normalization.FusedRMSNorm. megatron-core takes any `apex` for "
        "NVIDIA's, but the one on PyPI is another project: pip uninstall apex"
    )


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
