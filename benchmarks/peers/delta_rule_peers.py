"""Gated delta rule of fla-core and FlashInfer, for prompts and for single tokens, if these libraries are installed."""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor


class Peer(NamedTuple):
    """Functions of a library; None for a function that cannot be imported."""

    name: str
    prefill: Callable[..., Any] | None
    decode: Callable[..., Any] | None


def fla_peer() -> Peer:
    """Return the functions of fla-core."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
    except ImportError as error:
        print(f"fla-core cannot be imported: {error}")
        return Peer("fla-core", None, None)

    def prefill(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor | None, rows: int) -> Any:
        if cu_seqlens is None:
            packed = (t.unflatten(0, (rows, -1)) for t in (q, k, v, g, beta))
        else:
            packed = (t[None] for t in (q, k, v, g, beta))
        return chunk_gated_delta_rule(
            *packed, output_final_state=True, use_qk_l2norm_in_kernel=True, cu_seqlens=cu_seqlens
        )

    def decode(tokens: Any, gates: Any, state: Tensor) -> Any:
        q, k, v, b, a = (t[:, None] for t in (tokens.q, tokens.k, tokens.v, tokens.b, tokens.a))
        return fused_recurrent_gated_delta_rule(
            q, k, v, g=a, beta=b, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, A_log=gates.A_log, dt_bias=gates.dt_bias,
        )  # fmt: skip

    return Peer("fla-core", prefill, decode)


def flashinfer_peer() -> Peer:
    """Return the functions of FlashInfer, whose states are transposed."""
    try:
        from flashinfer.gdn_decode import gated_delta_rule_decode_pretranspose
        from flashinfer.gdn_prefill import chunk_gated_delta_rule
    except ImportError as error:
        print(f"FlashInfer cannot be imported: {error}")
        return Peer("FlashInfer", None, None)

    def prefill(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor, rows: int) -> Any:
        del rows
        return chunk_gated_delta_rule(
            q, k, v, g.exp(), beta, output_final_state=True, cu_seqlens=cu_seqlens, use_qk_l2norm_in_kernel=True
        )

    def decode(tokens: Any, gates: Any, state: Tensor) -> Any:
        q, k, v, b, a = (t[:, None] for t in (tokens.q, tokens.k, tokens.v, tokens.b, tokens.a))
        return gated_delta_rule_decode_pretranspose(q, k, v, state, gates.A_log, a, gates.dt_bias, b)

    return Peer("FlashInfer", prefill, decode)
