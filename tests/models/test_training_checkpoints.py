"""Checkpoints of Megatron-LM's training load bit for bit, by the run's arguments, or are refused with a remedy."""

import os
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import apply_factories
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, MetadataIndex

from megatron_mamba_cache.models.architecture import (
    AttentionSizes,
    ExpertsSizes,
    FeedForwardSizes,
    HybridArchitecture,
)
from megatron_mamba_cache.models.checkpoints.architecture_file import ARCHITECTURE_FILE, write_architecture
from megatron_mamba_cache.models.checkpoints.checkpoint_config import CheckpointConfig
from megatron_mamba_cache.models.checkpoints.checkpoint_writer import InProcessSaveStrategy, is_training_state
from megatron_mamba_cache.models.checkpoints.hugging_face import LoadedModel
from megatron_mamba_cache.models.checkpoints.megatron_arguments import architecture_of
from megatron_mamba_cache.models.checkpoints.megatron_checkpoint import load_megatron_checkpoint
from tests.models.served_run import full_sequence_logits
from tests.models.tensor_parallel_worker import assert_same_weights, some_prompts
from tests.models.training_checkpoints import (
    DENSE,
    EXPERTS,
    ITERATION,
    arguments_of,
    random_model,
    write_training_checkpoint,
)

GATED = replace(
    DENSE,
    pattern="*-M",
    attention=AttentionSizes(4, 4, 16, scale=None, rotary_base=500.0, rotary_percent=0.5),
    feed_forward=FeedForwardSizes(48, "silu", gated=True),
    tie_embeddings=True,
)
GATED_EXPERTS = replace(
    DENSE,
    pattern="M*E-",
    feed_forward=FeedForwardSizes(48, "silu", gated=True),
    experts=ExpertsSizes(4, 3, 24, 40, "softmax"),
)
LATENT_EXPERTS = replace(
    EXPERTS, pattern="EM*", experts=ExpertsSizes(9, 3, 24, 40, "sigmoid", 3, 1, num_scoring=3, latent_size=16)
)
NO_SHARED_EXPERT = replace(GATED_EXPERTS, experts=ExpertsSizes(4, 3, 24, None, "softmax"))
ARCHITECTURES = {
    "dense": DENSE,
    "gated": GATED,
    "experts": EXPERTS,
    "gated_experts": GATED_EXPERTS,
    "latent_experts": LATENT_EXPERTS,
    "no_shared_expert": NO_SHARED_EXPERT,
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """Write a training run with one checkpoint of the dense architecture."""
    model, run = random_model(DENSE), tmp_path_factory.mktemp("trained") / "run"
    write_training_checkpoint(model, DENSE, run)
    return LoadedModel(model, DENSE, run)


def refusal_of(directory: Path, **settings: Any) -> str:
    with pytest.raises(ValueError) as refusal:
        load_megatron_checkpoint(directory, torch.float32, **settings)
    return str(refusal.value)


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("singleton_experts", [False, True])
def test_training_checkpoint_loads_bit_identically_without_an_architecture_file(
    name: str, singleton_experts: bool, tmp_path: Path
) -> None:
    architecture = ARCHITECTURES[name]
    given = LoadedModel(random_model(architecture), architecture, tmp_path)
    write_training_checkpoint(given.model, architecture, tmp_path / "run", singleton_experts=singleton_experts)
    loaded = load_megatron_checkpoint(tmp_path / "run", torch.float32)
    assert loaded.architecture == architecture
    assert_same_weights(given, loaded)
    prompts = some_prompts(architecture.vocab_size)
    logits, expected = full_sequence_logits(loaded, prompts), full_sequence_logits(given, prompts)
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("singleton_experts", [False, True])
@pytest.mark.parametrize("architecture", [EXPERTS, GATED_EXPERTS], ids=["experts", "gated_experts"])
def test_stacked_experts_are_saved_as_the_same_shards_as_megatrons_experts(
    architecture: HybridArchitecture, singleton_experts: bool
) -> None:
    model, metadata = random_model(architecture), {"singleton_local_shards": singleton_experts}
    ours = model.decoder.layers[architecture.pattern.index("E")].mlp.experts
    spec = get_moe_module_spec(use_te=False, num_experts=ours.num_experts, moe_grouped_gemm=False)
    megatrons = MoELayer(model.config, spec.submodules).experts
    for expert, mlp in enumerate(megatrons.local_experts):
        mlp.linear_fc1.weight.data, mlp.linear_fc2.weight.data = ours.linear_fc1[expert], ours.linear_fc2[expert]
    parts = [experts.sharded_state_dict("experts.", (), metadata) for experts in (ours, megatrons)]
    written, expected = map(shards_of, parts)
    assert len(written) == ours.num_experts * (3 if architecture.feed_forward.gated else 2)
    assert written.keys() == expected.keys()
    for shard_key, tensor in written.items():
        assert torch.equal(tensor, expected[shard_key])


def shards_of(state: dict[str, Any]) -> dict[Any, Tensor]:
    """Return each shard's data by its key, global shape and offset."""
    apply_factories(state)
    tensors = [part for part in nested_values(state) if isinstance(part, ShardedTensor)]  # not of quantized training
    return {(part.key, part.global_shape, part.global_offset): part.data for part in tensors}


def test_only_the_gated_norm_ignores_the_configured_epsilon(
    trained: LoadedModel,
) -> None:
    layer = load_megatron_checkpoint(trained.directory, torch.float32).model.decoder.layers[0]
    assert (layer.norm.eps, layer.mixer.norm.eps) == (1e-4, 1e-5)


def test_norm_epsilon_is_read_under_its_newer_argument_name() -> None:
    fields = arguments_of(DENSE)
    fields["layernorm_epsilon"] = fields.pop("norm_epsilon")
    assert architecture_of(CheckpointConfig(fields, "common.pt")).norm_eps == DENSE.norm_eps != 1e-5


@pytest.mark.parametrize("name", ["apply_layernorm_1p", "layernorm_zero_centered_gamma"])
def test_zero_centered_norm_weights_are_refused(name: str) -> None:
    fields = arguments_of(DENSE) | {name: True}
    with pytest.raises(ValueError, match=f"{name}=True is not supported"):
        architecture_of(CheckpointConfig(fields, "common.pt"))


def test_weights_are_cast_to_the_requested_dtype(trained: LoadedModel) -> None:
    loaded = load_megatron_checkpoint(trained.directory, torch.bfloat16)
    weights = dict(loaded.model.named_parameters())
    for name, expected in trained.model.named_parameters():
        assert torch.equal(weights[name], expected.to(weights[name].dtype)), name
    assert loaded.model.output_layer.weight.dtype is torch.bfloat16


def test_directory_of_one_iteration_loads(trained: LoadedModel) -> None:
    iteration = trained.directory / f"iter_{ITERATION:07d}"
    assert_same_weights(trained, load_megatron_checkpoint(iteration, torch.float32))


def test_layer_pattern_derived_from_ratios_matches_the_training_run(tmp_path: Path) -> None:
    architecture = replace(DENSE, pattern="MM*-")
    given = LoadedModel(random_model(architecture), architecture, tmp_path)
    ratios = {"hybrid_override_pattern": None, "hybrid_attention_ratio": 0.25, "hybrid_mlp_ratio": 0.25}
    write_training_checkpoint(given.model, architecture, tmp_path / "run", **ratios)
    assert load_megatron_checkpoint(tmp_path / "run", torch.float32).architecture == architecture


@pytest.mark.parametrize(
    ("changed", "expected_message"),
    [
        ({"normalization": "LayerNorm"}, "args.normalization='LayerNorm' is not supported, only 'RMSNorm'"),
        ({"add_bias_linear": True}, "args.add_bias_linear=True is not supported"),
        ({"qk_layernorm": True}, "args.qk_layernorm=True is not supported"),
        ({"position_embedding_type": "learned_absolute"}, "args.position_embedding_type='learned_absolute'"),
        ({"position_embedding_type": "rope", "use_rope_scaling": True}, "args.use_rope_scaling=True"),
        ({"padded_vocab_size": None}, "'args.padded_vocab_size' is missing"),
        ({"hidden_size": "32"}, "args.hidden_size='32', but must be an integer"),
        ({"hybrid_override_pattern": None}, "hybrid_override_pattern is missing"),
        ({"hybrid_override_pattern": "M-E-M", "moe_router_pre_softmax": True}, "args.moe_router_pre_softmax=True"),
        ({"hybrid_override_pattern": "M-E-M", "moe_router_score_function": "sigmoid"}, "enable_expert_bias=False"),
    ],
    ids=str,
)
def test_arguments_of_an_unsupported_model_are_refused(
    changed: dict[str, Any], expected_message: str, tmp_path: Path
) -> None:
    directory = write_training_checkpoint(random_model(DENSE), DENSE, tmp_path / "run", **changed)
    refusal = refusal_of(tmp_path / "run")
    assert refusal.startswith(f"{directory / 'common.pt'}: ")
    assert expected_message in refusal
    assert f"write {ARCHITECTURE_FILE} next to the weights, or pass architecture=" in refusal


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"moe_router_load_balancing_type": "sinkhorn"}, "load_balancing_type='sinkhorn' is not supported, only"),
        ({"moe_router_load_balancing_type": ["aux_loss", "sinkhorn"]}, "has unknown entries ['sinkhorn']"),
        ({"moe_router_load_balancing_type": "else"}, "load_balancing_type='else' is not supported, only 'aux_loss'"),
        ({"moe_router_topk": 10}, "moe_router_topk=10 is not supported; it must be at most num_experts=9"),
        (
            {"moe_router_group_topk": 1},
            "moe_router_topk=7 is not supported; it must be at most 3, the number of experts that moe_router_group",
        ),
        (
            {"moe_router_topk": 2, "moe_router_group_topk": 3},
            "moe_router_group_topk=3, but must be an integer between 1 and 2",
        ),
        (
            {"hybrid_override_pattern": "-M*"},
            "moe_latent_size=16 is not supported without experts in the layer pattern ",
        ),
        ({"num_experts": 2**19}, "num_experts=524288, but must be an integer between 1 and 8192"),
    ],
    ids=str,
)
def test_error_for_an_unknown_router_type_names_the_argument(changed: dict[str, Any], message: str) -> None:
    fields = arguments_of(LATENT_EXPERTS) | {"moe_router_topk": 7, "moe_router_group_topk": None} | changed
    with pytest.raises(ValueError) as refusal:
        architecture_of(CheckpointConfig(fields, "common.pt"))
    assert message in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize("balancing", ["none", ["seq_aux_loss", "global_aux_loss"]])
def test_experts_have_one_group_when_no_group_count_is_given(balancing: str | list[str]) -> None:
    fields = arguments_of(LATENT_EXPERTS) | {"moe_router_group_topk": None, "moe_router_topk": 7}
    fields |= {"moe_router_load_balancing_type": balancing}
    experts = architecture_of(CheckpointConfig(fields, "common.pt")).experts
    assert experts is not None and (experts.num_groups, experts.top_groups, experts.top_k) == (1, 1, 7)


@pytest.mark.parametrize("state", [{}, {"args": None}, {"args": [1]}], ids=str)
def test_error_for_a_checkpoint_without_arguments_gives_the_remedies(state: dict[str, Any], tmp_path: Path) -> None:
    save_with_common_state(random_model(DENSE), state, tmp_path)
    refusal = refusal_of(tmp_path)
    assert f"{tmp_path / 'common.pt'} does not contain the arguments" in refusal
    assert f"write {ARCHITECTURE_FILE} next to the weights, or pass architecture=" in refusal
    assert load_megatron_checkpoint(tmp_path, torch.float32, architecture=DENSE).architecture == DENSE
    write_architecture(DENSE, tmp_path)
    assert load_megatron_checkpoint(tmp_path, torch.float32).architecture == DENSE


def save_with_common_state(model: Any, state: dict[str, Any], directory: Path) -> None:
    dist_checkpointing.save({**model.sharded_state_dict(), **state}, str(directory), InProcessSaveStrategy())


def test_architecture_file_overrides_training_arguments(tmp_path: Path) -> None:
    given = LoadedModel(random_model(DENSE), DENSE, tmp_path / "run")
    write_training_checkpoint(given.model, DENSE, tmp_path / "run", normalization="LayerNorm")
    write_architecture(DENSE, tmp_path / "run")  # next to the tracker it serves all iterations
    assert_same_weights(given, load_megatron_checkpoint(tmp_path / "run", torch.float32))


def test_error_names_unexpected_tensors(trained: LoadedModel) -> None:
    smaller = replace(DENSE, pattern="M-*-")
    refusal = refusal_of(trained.directory, architecture=smaller)
    assert "decoder.layers.4.mixer.A_log" in refusal
    assert "which the model that the given architecture describes does not have" in refusal
    assert "optimizer" not in refusal
    assert "_extra_state" not in refusal


def test_error_names_missing_tensors(trained: LoadedModel) -> None:
    refusal = refusal_of(trained.directory, architecture=replace(DENSE, pattern="M-*-M-"))
    assert "lacks 3 tensors: decoder.layers.5.mlp.linear_fc1.weight" in refusal
    assert "decoder.layers.5.pre_mlp_layernorm.weight" in refusal


def test_mtp_weights_do_not_replace_a_missing_output_layer(tmp_path: Path) -> None:
    model = random_model(DENSE)
    state = model.sharded_state_dict()
    state["output_layer.weight"].key = "mtp.layers.0.weight"
    dist_checkpointing.save(state, str(tmp_path), InProcessSaveStrategy())
    refusal = refusal_of(tmp_path, architecture=DENSE)
    assert "output_layer.weight" in refusal
    assert "mtp.layers.0.weight" in refusal


@pytest.mark.parametrize("vocab_size", [64, 256])
def test_wrong_embedding_size_is_refused_instead_of_padded(vocab_size: int, trained: LoadedModel) -> None:
    refusal = refusal_of(trained.directory, architecture=replace(DENSE, vocab_size=vocab_size))
    assert "embedding.word_embeddings.weight has shape (128, 32), but the model" in refusal
    assert f"has ({vocab_size}, 32)" in refusal


@pytest.mark.parametrize("named", ["", "latest", "-3", "7", "9" * 20])
def test_tracker_file_without_an_iteration_is_refused(named: str, tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(named)
    expected = str(tmp_path / "iter_0000007") if named == "7" else f"contains {named!r}"
    assert expected in refusal_of(tmp_path)


def test_tracker_file_of_a_release_checkpoint_is_read(trained: LoadedModel, tmp_path: Path) -> None:
    (tmp_path / "release").symlink_to(trained.directory / f"iter_{ITERATION:07d}")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release\n")
    assert_same_weights(trained, load_megatron_checkpoint(tmp_path, torch.float32))


class Dangerous:
    """Runs a function when it is unpickled without protection."""

    def __init__(self, function: Any, argument: str) -> None:
        self._call = function, (argument,)

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return self._call


@pytest.mark.parametrize("function", [os.system, eval], ids=str)
def test_reading_the_common_state_runs_no_code(function: Any, tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    argument = f"touch {witness}" if function is os.system else f"open({str(witness)!r}, 'w')"
    model = random_model(DENSE)
    directory = write_training_checkpoint(model, DENSE, tmp_path / "run", hook=Dangerous(function, argument))
    try:
        load_megatron_checkpoint(directory, torch.float32)
    except ValueError as refusal:  # torch refuses some modules whatever stands in for them
        assert f"{directory / 'common.pt'} cannot be read" in str(refusal)
    assert not witness.exists()


@pytest.mark.parametrize("keeps_the_index", [False, True])
def test_reading_the_tensor_index_runs_no_code(keeps_the_index: bool, trained: LoadedModel, tmp_path: Path) -> None:
    run, witness = tmp_path / "run", tmp_path / "witness"
    shutil.copytree(trained.directory, run)
    (index_file,) = run.rglob(".metadata")
    dangerous: Any = Dangerous(os.system, f"touch {witness}")
    if keeps_the_index:
        index = pickle.loads(index_file.read_bytes())
        index.planner_data = (index.planner_data, dangerous)
        dangerous = index
    index_file.write_bytes(pickle.dumps(dangerous))
    assert f"{index_file} cannot be read: a tensor index must not refer to posix.system" in refusal_of(run)
    assert not witness.exists()


def test_an_index_that_python_3_11_2_wrote_is_read(
    trained: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained.directory, run)
    (index_file,) = run.rglob(".metadata")
    index = pickle.loads(index_file.read_bytes())
    with monkeypatch.context() as patch:
        patch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", lambda self, _: (getattr, (type(self), self.name)))
        index_file.write_bytes(pickle.dumps(index))
    assert b"getattr" in index_file.read_bytes()
    load_megatron_checkpoint(run, torch.float32)
    index.planner_data = AttributeOfClass()
    index_file.write_bytes(pickle.dumps(index))
    assert "a tensor index must not refer to an attribute of anything but an enum" in refusal_of(run)


class AttributeOfClass:
    """Is pickled as an attribute of a class that is not an enum."""

    def __reduce__(self) -> tuple[Any, tuple[type, str]]:
        return getattr, (MetadataIndex, "__init__")


def test_error_names_a_training_argument_that_is_a_tensor(tmp_path: Path) -> None:
    arguments = {"add_bias_linear": torch.zeros(2)}
    directory = write_training_checkpoint(random_model(DENSE), DENSE, tmp_path / "run", **arguments)
    assert "add_bias_linear" in refusal_of(directory)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("optimizer.state.exp_avg.decoder.layers.0.mixer.D", True),
        ("optimizer.distributed.dp_group_idx_0.param_state/shard_0_1", True),
        ("chained_0.optimizer.state.fp32_param.output_layer.weight", True),
        ("rng_state/shard_0.0_1.1", True),
        ("rerun_state_machine_state/shard_0_1", True),
        ("decoder.layers.0.mixer.in_proj._extra_state/shard_0_1", True),
        ("decoder.layers.1.mlp.experts.experts.linear_fc1._extra_state3/shard_0_1", True),
        ("decoder.layers.0.mixer.D", False),
        ("mtp.layers.0.weight", False),
        ("chained_0.weight", False),
        ("optimizers_choice.weight", False),
        ("rng_states.weight", False),
    ],
)
def test_training_state_is_recognized_by_its_tensor_name(name: str, expected: bool) -> None:
    assert is_training_state(name) is expected
