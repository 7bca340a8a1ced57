"""Train the small model of Python source that ships with the package, with plain transformers.

The text is the standard library of the running CPython, or the folder given by --stdlib.
"""

import argparse
import math
import platform
import shlex
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from measure_bits_per_byte import (
    PARTS,
    Source,
    installed_library,
    library_part,
    library_sources,
    library_version,
    measure,
)
from small_model_card import model_card
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.optim import AdamW
from transformers import NemotronHConfig, NemotronHForCausalLM, PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
LAYER_TYPES = {"M": "linear_attention", "*": "full_attention", "-": "mlp"}
DROPPED_OUT = ("embeddings", "out_proj", "o_proj", "down_proj")  # outputs that are added to the residual stream
PROGRESS_SECONDS = 10.0
WARM_UP = 0.02  # of the training time


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a run; each field is a flag.

    Args:
        seconds: Training time, measured from the end of the first step.
        pattern: One symbol per layer: M Mamba, * attention, - MLP.
        sequence_length: Tokens in a training window, and the model's maximum context.
    """

    seconds: float = 420.0
    seed: int = 0
    pattern: str = "M-M*-M-M*-M-M*-"
    vocabulary: int = 2048
    hidden_size: int = 192
    mlp_size: int = 512
    mamba_heads: int = 12
    mamba_head_dim: int = 32
    state_size: int = 64
    groups: int = 2
    attention_heads: int = 6
    key_value_heads: int = 2
    attention_head_dim: int = 32
    sequence_length: int = 4096
    batch_size: int = 8
    learning_rate: float = 3e-3
    weight_decay: float = 0.1
    dropout: float = 0.1


@dataclass(frozen=True, slots=True)
class Outcome:
    """Counts of a finished training loop."""

    steps: int
    tokens: int
    epochs: float


def main() -> None:
    """Train, save and score a model, and write its card."""
    flags = _parse_flags()
    settings = settings_of(flags, Settings)
    torch.manual_seed(settings.seed)
    sources = [source for source in library_sources(flags.stdlib) if source.part == "training"]
    tokenizer = train_tokenizer(sources, settings.vocabulary)
    text = TrainingText(sources, tokenizer, settings, flags.device)
    model = build_model(settings, tokenizer).to(flags.device)
    print(f"{text.files} files, {text.tokens:,} tokens; {model.num_parameters():,} parameters", flush=True)
    if flags.compile:
        for block in model.model.layers:
            block.compile()
    outcome = train(model, text, settings)

    model.to(torch.bfloat16).save_pretrained(flags.output)
    tokenizer.save_pretrained(flags.output)
    saved = NemotronHForCausalLM.from_pretrained(flags.output, dtype=torch.float32).to(flags.device).eval()
    scores = {part: measure(saved, tokenizer, library_part(flags.stdlib, part)) for part in PARTS}
    facts = _run_facts(flags, settings) | text.facts | asdict(outcome) | {"parameters": model.num_parameters()}
    (flags.output / "README.md").write_text(model_card(facts, scores), encoding="utf-8")
    print(
        f"{outcome.steps} steps, {outcome.tokens:,} tokens, {outcome.epochs:.1f} epochs; bits per byte: "
        + ", ".join(f"{part} {score.bits_per_byte:.4f}" for part, score in scores.items())
    )


def train_tokenizer(sources: list[Source], vocabulary: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer; indentation is one token, and decoding returns the exact bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((source.document for source in sources), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


def build_model(settings: Settings, tokenizer: PreTrainedTokenizerFast) -> NemotronHForCausalLM:
    """Build the model in fp32 with fresh weights; A is 1, 2, 3 ... and dt between 1e-3 and 1e-1."""
    config = NemotronHConfig(
        vocab_size=settings.vocabulary,
        hidden_size=settings.hidden_size,
        layers_block_type=[LAYER_TYPES[symbol] for symbol in settings.pattern],
        intermediate_size=settings.mlp_size,
        num_attention_heads=settings.attention_heads,
        num_key_value_heads=settings.key_value_heads,
        head_dim=settings.attention_head_dim,
        mamba_num_heads=settings.mamba_heads,
        mamba_head_dim=settings.mamba_head_dim,
        ssm_state_size=settings.state_size,
        n_groups=settings.groups,
        chunk_size=64,
        conv_kernel=4,
        max_position_embeddings=settings.sequence_length,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = NemotronHForCausalLM(config)
    # transformers clamps dt at time_step_min in prefill but not in decode; at zero both agree. Set it only after the
    # weights are initialized, which takes its logarithm.
    config.time_step_min = 0.0
    for block in model.model.layers:
        if block.block_type == "linear_attention":
            block.mixer.time_step_limit = (0.0, math.inf)
    return model


class TrainingText:
    """The documents as token ids, split into windows; order and cuts change every epoch."""

    def __init__(
        self, sources: list[Source], tokenizer: PreTrainedTokenizerFast, settings: Settings, device: str
    ) -> None:
        encoded = tokenizer([source.document for source in sources], add_special_tokens=False)["input_ids"]
        self._documents = [torch.tensor([tokenizer.bos_token_id, *ids], device=device) for ids in encoded]
        self._settings = settings
        self.files = len(sources)
        self.size_bytes = sum(len(source.document.encode()) for source in sources)
        self.tokens = sum(len(document) for document in self._documents)

    @property
    def facts(self) -> dict[str, int]:
        """Return the facts of the text for the model card."""
        return {"files": self.files, "size_bytes": self.size_bytes, "text_tokens": self.tokens}

    def batches(self) -> Iterator[Tensor]:
        """Yield [batch, sequence + 1] token ids indefinitely."""
        generator = torch.Generator().manual_seed(self._settings.seed)
        windows = self._epoch(generator)
        while True:
            while len(windows) < self._settings.batch_size:
                windows = torch.cat([windows, self._epoch(generator)])
            yield windows[: self._settings.batch_size]
            windows = windows[self._settings.batch_size :]

    def _epoch(self, generator: torch.Generator) -> Tensor:
        length = self._settings.sequence_length + 1
        order = torch.randperm(len(self._documents), generator=generator).tolist()
        skipped = int(torch.randint(length, (1,), generator=generator))
        stream = torch.cat([self._documents[index] for index in order])[skipped:]
        windows = stream[: len(stream) // length * length].view(-1, length)
        return windows[torch.randperm(len(windows), generator=generator).to(windows.device)]


def train(model: NemotronHForCausalLM, text: TrainingText, settings: Settings) -> Outcome:
    """Train in place for the given time; the learning rate follows a cosine over that time."""
    torch.set_float32_matmul_precision("high")
    optimizer = optimizer_of(model, settings.learning_rate, settings.weight_decay)
    hooks = _add_dropout(model, settings.dropout)
    batches = text.batches()
    model.train()
    _step(model, optimizer, next(batches), 0.0)  # compiles and warms up; at rate 0 it changes no weight
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    steps, begin, reported = 0, time.monotonic(), 0.0
    while (elapsed := time.monotonic() - begin) < settings.seconds:
        rate = settings.learning_rate * rate_share(elapsed / settings.seconds)
        loss = _step(model, optimizer, next(batches), rate)
        steps += 1
        if elapsed - reported >= PROGRESS_SECONDS:
            reported = elapsed
            bits = loss.item() / math.log(2)  # the only sync with the device
            tokens = steps * settings.batch_size * settings.sequence_length
            print(f"{elapsed:4.0f} s  step {steps}  {tokens / 1e6:.1f} M tokens  {bits:.3f} bits/token", flush=True)
    for hook in hooks:
        hook.remove()
    torch.set_float32_matmul_precision("highest")
    tokens = steps * settings.batch_size * settings.sequence_length
    return Outcome(steps, tokens, tokens / text.tokens)


def optimizer_of(model: nn.Module, learning_rate: float, weight_decay: float) -> AdamW:
    """Apply weight decay to matrices only: not to norms, convolutions, A, D or the bias of dt."""
    decayed = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim != 2]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), fused=True)


def rate_share(done: float) -> float:
    """Return the fraction of the peak learning rate to use after the fraction `done` of the time."""
    if done < WARM_UP:
        return done / WARM_UP
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (done - WARM_UP) / (1 - WARM_UP))))


def _add_dropout(model: nn.Module, share: float) -> list[torch.utils.hooks.RemovableHandle]:
    """Add dropout to the outputs that join the residual stream; the architecture has no setting for it."""

    def drop(_module: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return nn.functional.dropout(output, share)

    targets = [module for name, module in model.named_modules() if name.endswith(DROPPED_OUT)]
    return [target.register_forward_hook(drop) for target in targets]


def _step(model: nn.Module, optimizer: AdamW, batch: Tensor, rate: float) -> Tensor:
    """Take one optimizer step in place and return the batch's loss before it, in nats per token."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    with torch.autocast(batch.device.type, torch.bfloat16, enabled=batch.is_cuda):
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits  # [batch, sequence, vocabulary]
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def _run_facts(flags: argparse.Namespace, settings: Settings) -> dict[str, object]:
    """Return the settings, the command that reproduces them, the versions and the machine."""
    command = command_of("train_small_model.py", settings)
    return {
        **asdict(settings),
        **{package: version(package) for package in ("torch", "transformers", "tokenizers")},
        "command": shlex.join([*command, "--compile"] if flags.compile else command),
        "cpython": library_version(flags.stdlib),
        "device": device_name(flags.device),
    }


def command_of(script: str, settings: Any) -> list[str]:
    """Return the words of a command that runs a script of this folder with these settings, a dataclass of flags."""
    command = ["python", f"examples/{script}", "--output", "DIR"]
    for field in fields(settings):
        value = getattr(settings, field.name)
        if value != field.default:
            command += ["--" + field.name.replace("_", "-"), str(value)]
    return command


def device_name(device: str) -> str:
    """Return the name of a GPU, or the kind of processor."""
    on_gpu = torch.device(device).type == "cuda"
    return torch.cuda.get_device_name(device) if on_gpu else f"{platform.machine()} processor"


def settings_of(flags: argparse.Namespace, kind: type[Any]) -> Any:
    """Return a dataclass of settings from the flags that `add_flags` added."""
    return kind(**{field.name: getattr(flags, field.name) for field in fields(kind)})


def add_flags(parser: argparse.ArgumentParser, settings: type) -> None:
    """Add a flag for each field of a dataclass of settings."""
    for field in fields(settings):
        flag = "--" + field.name.replace("_", "-")
        parser.add_argument(flag, type=type(field.default), default=field.default, help="default: %(default)s")


def _parse_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--output", type=Path, required=True, help="directory for the model, its tokenizer and its card"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--stdlib", type=Path, default=installed_library(), help="default: the running Python's library"
    )
    parser.add_argument("--compile", action="store_true", help="compile the layers: a minute's wait, then faster steps")
    add_flags(parser, Settings)
    return parser.parse_args()


if __name__ == "__main__":
    main()
