"""Name the quantization that a configuration describes."""

from collections.abc import Mapping
from typing import Any

_TOOLS = {"awq": "AWQ", "gptq": "GPTQ", "bitsandbytes": "bitsandbytes", "fp8": "FP8", "fbgemm_fp8": "FP8"}
_FIELDS_OF_TOOLS = {"load_in_4bit": "bitsandbytes", "load_in_8bit": "bitsandbytes", "w_bit": "awq", "desc_act": "gptq"}


def kind_of(found: Any) -> str:
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
