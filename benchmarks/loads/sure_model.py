"""Weights with which the next token is certain despite rounding, at the same cost as any other weights."""

from typing import Any

import torch

_STEP = 7919
_LOUDNESS = 1000.0


@torch.no_grad()
def make_sure(model: Any) -> None:
    """Set embeddings so large that only the last token determines the next one, as computed by `next_token`.

    Steps of different shapes round differently, and with random weights the two best logits are often nearly equal.
    With these weights, the logit of the next token is tens of standard deviations above all others. If the output
    weights are tied to the embeddings, they are untied; a step still reads the same number of bytes.
    """
    embeddings = model.embedding.word_embeddings.weight
    if model.share_embeddings_and_output_weights:
        model.share_embeddings_and_output_weights = False
        model.output_layer.weight = torch.nn.Parameter(embeddings.detach().clone(), requires_grad=False)
    vocab_size = embeddings.shape[0]
    generator = torch.Generator(embeddings.device).manual_seed(1)
    noise = torch.randn(embeddings.shape, generator=generator, device=embeddings.device)
    embeddings.copy_(_LOUDNESS * noise)
    follows = torch.tensor([next_token(token, vocab_size) for token in range(vocab_size)], device=embeddings.device)
    model.output_layer.weight[follows] = noise.to(model.output_layer.weight.dtype)


def next_token(token: int, vocab_size: int) -> int:
    """Return the token that follows `token`."""
    return (token + _STEP) % vocab_size
