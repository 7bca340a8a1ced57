"""Refuse quantized checkpoints with an error that says how they are quantized and what to give instead."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .json_file import read_json_object

_ADVICE = "quantized checkpoints are not supported: give the BF16 checkpoint of the same model instead"
_FIELDS = ("quantization_config", "compression_config")
_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
_TOOLS = {"awq": "AWQ", "gptq": "GPTQ", "bitsandbytes": "bitsandbytes", "fp8": "FP8", "fbgemm_fp8": "FP8"}
_FIELDS_OF_TOOLS = {"load_in_4bit": "bitsandbytes", "load_in_8bit": "bitsandbytes", "w_bit": "awq", "desc_act": "gptq"}
_PLAIN_DTYPES = ("F64", "F32", "F16", "BF16")  # integers and narrower floats mean nothing without their scales
_DTYPES = {"F8_E4M3": "FP8", "F8_E5M2": "FP8", "F8_E8M0": "FP8 scales", "F4": "FP4", "U8": "packed NVFP4 or integers"}


def check_not_quantized(directory: Path) -> None:
    """Check that the files beside the weights of a Hugging Face directory do not describe quantized weights.

    Raises:
        ValueError: Naming the file and the kind of quantization, if they do.
    """
    config = directory / "config.json"
    fields = read_json_object(config)
    for name in _FIELDS:
        if found := fields.get(name):
            raise ValueError(f"{config}: {name}={_kind_of(found)} is not supported; {_ADVICE}")
    for path in (directory / name for name in _FILES):
        if path.is_file():
            raise ValueError(f"{path}: {_kind_of(read_json_object(path))}; {_ADVICE}")


def check_dtype(path: Path, name: str, dtype: str) -> None:
    """Raise `ValueError` if a tensor is of a type that only quantized checkpoints have."""
    if dtype not in _PLAIN_DTYPES:
        kind = f" ({_DTYPES[dtype]})" if dtype in _DTYPES else ""
        raise ValueError(f"{path}: tensor {name} is of type {dtype}{kind}, not {', '.join(_PLAIN_DTYPES)}; {_ADVICE}")


def _kind_of(found: Any) -> str:
    """Return number format and tool as far as known, such as "NVFP4 (modelopt)"."""
    if not isinstance(found, Mapping):
        return repr(found)
    producer, inner = found.get("producer"), found.get("quantization")
    details = inner if isinstance(inner, Mapping) else found
    tool = details.get("quant_method") or (producer.get("name") if isinstance(producer, Mapping) else None)
    tool = str(tool or _implied_tool(details))
    tool = _TOOLS.get(tool.lower(), tool)
    number_format = _format_of(details)
    if number_format and tool and tool.upper() != number_format:
        return f"{number_format} ({tool})"
    return number_format or tool or "an unknown kind"


def _implied_tool(details: Mapping[str, Any]) -> str:
    """Return the tool whose older versions wrote these fields but no name."""
    return next((tool for field, tool in _FIELDS_OF_TOOLS.items() if field in details), "")


def _format_of(details: Mapping[str, Any]) -> str:
    if algorithm := details.get("quant_algo"):
        return str(algorithm).upper()
    if "nvfp4" in str(details.get("format")).lower():
        return "NVFP4"
    if weights := _group_weights(details):
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


def _group_weights(details: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return how compressed-tensors says it stores the weights of the first group that has any; else nothing."""
    groups = details.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping):
            return weights
    return {}
