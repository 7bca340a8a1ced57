"""Check that the memory sizes that `serve` chooses fit the GPU, and measure its speed with them.

    PYTHONPATH=. python3 benchmarks/server_defaults.py [--shape 9b|tiny] [--flags "..." ...] [--card-gib G ...]

The script writes a Hugging Face checkpoint with random weights and starts `serve --hf-model DIRECTORY` without other
size flags. Over HTTP, it sends the heaviest loads that the server's limits allow: the maximum number of concurrent
requests, one prompt of nearly the maximum length, and sampled requests with log-probs. The log-probs must be numbers,
because greedy requests get some token even if all logits are NaN. The used GPU memory is monitored throughout.
"""

import argparse
import asyncio
import json
import math
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from load_8b import SHAPES
from loads.random_checkpoint import write_checkpoint
from measuring.machine import describe_machine

MODELS = {
    "9b": {
        "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
        "hidden_size": 4480,
        "vocab_size": 131_072,
        "intermediate_size": 15_680,
        "mamba_num_heads": 128,
        "mamba_head_dim": 80,
        "ssm_state_size": 128,
        "n_groups": 8,
        "chunk_size": 128,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
    },
    "tiny": SHAPES["tiny"].fields,
}
"""The sizes of NVIDIA-Nemotron-Nano-9B-v2, and small ones for a trial run on a CPU."""

_GENERATED = 128
_PROMPT = 1024
_START_S = 420


@dataclass(frozen=True, slots=True)
class Phase:
    """A load and its results.

    Args:
        gib_used: Peak memory in use on the GPU during the load, in GiB; 0 without a GPU.
    """

    name: str
    requests: int
    prompt_tokens: int
    generated_tokens: int
    seconds: float
    gib_used: float


@dataclass(frozen=True, slots=True)
class Run:
    """One server and its loads."""

    flags: str
    output: list[str]
    start_s: float
    phases: list[Phase]


class CardMemory:
    """Monitor of the peak memory in use on the first GPU since the last call to `take`."""

    def __init__(self) -> None:
        self._most = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def take(self) -> float:
        """Return the peak in GiB since the last call."""
        most, self._most = self._most, 0.0
        return most

    def _watch(self) -> None:
        command = ["nvidia-smi", "-i", "0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        while not self._stop.wait(0.2):
            try:
                used = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            except (OSError, subprocess.CalledProcessError):
                return
            self._most = max(self._most, float(used) / 1024)


@contextmanager
def card_of(gib: float) -> Iterator[None]:
    """Context manager that occupies GPU memory so that only `gib` GiB remain free; with 0, it occupies none."""
    held = torch.empty(0)
    if gib:
        free = torch.cuda.mem_get_info()[0]
        held = torch.empty(max(free - int(gib * 2**30), 0), dtype=torch.uint8, device="cuda")
    try:
        yield
    finally:
        del held
        torch.cuda.empty_cache()


@contextmanager
def serving(directory: Path, more: list[str]) -> Iterator[tuple[str, list[str], float]]:
    """Context manager that starts a server and yields its URL, its printed lines, and its start time in seconds."""
    began = time.monotonic()
    command = [sys.executable, "-m", "megatron_mamba_cache", "serve", "--port", "0", "--access-log", "off"]
    command += ["--hf-model", str(directory)]
    with subprocess.Popen([*command, *more], stdout=subprocess.PIPE, text=True) as process:
        lines: list[str] = []
        too_slow = threading.Timer(_START_S, process.kill)
        too_slow.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line.rstrip())
                if found := re.search(r"serving .* on (http://\S+)", line):
                    too_slow.cancel()
                    yield found[1], lines, time.monotonic() - began
                    return
            raise RuntimeError(f"serve must keep running, but it ended with status {process.wait()}")
        finally:
            too_slow.cancel()
            process.send_signal(signal.SIGTERM)


async def _run(url: str, prompts: list[list[int]], settings: dict[str, Any]) -> int:
    """Send all prompts concurrently; return the number of received tokens."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:

        async def one(prompt: list[int]) -> int:
            reply = await client.post("/v1/completions", json={"prompt": prompt, "ignore_eos": True, **settings})
            if reply.status_code != 200:
                raise RuntimeError(f"a completion request failed with status {reply.status_code}: {reply.text[:500]}")
            document = reply.json()
            log_probs = (document["choices"][0].get("logprobs") or {}).get("token_logprobs", [])
            if not all(math.isfinite(log_prob) for log_prob in log_probs):
                raise RuntimeError(f"log-probs must be finite numbers, found {log_probs[:8]} ...")
            return int(document["usage"]["completion_tokens"])

        return sum(await asyncio.gather(*map(one, prompts)))


def measure(url: str, limits: dict[str, int], vocab_size: int) -> list[Phase]:
    """Run the heaviest loads that the limits allow."""
    random, memory = np.random.default_rng(0), CardMemory()

    def phase(name: str, count: int, length: int, **settings: Any) -> Phase:
        prompts = random.integers(1, vocab_size, (count, length)).tolist()
        memory.take()
        began = time.monotonic()
        generated = asyncio.run(_run(url, prompts, settings))
        return Phase(name, count, count * length, generated, time.monotonic() - began, memory.take())

    rows, longest = limits["requests"], limits["length"]
    length = min(_PROMPT, longest // 4)
    greedy, sampled = {"temperature": 0}, {"temperature": 1.0, "top_p": 0.9, "seed": 1, "logprobs": 5}
    return [
        phase("greedy, one", 1, length, max_tokens=_GENERATED, **greedy),
        phase("greedy, all at once", rows, length, max_tokens=_GENERATED, **greedy),
        phase("sampled with log-probs, all at once", rows, length, max_tokens=_GENERATED, **sampled),
        phase("longest prompt", 1, longest - 16, max_tokens=8, **greedy),
    ]


def main() -> None:
    """Measure, then print the results as a table or as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=MODELS, default="9b", help="default: %(default)s")
    parser.add_argument("--flags", nargs="+", default=[""], help="additional flags of serve; one string per server")
    parser.add_argument(
        "--card-gib", nargs="+", type=float, default=[0.0], help="GiB of GPU memory that servers can use; 0: all"
    )
    parser.add_argument("--json", type=Path, help="also write the results to FILE")
    arguments = parser.parse_args()
    fields = MODELS[arguments.shape]
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), fields, 4 * 10**9, "cuda" if torch.cuda.is_available() else "cpu")
        torch.cuda.empty_cache()
        for card_gib, flags in product(arguments.card_gib, arguments.flags):
            with card_of(card_gib):
                runs.append(_served(Path(folder), flags, fields["vocab_size"]))
            _print_run(runs[-1])
    if arguments.json:
        figures = {"machine": describe_machine(), "runs": list(map(asdict, runs))}
        arguments.json.write_text(json.dumps(figures, indent=1))


def _served(directory: Path, flags: str, vocab_size: int) -> Run:
    with serving(directory, flags.split()) as (url, lines, start_s):
        output = " ".join(lines)
        limits = {
            "requests": int(re.search(r"up to (\d+) requests", output)[1]),  # type: ignore[index]
            "length": int(re.search(r"(\d+) tokens a request", output)[1]),  # type: ignore[index]
        }
        return Run(flags, lines, start_s, measure(url, limits, vocab_size))


def _print_run(run: Run) -> None:
    ready = f"ready after {run.start_s:.0f} s, the load of weights and graph capture included"
    print(*run.output, f"{run.flags or 'no more flags'}: {ready}\n", sep="\n")
    print("| load | requests | prompt tokens | generated tokens | seconds | tokens/s | peak GPU memory, GiB |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for one in run.phases:
        rate = one.generated_tokens / one.seconds
        print(
            f"| {one.name} | {one.requests} | {one.prompt_tokens:,} | {one.generated_tokens:,} | {one.seconds:.2f} "
            f"| {rate:,.0f} | {one.gib_used:.1f} |"
        )
    print(flush=True)


if __name__ == "__main__":
    main()
