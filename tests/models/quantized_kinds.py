"""The quantization formats of published checkpoints, as `quantized_writer.Kind`."""

from dataclasses import replace
from typing import Any

from tests.models.quantized_writer import Kind, fp4, fp8

KEPT = "layers.1.|o_proj"
"""Pattern of the names that stay in bf16, if a checkpoint keeps some."""
_IGNORED = ["lm_head", "backbone.layers.1.mixer.up_proj", "re:.*o_proj"]


def _transformers(scale_type: str = "F32", block: tuple[int, int] | None = (128, 128)) -> Kind:
    rows, columns = block or (None, None)
    config = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": None if block is None else list(block),
        "modules_to_not_convert": _IGNORED,
    }
    encoder = fp8(rows, columns, scale_type, "_scale_inv", "grid" if block else "flat")
    return Kind(config, {"": encoder}, extra=() if block else (".activation_scale",))


def _without_field(kind: Kind, name: str) -> Kind:
    assert kind.config is not None
    return replace(kind, config={field: value for field, value in kind.config.items() if field != name})


def _modelopt(algorithm: str, encoder: Any, columns: int = 1, **fields: Any) -> Kind:
    config = {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": _IGNORED, **fields}
    return Kind(config, {"": encoder}, columns, extra=(".input_scale", ".k_scale", ".v_scale"))


def _modelopt_file(algorithm: str, encoder: Any, columns: int = 1, **fields: Any) -> Kind:
    quantization = {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8", "exclude_modules": _IGNORED, **fields}
    file = {"producer": {"name": "modelopt", "version": "0.33.0"}, "quantization": quantization}
    return Kind(None, {"": encoder}, columns, file, extra=(".input_scale", ".k_scale", ".v_scale"))


def _compressed(layout: str, encoder: Any, columns: int = 1, **weights: Any) -> Kind:
    group = {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, **weights},
        "input_activations": {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"},
        "format": layout,
    }
    config = {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "transform_config": {},
        "ignore": _IGNORED,
    }
    return Kind(config, {"": encoder}, columns)


def _mixed() -> Kind:
    """Experts in NVFP4 and the rest in FP8, as in Nemotron 3's files."""
    layers = {
        "backbone.layers.1.mixer.experts.0.up_proj": {"quant_algo": "NVFP4", "group_size": 16},
        "backbone.layers.0.mixer.in_proj": {"quant_algo": "FP8"},
    }
    quantization = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers, "exclude_modules": _IGNORED}
    encoders = {"experts": fp4(16, modelopt=True), "": fp8(None, None, shape="flat")}
    config = {"quant_method": "modelopt", **quantization}
    return Kind(config, encoders, 16, {"producer": {"name": "modelopt"}, "quantization": quantization})


def _mixed_groups() -> Kind:
    """Experts in NVFP4 and the rest in FP8, as compressed-tensors writes it."""
    four = _compressed("nvfp4-pack-quantized", None, num_bits=4, strategy="tensor_group", group_size=16)
    eight = _compressed("float-quantized", None, strategy="channel")
    assert four.config is not None and eight.config is not None
    groups = {"group_0": four.config["config_groups"]["group_0"] | {"targets": ["re:.*experts.*"]}}
    groups["group_1"] = eight.config["config_groups"]["group_0"]
    config = {**four.config, "format": "mixed-precision", "config_groups": groups}
    return Kind(config, {"experts": fp4(16), "": fp8(1, None, "BF16")}, 16)


_FOUR_BITS = {"num_bits": 4, "strategy": "tensor_group", "group_size": 16}

KINDS = {
    **{f"transformers {scale}": _transformers(scale) for scale in ("F32", "BF16", "F16", "F8_E8M0")},
    "transformers, edge blocks": _transformers(block=(20, 24)),
    "transformers, a tensor": _transformers(block=None),
    "transformers, usual blocks": _without_field(_transformers(), "weight_block_size"),
    "modelopt FP8": _modelopt("FP8", fp8(None, None, shape="flat")),
    "modelopt FP8 in a file": _modelopt_file("FP8", fp8(None, None, shape="flat")),
    "modelopt FP8_PB_WO": _modelopt("fp8_pb_wo", fp8(128, 128, shape="four")),
    "modelopt FP8 a row": _modelopt("FP8_PER_CHANNEL_PER_TOKEN", fp8(1, None, shape="flat")),
    "modelopt MXFP8": _modelopt("MXFP8", fp8(1, 32, "U8"), group_size=32),
    "modelopt NVFP4": _modelopt("NVFP4", fp4(16, modelopt=True), 16, group_size=16),
    "modelopt NVFP4 of a stack": replace(
        _modelopt("NVFP4", fp4(16, modelopt=True), 16), extra=("_input_scale",), stem="_weight"
    ),
    "modelopt NVFP4 in a file": _modelopt_file("W4A16_NVFP4", fp4(16, modelopt=True), 16, group_size=16),
    "modelopt MXFP4": _modelopt("W4A8_MXFP4_FP8", fp4(32, modelopt=True), 32, group_size=32),
    "modelopt mixed": _mixed(),
    "compressed-tensors FP8 a row": _compressed("float-quantized", fp8(1, None, "BF16"), strategy="channel"),
    "compressed-tensors FP8 a tensor": _compressed("float-quantized", fp8(None, None, "BF16", shape="grid")),
    "compressed-tensors FP8 in blocks": _compressed(
        "float-quantized", fp8(20, 24), strategy="block", block_structure=[20, 24]
    ),
    "compressed-tensors NVFP4": _compressed("nvfp4-pack-quantized", fp4(16), 16, **_FOUR_BITS),
    "compressed-tensors MXFP4": _compressed(
        "mxfp4-pack-quantized", fp4(32), 32, **_FOUR_BITS | {"strategy": "group", "group_size": 32}
    ),
    "compressed-tensors mixed": _mixed_groups(),
    "MXFP4 in blocks": Kind({"quant_method": "mxfp4"}, {"": fp4(32, blocks=True)}, 32),
}
