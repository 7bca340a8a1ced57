"""Shapes and tensor-parallel splits of all parameters of a hybrid model, under Megatron's names."""

from dataclasses import dataclass

from .architecture import GatedDeltaSizes, HybridArchitecture, MambaSizes
from .placement import GroupedSplit, Split
from .rank_shard import EMBEDDINGS, OUTPUT


@dataclass(frozen=True, slots=True)
class WholeParameter:
    """Shape of a parameter in the undivided model, and its split over tensor-parallel ranks."""

    shape: tuple[int, ...]
    split: Split | GroupedSplit


Parameters = dict[str, WholeParameter]


def parameters_of(architecture: HybridArchitecture) -> Parameters:
    """Return all parameters by their names in a single-rank model, in the order of its `named_parameters`."""
    hidden, vocab = architecture.hidden_size, architecture.vocab_size
    layers = {"M": recurrent_parameters, "*": _attention, "-": _feed_forward, "E": _experts}
    found = {EMBEDDINGS: WholeParameter((vocab, hidden), Split(0))}
    for number, symbol in enumerate(architecture.pattern):
        of_layer = layers[symbol](architecture)
        found |= {f"decoder.layers.{number}.{name}": parameter for name, parameter in of_layer.items()}
    found["decoder.final_norm.weight"] = _on_every_rank(hidden)
    if not architecture.tie_embeddings:
        found[OUTPUT] = WholeParameter((vocab, hidden), Split(0))
    return found


def filled_of(architecture: HybridArchitecture) -> Parameters:
    """Return all tensors that a checkpoint fills: the parameters, and the selection biases of sigmoid routers."""
    experts = architecture.experts
    if experts is None or experts.score != "sigmoid":
        return parameters_of(architecture)
    layers = [number for number, symbol in enumerate(architecture.pattern) if symbol == "E"]
    bias = _on_every_rank(experts.num_experts)
    biases = {f"decoder.layers.{number}.mlp.router.expert_bias": bias for number in layers}
    return parameters_of(architecture) | biases


def recurrent_parameters(architecture: HybridArchitecture) -> Parameters:
    """Return the parameters of a recurrent layer, keyed by their names within the layer."""
    return (_mamba if isinstance(architecture.recurrent, MambaSizes) else _gated_delta)(architecture)


def _mamba(architecture: HybridArchitecture) -> Parameters:
    mamba, hidden = architecture.recurrent, architecture.hidden_size
    assert isinstance(mamba, MambaSizes)
    inner, bc, heads = mamba.num_heads * mamba.head_dim, mamba.num_groups * mamba.state_dim, mamba.num_heads
    projected, convolved = (inner, inner, bc, bc, heads), (inner, bc, bc)  # z, x, B, C, dt; x, B, C
    by_head = WholeParameter((heads,), Split(0))
    bias = {"mixer.conv1d.bias": WholeParameter((sum(convolved),), Split(0, convolved))} if mamba.conv_bias else {}
    return {
        "mixer.dt_bias": by_head,
        "mixer.A_log": by_head,
        "mixer.D": by_head,
        "mixer.in_proj.weight": WholeParameter((sum(projected), hidden), Split(0, projected)),
        "mixer.conv1d.weight": WholeParameter((sum(convolved), 1, mamba.d_conv), Split(0, convolved)),
        **bias,
        "mixer.out_proj.weight": WholeParameter((hidden, inner), Split(1)),
        "mixer.norm.weight": WholeParameter((inner,), Split(0)),
        "norm.weight": _on_every_rank(hidden),
    }


def _gated_delta(architecture: HybridArchitecture) -> Parameters:
    sizes, hidden = architecture.recurrent, architecture.hidden_size
    assert isinstance(sizes, GatedDeltaSizes)
    keys, heads = sizes.num_key_heads * sizes.key_head_dim, sizes.num_value_heads
    values = heads * sizes.value_head_dim
    projected, convolved = (keys, keys, values, values, heads, heads), (keys, keys, values)  # q, k, v, z, b, a; q, k, v
    by_head = WholeParameter((heads,), Split(0))
    return {
        "mixer.A_log": by_head,
        "mixer.dt_bias": by_head,
        "mixer.in_proj.weight": WholeParameter((sum(projected), hidden), Split(0, projected)),
        "mixer.out_proj.weight": WholeParameter((hidden, values), Split(1)),
        "mixer.conv1d.weight": WholeParameter((sum(convolved), 1, sizes.d_conv), Split(0, convolved)),
        "mixer.norm.weight": _on_every_rank(sizes.value_head_dim),
        "norm.weight": _on_every_rank(hidden),
    }


def _attention(architecture: HybridArchitecture) -> Parameters:
    attention, hidden = architecture.attention, architecture.hidden_size
    queries = attention.num_heads * attention.head_dim
    num_groups = attention.num_kv_heads  # each group: its queries, gates, key and value, in this order
    projected = (queries // num_groups,) * (2 if attention.has_output_gate else 1)
    rows = num_groups * (sum(projected) + 2 * attention.head_dim)
    head_norm = _on_every_rank(attention.head_dim)
    names = ("self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight")
    return {
        "input_layernorm.weight": _on_every_rank(hidden),
        "self_attention.linear_proj.weight": WholeParameter((hidden, queries), Split(1)),
        "self_attention.linear_qkv.weight": WholeParameter((rows, hidden), GroupedSplit(num_groups, projected)),
        **(dict.fromkeys(names, head_norm) if attention.has_head_norms else {}),
    }


def _feed_forward(architecture: HybridArchitecture) -> Parameters:
    shape = architecture.feed_forward
    norm = {"pre_mlp_layernorm.weight": _on_every_rank(architecture.hidden_size)}
    return norm | _mlp(architecture, "mlp.", shape.hidden_size, architecture.hidden_size)


def _experts(architecture: HybridArchitecture) -> Parameters:
    experts, hidden = architecture.experts, architecture.hidden_size
    assert experts is not None
    found = {
        "pre_mlp_layernorm.weight": _on_every_rank(hidden),
        "mlp.router.weight": _on_every_rank(experts.num_experts, hidden),
    }
    width = experts.latent_size or hidden
    for number in range(experts.num_experts):
        found |= _mlp(architecture, f"mlp.experts.local_experts.{number}.", experts.hidden_size, width)
    if experts.shared_hidden_size is not None:
        if experts.has_shared_gate:
            found["mlp.shared_experts.gate_weight"] = _on_every_rank(1, hidden)
        found |= _mlp(architecture, "mlp.shared_experts.", experts.shared_hidden_size, hidden)
    if experts.latent_size is None:
        return found
    return found | {
        "mlp.fc1_latent_proj.weight": _on_every_rank(width, hidden),
        "mlp.fc2_latent_proj.weight": _on_every_rank(hidden, width),
    }


def _mlp(architecture: HybridArchitecture, prefix: str, size: int, hidden: int) -> Parameters:
    halves = (size, size) if architecture.feed_forward.gated else (size,)
    return {
        f"{prefix}linear_fc1.weight": WholeParameter((sum(halves), hidden), Split(0, halves)),
        f"{prefix}linear_fc2.weight": WholeParameter((hidden, size), Split(1)),
    }


def _on_every_rank(*shape: int) -> WholeParameter:
    return WholeParameter(shape, Split())
