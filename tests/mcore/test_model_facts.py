"""A model's facts cover everything that decides its results, equally in every process."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from megatron_mamba_cache.mcore.model_reading import facts_of


@dataclass(frozen=True)
class Rule:
    top_k: int = 2


@dataclass
class Config:
    activation: Any = torch.tanh
    eps: float = 1e-5
    scratch: Any = field(default_factory=dict)


class Rotation(nn.Module):
    """Holds tensors that no checkpoint has."""

    def __init__(self, base: float) -> None:
        super().__init__()
        self.frequencies = base ** -torch.arange(4.0)
        self.register_buffer("scales", torch.full((2,), base), persistent=False)


class Model(nn.Module):
    def __init__(self, config: Config | None = None, base: float = 10.0, rule: Rule | None = None, **settings: Any):
        super().__init__()
        self.config = config or Config()
        self.rotation = Rotation(base)
        self.linear = nn.Linear(2, 2)
        self.rule = rule or Rule()
        self.limits = (0.0, float("inf"))
        for name, value in settings.items():
            setattr(self, name, value)


CHANGED: dict[str, Model] = {
    "field of the settings": Model(Config(eps=1e-6)),
    "function of the settings": Model(Config(activation=torch.sigmoid)),
    "tensor that is no weight": Model(base=11.0),
    "dataclass": Model(rule=Rule(3)),
    "tuple": Model(limits=(0.1, float("inf"))),
    "new attribute": Model(multiplier=2.0),
    "function": Model(activation=torch.relu),
}


@pytest.mark.parametrize("what", CHANGED)
def test_model_fingerprint_changes_with_anything_that_affects_tokens(what: str) -> None:
    assert facts_of(CHANGED[what]) != facts_of(Model())


def test_model_fingerprint_ignores_weights_ranks_and_scratch_values() -> None:
    experts = {"first_expert": 4, "local_expert_indices": [4, 5]}
    model = Model(tp_rank=1, tp_group=object(), ahead=(torch.ones(1), torch.ones(1)), **experts)
    with torch.no_grad():
        model.linear.weight += 1
    model.config.scratch["used"] = 1
    assert facts_of(model.eval()) == facts_of(Model())
