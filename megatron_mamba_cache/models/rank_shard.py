"""Determine which layers, experts, embeddings and output layer of a hybrid model are on a rank."""

import re
from dataclasses import dataclass

from megatron.core import parallel_state

from ..recurrences.model_shape import kv_heads_of_rank
from .architecture import HybridArchitecture

EMBEDDINGS = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"

_LAYER = re.compile(r"(?<=decoder\.layers\.)\d+(?=\.)")
_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+(?=\.)")
_OF_LAST_STAGE = ("decoder.final_norm.", "output_layer.")


def stage_lengths(num_layers: int, num_stages: int) -> list[int]:
    """Return the number of layers in each pipeline stage: the same for all but the last, which gets the remainder.

    Raises:
        ValueError: If there are fewer layers than stages.
    """
    if num_layers < num_stages:
        raise ValueError(
            f"each pipeline stage must have at least one layer, found {num_layers} layers and {num_stages} stages; "
            "choose a smaller --pipeline-model-parallel-size"
        )
    longest = -(-num_layers // num_stages)
    # The last stage also computes the logits, so it gets fewer layers.
    length = longest if (num_stages - 1) * longest < num_layers else longest - 1
    return [length] * (num_stages - 1) + [num_layers - (num_stages - 1) * length]


@dataclass(frozen=True, slots=True)
class RankShard:
    """The part of a model that is on one rank.

    Args:
        layers: Layers on this rank, numbered as in the whole model.
        experts: Experts on this rank in each MoE layer.
        is_tied: True if the output weights are tied to the embeddings; the last stage then has a copy of them.
    """

    layers: range
    experts: range
    is_first_stage: bool
    is_last_stage: bool
    is_tied: bool

    @staticmethod
    def of_process(architecture: HybridArchitecture) -> "RankShard":
        """Return the shard of this process according to Megatron's parallel state."""
        num_stages = parallel_state.get_pipeline_model_parallel_world_size()
        stage = parallel_state.get_pipeline_model_parallel_rank()
        lengths = stage_lengths(len(architecture.pattern), num_stages)
        first = sum(lengths[:stage])
        num_experts = architecture.experts.num_experts if architecture.experts else 0
        share = num_experts // parallel_state.get_expert_model_parallel_world_size()
        first_expert = share * parallel_state.get_expert_model_parallel_rank()
        return RankShard(
            layers=range(first, first + lengths[stage]),
            experts=range(first_expert, first_expert + share),
            is_first_stage=stage == 0,
            is_last_stage=stage == num_stages - 1,
            is_tied=architecture.tie_embeddings,
        )

    def local_name(self, name: str) -> str | None:
        """Return the name on this rank of a parameter of the whole model; None if the parameter is on another rank."""
        if name == EMBEDDINGS and not self.is_first_stage:
            return OUTPUT if self.is_last_stage and self.is_tied else None
        if name.startswith(_OF_LAST_STAGE) and not self.is_last_stage:
            return None
        for pattern, here in ((_LAYER, self.layers), (_EXPERT, self.experts)):
            if found := pattern.search(name):
                number = int(found[0])
                if number not in here:
                    return None
                name = f"{name[: found.start()]}{number - here.start}{name[found.end() :]}"
        return name


def check_ranks(architecture: HybridArchitecture) -> None:
    """Raise `ValueError` if the model cannot be split over the ranks that Megatron's parallel state describes."""
    size = parallel_state.get_tensor_model_parallel_world_size()
    if (context := parallel_state.get_context_parallel_world_size()) > 1:
        raise ValueError(
            f"context parallel size is {context}, but must be 1 because a recurrent state cannot be split over ranks"
        )
    if (for_experts := parallel_state.get_expert_tensor_parallel_world_size()) != size:
        raise ValueError(
            f"expert tensor parallel size is {for_experts}, but must equal the tensor parallel size {size}"
        )
    for name, count in _shared_out(architecture).items():
        if count % size:
            raise ValueError(
                f"{name} {count} is not divisible by {size} tensor-parallel ranks; choose a "
                "--tensor-model-parallel-size that divides it"
            )
    kv_heads_of_rank(architecture.attention.num_kv_heads, size)
    stage_lengths(len(architecture.pattern), parallel_state.get_pipeline_model_parallel_world_size())
    _check_expert_ranks(architecture, parallel_state.get_expert_model_parallel_world_size())


def _check_expert_ranks(architecture: HybridArchitecture, size: int) -> None:
    if size == 1:
        return
    if "E" not in architecture.pattern or architecture.experts is None:
        raise ValueError(
            f"expert parallel size is {size}, but the model has no experts; leave --expert-model-parallel-size at 1"
        )
    if architecture.experts.num_experts % size:
        raise ValueError(
            f"number of experts {architecture.experts.num_experts} (n_routed_experts, num_local_experts or "
            f"num_experts) is not divisible by {size} expert-parallel ranks; choose an --expert-model-parallel-size "
            "that divides it"
        )


def _shared_out(architecture: HybridArchitecture) -> dict[str, int]:
    """Return the dimensions that are divided among tensor-parallel ranks, keyed by their names in error messages."""
    attention, experts = architecture.attention, architecture.experts
    shared = {
        "vocab_size": architecture.vocab_size,
        **architecture.recurrent.divided,
        "number of attention heads": attention.num_heads,
    }
    if "-" in architecture.pattern:
        shared["feed-forward size"] = architecture.feed_forward.hidden_size
    if "E" in architecture.pattern and experts is not None:
        shared["expert size"] = experts.hidden_size
        if experts.shared_hidden_size is not None:
            shared["shared expert size"] = experts.shared_hidden_size
    return shared
