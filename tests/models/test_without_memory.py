"""A model built on the meta device has its usual names, shapes and dtypes."""

from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor

from megatron_mamba_cache.models.allocation import without_memory
from megatron_mamba_cache.models.hybrid_model import build_hybrid_model
from megatron_mamba_cache.models.random_hybrid import RandomHybridConfig, random_architecture
from tests.mcore.random_workloads import MODEL_FORMS

FORMS = [form for forms in MODEL_FORMS.values() for form in forms if "is_toy" not in form]


@pytest.mark.parametrize("form", FORMS, ids=[str(form["pattern"]) + str(len(form)) for form in FORMS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_model_built_on_meta_differs_only_in_its_device(form: dict[str, Any], dtype: torch.dtype) -> None:
    architecture = random_architecture(RandomHybridConfig(**form))

    def described() -> tuple[dict[str, Any], dict[str, Any], set[str]]:
        model = build_hybrid_model(architecture, dtype)
        state = {name: (value.shape, value.dtype) for name, value in model.state_dict().items() if value is not None}
        sharded = {
            name: (part.key, part.global_shape, part.global_offset, part.dtype)
            for name, part in model.sharded_state_dict().items()
            if isinstance(part, ShardedTensor)
        }
        return state, sharded, {tensor.device.type for tensor in (*model.parameters(), *model.buffers())}

    with without_memory():
        *found, devices = described()
    *expected, real_devices = described()
    assert devices == {"meta"} != real_devices and found == expected and len(found[0]) > 10 < len(found[1])


def test_tensors_are_not_created_on_meta_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), without_memory():
        assert torch.zeros(2).device.type == torch.zeros(2, device="cpu").to("cpu").device.type == "meta"
        assert torch.zeros(2).to(torch.int32).dtype is torch.int32
        raise ZeroDivisionError
    assert torch.zeros(2).tolist() == [0.0, 0.0]
