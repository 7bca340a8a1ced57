"""Check that a token can choose as many experts as a configuration says, with errors that name its fields."""

from dataclasses import dataclass

from ..architecture import ExpertsSizes
from .checkpoint_config import CheckpointConfig


@dataclass(frozen=True, slots=True)
class ChoiceFields:
    """What a configuration calls the numbers of `ExpertsSizes`; without groups, the names of theirs are empty."""

    num_experts: str
    top_k: str
    num_groups: str = ""
    top_groups: str = ""


def checked_choice(config: CheckpointConfig, experts: ExpertsSizes, fields: ChoiceFields) -> ExpertsSizes:
    """Return the sizes that were read from a configuration.

    Raises:
        ValueError: If they do not fit each other.
    """
    num_groups = experts.num_groups
    all_experts = config.shown(fields.num_experts, experts.num_experts)
    all_groups = config.shown(fields.num_groups, num_groups)
    if experts.num_experts % num_groups:
        raise config.error(f"{all_groups} is not supported, only divisors of {all_experts}")
    chosen_groups = config.shown(fields.top_groups, experts.top_groups)
    if experts.top_groups > num_groups:
        raise config.error(f"{chosen_groups} is not supported, only up to {all_groups}")
    in_reach = experts.top_groups * (experts.num_experts // num_groups)
    if experts.top_k > in_reach:
        limit = all_experts if num_groups == 1 else f"the {in_reach} experts of {chosen_groups}"
        raise config.error(f"{config.shown(fields.top_k, experts.top_k)} is not supported, only up to {limit}")
    return experts
