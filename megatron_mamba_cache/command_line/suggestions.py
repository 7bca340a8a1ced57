"""Suggestions for unknown flags: the nearest flag, or the counterpart of a flag of vLLM."""

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from types import MappingProxyType

_LEAST_LIKENESS = 0.65

VLLM_FLAGS: Mapping[str, str] = MappingProxyType(
    {
        "--gpu-memory-utilization": "use --memory-fraction, a share of the memory that the weights leave free",
        "--kv-cache-memory-bytes": "use --cache-gb, in GiB, for KV blocks and states together",
        "--max-num-seqs": "use --max-running-requests",
        "--max-num-batched-tokens": "use --max-tokens-per-step",
        "--tensor-parallel-size": "use torchrun --nproc-per-node N, and --tensor-model-parallel-size N",
        "--pipeline-parallel-size": "use torchrun --nproc-per-node N, and --pipeline-model-parallel-size N",
        "--data-parallel-size": "use torchrun --nproc-per-node N; processes that do not share a model are replicas",
        "--enable-expert-parallel": "use --expert-model-parallel-size N",
        "--enable-prefix-caching": "prefixes are cached by default, and --no-prefix-caching turns it off",
        "--no-enable-prefix-caching": "use --no-prefix-caching",
        "--enable-chunked-prefill": "long prompts are always computed in chunks of --max-tokens-per-step",
        "--enforce-eager": "use --cuda-graphs 0",
        "--cpu-offload-gb": "weights stay on the GPU; --host-cache-gb keeps cached prefixes in the host's memory",
        "--swap-space": "use --host-cache-gb, in GiB",
        "--kv-offloading-size": "use --host-cache-gb, in GiB",
        "--mamba-cache-dtype": "live SSM states are fp32, and --cached-state-dtype says how cached ones are stored",
        "--mamba-ssm-cache-dtype": "live SSM states are fp32, and --cached-state-dtype says how cached ones are stored",
        "--mamba-block-size": "use --block-size, for KV blocks and states",
        "--mamba-cache-mode": "states are always cached, at block boundaries that later prompts are likely to share",
        "--speculative-config": "use --num-speculative-tokens and --drafter",
        "--enable-auto-tool-choice": "tools are always on; --tool-call-parser is auto by default",
        "--allowed-origins": "use --cors-origin, once for each",
        "--uvicorn-log-level": "use --log-level",
        "--disable-uvicorn-access-log": "use --access-log off",
        "--disable-log-requests": "use --access-log off",
        "--enable-log-requests": "requests are logged by default, see --access-log",
        "--trust-remote-code": "code in a checkpoint's directory is never run",
        "--chat-template": "put the template into the model's directory as chat_template.jinja",
        "--tokenizer": "put the tokenizer's files into the model's directory",
        "--quantization": "a checkpoint's own configuration says how it is quantized",
        "--load-format": "use --hf-model, or --load for a checkpoint of Megatron",
        "--ssl-keyfile": "let a proxy in front of the server end TLS",
        "--ssl-certfile": "let a proxy in front of the server end TLS",
    }
)
"""Flags of `vllm serve`, and what to do instead."""


def unknown_flag(flag: str, known: Collection[str], command: str) -> str:
    """Return one line about a flag that a command does not have.

    Args:
        known: The command's own flags.
        command: With the name of the program.
    """
    advice = VLLM_FLAGS.get(flag.replace("_", "-"))
    if advice is not None:
        return f"unknown flag {flag}: {advice}"
    found = nearest(flag, known)
    if found is None:
        return f"unknown flag {flag}; {command} --help lists those that there are"
    return f"unknown flag {flag}: did you mean {found}?"


def nearest(name: str, known: Collection[str]) -> str | None:
    """Return the known name that is most like another one; None if none is."""
    longer = sorted((one for one in known if one.startswith(name)), key=len)
    alike = get_close_matches(name, sorted(known), n=1, cutoff=_LEAST_LIKENESS)
    return next(iter([*longer, *alike]), None)
