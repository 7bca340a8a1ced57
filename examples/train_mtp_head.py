"""Train a multi-token prediction (MTP) head for the small model of Python source, whose own weights stay as they are.

A head drafts tokens, which the model then verifies. At position t it reads token t and the model's hidden state of
token t - 1, and predicts token t + 1; applied to its own output, it predicts further tokens. It learns the model's
probabilities, on the text that the model was trained on.
"""

import argparse
import json
import math
import shlex
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from measure_bits_per_byte import SHIPPED_MODEL, installed_library, library_part, library_sources
from safetensors.torch import load_file, save_file
from small_model_card import with_head
from torch import Tensor, nn
from torch.nn import functional
from train_small_model import (
    Settings,
    TrainingText,
    add_flags,
    command_of,
    device_name,
    optimizer_of,
    rate_share,
    settings_of,
)
from transformers import AutoTokenizer, NemotronHConfig, NemotronHForCausalLM

PREFIX = "mtp."
LAYERS = ("full_attention", "mlp")
WEIGHTS = "model.safetensors"
SCORED_DEPTH, SCORED_TOKENS = 5, 2048


@dataclass(frozen=True, slots=True)
class HeadSettings:
    """Settings of a run; each field is a flag.

    Args:
        batches: Batches that the frozen model reads, of `batch_size` contexts.
        passes: How often the head learns from each batch.
        window: Tokens to which the head attends in training.
        windows_per_step: Windows in an optimizer step.
        depth: Tokens that the head learns to predict in a chain.
        decay: Factor of the loss from one token of the chain to the next.
    """

    batches: int = 60
    batch_size: int = 8
    passes: int = 2
    seed: int = 0
    window: int = 512
    windows_per_step: int = 1
    depth: int = 3
    decay: float = 0.8
    learning_rate: float = 5e-3
    weight_decay: float = 0.05


class Attention(nn.Module):
    """The head's first layer: norms, the projection that joins token and hidden state, and attention."""

    def __init__(self, config: NemotronHConfig) -> None:
        super().__init__()
        size, dim = config.hidden_size, config.head_dim
        queries, keys = config.num_attention_heads * dim, config.num_key_value_heads * dim
        self.head_dim, self.group = dim, config.num_attention_heads // config.num_key_value_heads
        self.enorm, self.hnorm, self.norm = (nn.RMSNorm(size, config.layer_norm_epsilon) for _ in range(3))
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        sizes = {"q_proj": (size, queries), "k_proj": (size, keys), "v_proj": (size, keys), "o_proj": (queries, size)}
        self.mixer = nn.ModuleDict({name: nn.Linear(*shape, bias=False) for name, shape in sizes.items()})

    def join(self, embeddings: Tensor, hidden_states: Tensor) -> Tensor:
        """Return the layer's input."""
        return self.eh_proj(torch.cat((self.enorm(embeddings), self.hnorm(hidden_states)), -1))

    def projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, [windows, heads, tokens, head dim]."""
        normed = self.norm(x)
        query, key, value = (
            self.mixer[f"{name}_proj"](normed).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for name in "qkv"
        )
        return query, key.repeat_interleave(self.group, 1), value.repeat_interleave(self.group, 1)

    def attend(self, query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
        """Attend to the entries that a chain sees: those of known tokens up to its beginning, then its own.

        Args:
            keys, values: For each token of a chain, those of the chains of all positions; first of the known tokens.
        """
        length, number = query.shape[2], len(keys) - 1  # the chain that is at position p began at p - number
        query = query * self.head_dim**-0.5
        closed = torch.full((length, length), -math.inf, device=query.device).triu(1 - number)
        own = list(range(number - 1, -1, -1))  # how many positions ago the chain's other tokens are
        scores = [query @ keys[0].transpose(2, 3) + closed]
        scores += [(query * later(key, ago)).sum(-1, keepdim=True) for key, ago in zip(keys[1:], own, strict=True)]
        shares = torch.cat(scores, -1).softmax(-1)
        found = shares[..., :length] @ values[0]
        for column, (value, ago) in enumerate(zip(values[1:], own, strict=True), length):
            found = found + shares[..., column : column + 1] * later(value, ago)
        return self.mixer["o_proj"](found.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """The head's second layer: an MLP with squared ReLU, and the final norm."""

    def __init__(self, config: NemotronHConfig) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        self.norm, self.final_layernorm = (nn.RMSNorm(size, config.layer_norm_epsilon) for _ in range(2))
        sizes = {"up_proj": (size, inner), "down_proj": (inner, size)}
        self.mixer = nn.ModuleDict({name: nn.Linear(*shape, bias=False) for name, shape in sizes.items()})

    def forward(self, x: Tensor) -> Tensor:
        """Return the output, which predicts a token and is the hidden state for the next one of the chain."""
        inner = functional.relu(self.mixer["up_proj"](self.norm(x))).square()
        return self.final_layernorm(x + self.mixer["down_proj"](inner))


class Head(nn.Module):
    """An MTP head; its parameters have their names in the checkpoint, without the prefix."""

    def __init__(self, config: NemotronHConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Attention(config), MLP(config)])

    def chain(self, embeddings: Tensor, hidden_states: Tensor, depth: int) -> Iterator[Tensor]:
        """Yield the outputs, [windows, tokens, hidden], of the first, second ... token of the chains of all positions.

        The output at position p predicts token p + 1. The n-th one there is of a chain that began at p - n + 1.

        Args:
            embeddings: [windows, tokens, hidden] of each token.
            hidden_states: [windows, tokens, hidden] of the token before each.
        """
        attention, mlp = self.layers
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for _ in range(depth):
            x = attention.join(embeddings, hidden_states)
            query, key, value = attention.projected(x)
            keys.append(key)
            values.append(value)
            output = mlp(x + attention.attend(query, keys, values))
            yield output
            hidden_states = later(output, 1)

    def stored(self) -> dict[str, Tensor]:
        """Return the tensors as the checkpoint stores them."""
        return {PREFIX + name: value.detach().to("cpu", torch.bfloat16) for name, value in self.named_parameters()}


def later(tensor: Tensor, by: int) -> Tensor:
    """Move a tensor [..., tokens, channels] to later positions; zeros come first."""
    return functional.pad(tensor, (0, 0, by, 0))[..., : tensor.shape[-2], :] if by else tensor


@dataclass(frozen=True, slots=True)
class Lessons:
    """Windows of text as the frozen model reads them, from which a head learns.

    Args:
        embeddings, hidden_states: [windows, tokens, hidden] of each token.
        before: [windows, tokens, hidden] hidden state of the token before each; zeros at the beginning of a text.
    """

    embeddings: Tensor
    hidden_states: Tensor
    before: Tensor

    @staticmethod
    @torch.no_grad()
    def of(model: NemotronHForCausalLM, token_ids: Tensor, window: int) -> "Lessons":
        """Read texts, [texts, tokens], of a multiple of `window` tokens."""
        texts = token_ids.split(len(token_ids) if token_ids.is_cuda else 1)  # one takes nearly 1 GB of memory
        hidden = torch.cat([model.model(input_ids=text, use_cache=False).last_hidden_state for text in texts])
        found = (model.get_input_embeddings()(token_ids), hidden, later(hidden, 1))
        return Lessons(*(tensor.unflatten(1, (-1, window)).flatten(0, 1).float() for tensor in found))

    def steps(self, num_windows: int, generator: torch.Generator) -> Iterator["Lessons"]:
        """Yield all windows in a random order, so many at a time."""
        order = torch.randperm(len(self.before), generator=generator).to(self.before.device)
        for chosen in order.split(num_windows):
            yield Lessons(self.embeddings[chosen], self.hidden_states[chosen], self.before[chosen])


def main() -> None:
    """Train a head, and write a copy of the model directory with it."""
    flags = _parse_flags()
    settings = settings_of(flags, HeadSettings)
    torch.manual_seed(settings.seed)
    model = NemotronHForCausalLM.from_pretrained(flags.model, dtype=torch.float32).to(flags.device)
    model.eval().requires_grad_(False)
    tokenizer = AutoTokenizer.from_pretrained(flags.model)
    sources = [source for source in library_sources(flags.stdlib) if source.part == "training"]
    context = model.config.max_position_embeddings
    reading = Settings(seed=settings.seed, batch_size=settings.batch_size, sequence_length=context)
    head = Head(model.config).to(flags.device)
    num_steps = train(head, model, TrainingText(sources, tokenizer, reading, flags.device), settings)

    save(head, flags.model, flags.output)
    held_out = [
        tokenizer.encode(source.document, add_special_tokens=False, return_tensors="pt").to(flags.device)
        for source in library_part(flags.stdlib, "held-out")
    ]
    shares = shares_of_right_drafts(head, model, held_out)
    facts = {
        **asdict(settings),
        **{package: version(package) for package in ("torch", "transformers")},
        "command": shlex.join(command_of("train_mtp_head.py", settings)),
        "device": device_name(flags.device),
        "parameters": sum(parameter.numel() for parameter in head.parameters()),
        "tokens": settings.batches * settings.batch_size * context,
        "steps": num_steps,
    }
    card = flags.output / "README.md"
    card.write_text(with_head(card.read_text(encoding="utf-8"), facts, shares), encoding="utf-8")
    print("right drafts by position: " + ", ".join(f"{share:.3f}" for share in shares))


def train(head: Head, model: NemotronHForCausalLM, text: TrainingText, settings: HeadSettings) -> int:
    """Train in place and return the number of steps; the learning rate follows a cosine over the batches."""
    generator = torch.Generator().manual_seed(settings.seed)
    optimizer = optimizer_of(head, settings.learning_rate, settings.weight_decay)
    num_steps, begin = 0, time.monotonic()
    for number, batch in zip(range(settings.batches), text.batches(), strict=False):
        with torch.autocast(batch.device.type, torch.bfloat16):
            lessons = Lessons.of(model, batch[:, :-1], settings.window)
        losses = []
        for index in range(settings.passes):
            done = (number + index / settings.passes) / settings.batches
            for group in optimizer.param_groups:
                group["lr"] = settings.learning_rate * rate_share(done + 1 / (settings.passes * settings.batches))
            for lesson in lessons.steps(settings.windows_per_step, generator):
                with torch.autocast(batch.device.type, torch.bfloat16):
                    found = losses_of(head, model, lesson, settings.depth)
                weighted = sum(loss * settings.decay**depth for depth, loss in enumerate(found))
                weighted.backward()
                nn.utils.clip_grad_norm_(head.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(torch.stack(found).detach())
        num_steps += len(losses)
        bits = ", ".join(f"{loss / math.log(2):.3f}" for loss in torch.stack(losses).mean(0).tolist())
        print(f"{time.monotonic() - begin:5.0f} s  batch {number + 1}  {bits} bits/token", flush=True)
    return num_steps


def losses_of(head: Head, model: NemotronHForCausalLM, lesson: Lessons, depth: int) -> list[Tensor]:
    """Return the mean divergence, in nats, from the model's probabilities for each token of the chains."""
    expected = model.lm_head(lesson.hidden_states).float().log_softmax(-1)
    losses = []
    for number, output in enumerate(head.chain(lesson.embeddings, lesson.before, depth)):
        found = model.lm_head(output)[:, number:].float().log_softmax(-1)
        divergence = functional.kl_div(found, expected[:, number:], reduction="sum", log_target=True)
        losses.append(divergence / found[..., 0].numel())
    return losses


@torch.no_grad()
def shares_of_right_drafts(head: Head, model: NemotronHForCausalLM, texts: Sequence[Tensor]) -> list[float]:
    """Return, by position in a chain, the share of drafts that the model finds most likely.

    The tokens of a chain are those of the text. Only drafts after right ones count.

    Args:
        texts: [1, tokens] each; only the beginnings are read.
    """
    counts = torch.zeros(SCORED_DEPTH + 1)
    for text in texts:
        text = text[:, :SCORED_TOKENS]
        lesson = Lessons.of(model, text, text.shape[1])
        expected = model.lm_head(lesson.hidden_states).argmax(-1)
        num_chains = text.shape[1] - SCORED_DEPTH + 1
        right = torch.ones(1, num_chains, dtype=torch.bool, device=text.device)
        counts[0] += num_chains
        for number, output in enumerate(head.chain(lesson.embeddings, lesson.before, SCORED_DEPTH)):
            reached = slice(number, number + num_chains)  # by chains that began `number` positions before
            right &= model.lm_head(output[:, reached]).argmax(-1) == expected[:, reached]
            counts[number + 1] += right.sum().cpu()
    return (counts[1:] / counts[:-1].clamp(min=1)).tolist()


def save(head: Head, model_directory: Path, output: Path) -> None:
    """Write a copy of a model directory whose files have the head."""
    if output.resolve() != model_directory.resolve():
        shutil.copytree(model_directory, output, dirs_exist_ok=True)
    tensors = {name: tensor for name, tensor in load_file(output / WEIGHTS).items() if not name.startswith(PREFIX)}
    save_file(tensors | head.stored(), output / WEIGHTS, metadata={"format": "pt"})
    path = output / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config |= {"num_nextn_predict_layers": 1, "mtp_layers_block_type": list(LAYERS)}
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _parse_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", type=Path, default=SHIPPED_MODEL, help="directory of the model; default: the shipped"
    )
    parser.add_argument("--output", type=Path, required=True, help="directory for the model with its head")
    parser.add_argument(
        "--stdlib", type=Path, default=installed_library(), help="default: the running Python's library"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add_flags(parser, HeadSettings)
    return parser.parse_args()


if __name__ == "__main__":
    main()
