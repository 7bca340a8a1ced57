"""Read the quantization formats that a Hugging Face model directory declares for its weights."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .checkpoint_config import TEXT_CONFIGS, CheckpointConfig, read_json_object
from .quantized_weights import MXFP4, MXFP8, NVFP4, Activations, WeightFormat, fp8

_TOOLS = {"awq": "AWQ", "gptq": "GPTQ", "bitsandbytes": "bitsandbytes", "fp8": "FP8", "fbgemm_fp8": "FP8"}
_FIELDS_OF_TOOLS = {"load_in_4bit": "bitsandbytes", "load_in_8bit": "bitsandbytes", "w_bit": "awq", "desc_act": "gptq"}


def kind_of(found: Any) -> str:
    """Return a quantization's number format and tool, as far as they are known, as text such as "NVFP4 (modelopt)"."""
    if not isinstance(found, Mapping):
        return repr(found)
    producer, inner = found.get("producer"), found.get("quantization")
    details = inner if isinstance(inner, Mapping) else found
    tool = details.get("quant_method") or (producer.get("name") if isinstance(producer, Mapping) else None)
    if not tool:  # older versions of some tools did not write the tool's name, but have tool-specific fields
        tool = next((named for field, named in _FIELDS_OF_TOOLS.items() if field in details), "")
    tool = str(tool)
    tool = _TOOLS.get(tool.lower(), tool)
    number_format = _format_of(details)
    if number_format and tool and tool.upper() != number_format:
        return f"{number_format} ({tool})"
    return number_format or tool or "an unknown kind"


def _format_of(details: Mapping[str, Any]) -> str:
    if algorithm := details.get("quant_algo"):
        return str(algorithm).upper()
    if "nvfp4" in str(details.get("format")).lower():
        return "NVFP4"
    for weights in _group_weights(details):
        kind = "FP" if weights.get("type") == "float" else "INT"
        return f"{kind}{weights.get('num_bits', '')}"
    for name in ("bits", "w_bit"):
        if type(details.get(name)) is int:
            return f"{details[name]}-bit"
    for name, number_format in (("load_in_4bit", "4-bit"), ("load_in_8bit", "8-bit")):
        if details.get(name) is True:
            return number_format
    method = str(details.get("quant_method", "")).lower()
    if method in ("mxfp4", "nvfp4", "mxfp8"):
        return method.upper()
    return "FP8 KV cache" if details.get("kv_cache_quant_algo") or details.get("kv_cache_scheme") else ""


def _group_weights(details: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the `weights` objects in the `config_groups` that compressed-tensors writes."""
    groups = details.get("config_groups")
    each = groups.values() if isinstance(groups, Mapping) else ()
    found = [group.get("weights") for group in each if isinstance(group, Mapping)]
    return [weights for weights in found if isinstance(weights, Mapping)]


_ADVICE = "this quantization is not supported: give an FP8, NVFP4, MXFP4 or BF16 checkpoint of the same model instead"
_FIELDS = ("quantization_config", "compression_config")
_MODELOPT_FILE = "hf_quant_config.json"
_FILES_OF_INTEGERS = ("quantize_config.json", "quant_config.json")
_BLOCK = 128

_ALGORITHMS = {
    "FP8": fp8(None, None, "static"),
    "FP8_PER_CHANNEL_PER_TOKEN": fp8(1, None, "dynamic"),
    "FP8_PB_WO": fp8(_BLOCK, _BLOCK),
    "FP8_PB_REAL": fp8(_BLOCK, _BLOCK, "dynamic"),
    "MXFP8": MXFP8,
    "NVFP4": NVFP4,
    "W4A16_NVFP4": NVFP4,
    "W4A8_NVFP4_FP8": NVFP4,
    "MXFP4": MXFP4,
    "W4A8_MXFP4_FP8": MXFP4,
}
"""Value of modelopt's `quant_algo`, in upper case → weight format."""
_MIXED = "MIXED_PRECISION"
_LAYOUTS = (
    "float-quantized",
    "naive-quantized",
    "mxfp8-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mixed-precision",
    "dense",
)
"""Supported values of the `format` field of compressed-tensors."""


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """Quantization formats that a checkpoint directory declares.

    Attributes:
        source: The file that declares the formats.
        formats: Formats in which weights may be stored; empty if only activations or the KV cache are quantized.
    """

    source: Path
    formats: tuple[WeightFormat, ...]

    @staticmethod
    def read(directory: Path) -> "QuantizationConfig | None":
        """Read the quantization formats that a model directory declares; return None if it declares none.

        Raises:
            ValueError: If the quantization is not supported; the message names file, field and value.
        """
        for path in (directory / name for name in _FILES_OF_INTEGERS):
            if path.is_file():
                raise ValueError(f"{path} declares {kind_of(read_json_object(path))}; {_ADVICE}")
        gguf = sorted(directory.glob("*.gguf"))
        if gguf and not any(directory.glob("*.safetensors")):
            raise ValueError(f"{gguf[0]} is a GGUF file; {_ADVICE}")
        config, of_modelopt = directory / "config.json", directory / _MODELOPT_FILE
        found: list[tuple[Path, tuple[WeightFormat, ...]]] = []
        for label, value in _described(read_json_object(config)):
            found.append((config, _formats(config, label, value)))
        if of_modelopt.is_file():
            found.append((of_modelopt, _formats(of_modelopt, "", read_json_object(of_modelopt))))
        if not found:
            return None
        return QuantizationConfig(found[0][0], tuple(dict.fromkeys(format for _, each in found for format in each)))

    def __str__(self) -> str:
        return ", ".join(format.name for format in self.formats) or "no quantized weights"


def _described(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the name and value of each field that describes a quantization, in `config` and its text configuration."""
    sections = {"": config, **{f"{name}.": config.get(name) for name in TEXT_CONFIGS}}
    for prefix, section in sections.items():
        for name in _FIELDS:
            if isinstance(section, Mapping) and (value := section.get(name)):
                yield f"{prefix}{name}", value


def _formats(source: Path, label: str, value: Any) -> tuple[WeightFormat, ...]:
    readers: dict[str, Callable[[CheckpointConfig], tuple[WeightFormat, ...]]] = {
        "fp8": _of_transformers,
        "modelopt": _of_modelopt,
        "compressed-tensors": _of_compressed_tensors,
        "mxfp4": lambda _: (MXFP4,),
    }
    reader = readers.get(_method(source, value))
    if reader is None or any(weights.get("type") == "int" for weights in _group_weights(value)):
        problem = f": {label}={kind_of(value)} is not supported" if label else f" declares {kind_of(value)}"
        raise ValueError(f"{source}{problem}; {_ADVICE}")
    inner = "quantization" if isinstance(value.get("quantization"), Mapping) else ""
    prefix = "".join(f"{part}." for part in (label, inner) if part)
    return reader(CheckpointConfig(value[inner] if inner else value, str(source), prefix))


def _method(source: Path, value: Any) -> str:
    """Return the name of the tool that wrote a quantization description; "" if `value` is not an object."""
    if not isinstance(value, Mapping):
        return ""
    producer, inner = value.get("producer"), value.get("quantization")
    method = value.get("quant_method") or (inner.get("quant_method") if isinstance(inner, Mapping) else None)
    if method is None and isinstance(producer, Mapping):
        method = producer.get("name")
    if method is None and source.name == _MODELOPT_FILE:
        return "modelopt"
    method = str(method).lower()
    return "modelopt" if method.startswith("modelopt") else method


def _of_transformers(fields: CheckpointConfig) -> tuple[WeightFormat, ...]:
    fields.one_of("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    fields.require("expert_dtype", "fp8", "fp8")
    fields.one_of("scale_fmt", ("float", "ue8m0"), "float")
    activations: Activations = "static" if fields.equals("activation_scheme", "static", "dynamic") else "dynamic"
    if not fields.has("weight_block_size"):
        # The default differs between tools, so the shape of the scales decides.
        return fp8(None, None, activations), fp8(_BLOCK, _BLOCK, activations)
    return (fp8(*fields.pair("weight_block_size"), activations),)


def _of_modelopt(fields: CheckpointConfig) -> tuple[WeightFormat, ...]:
    if not fields.has("quant_algo"):
        return _of_groups(fields) if fields.has("config_groups") else ()
    if fields.text("quant_algo").upper() != _MIXED:
        return (_of_algorithm(fields, (_MIXED,)),)
    if not fields.has("quantized_layers"):
        return _of_groups(fields)
    return tuple(dict.fromkeys(_of_algorithm(layer) for layer in fields.section("quantized_layers").sections()))


def _of_algorithm(fields: CheckpointConfig, others: tuple[str, ...] = ()) -> WeightFormat:
    algorithm = fields.text("quant_algo")
    if algorithm.upper() not in _ALGORITHMS:
        fields.one_of("quant_algo", (*_ALGORITHMS, *others))
    found = _ALGORITHMS[algorithm.upper()]
    if found.columns is not None:
        fields.one_of("group_size", (found.columns, 0), found.columns)
    return found


def _of_compressed_tensors(fields: CheckpointConfig) -> tuple[WeightFormat, ...]:
    layout = fields.one_of("format", _LAYOUTS, "dense")
    fields.section("sparsity_config").require("format", "dense", "dense")
    fields.require_empty("transform_config")
    return () if layout == "dense" else _of_groups(fields)


def _of_groups(fields: CheckpointConfig) -> tuple[WeightFormat, ...]:
    groups = fields.section("config_groups").sections()
    for group in groups:
        group.one_of("format", _LAYOUTS, "dense")
    return tuple(dict.fromkeys(_of_group(group) for group in groups if group.has("weights")))


def _of_group(group: CheckpointConfig) -> WeightFormat:
    """Return the weight format that a config group describes."""
    found = _of_weights(group.section("weights"))
    return replace(found, activations=_activations_of(group)) if found.name.startswith("FP8") else found


def _activations_of(group: CheckpointConfig) -> Activations:
    """Return how a config group quantizes activations; formats other than FP8 count as "none"."""
    fields = group.section("input_activations")
    is_float = fields.equals("num_bits", 8, None) and fields.equals("type", "float", "float")
    if not is_float:
        return "none"
    return "dynamic" if fields.equals("dynamic", True, False) else "static"


def _of_weights(fields: CheckpointConfig) -> WeightFormat:
    """Return the weight format that the `weights` object of a config group describes."""
    for name, allowed in (("type", "float"), ("symmetric", True), ("dynamic", False)):
        fields.require(name, allowed, allowed)
    num_bits = fields.one_of("num_bits", (8, 4))
    size = fields.one_of("group_size", (-1, 32) if num_bits == 8 else (16, 32), -1)
    if num_bits == 4:
        return {16: NVFP4, 32: MXFP4}[size]
    if size == 32:
        return MXFP8
    usual = "channel" if fields.has("group_size") else "tensor"
    strategy = fields.one_of("strategy", ("tensor", "channel", "block"), usual)
    if strategy == "block":
        return fp8(*fields.pair("block_structure"))
    return fp8(None, None) if strategy == "tensor" else fp8(1, None)
