"""Probabilities of the kept tokens in plain Python, as a reference for sampling."""

import math


def kept_probabilities(logits: list[float], temperature: float, top_k: int, top_p: float) -> dict[int, float]:
    """Return the renormalized probabilities of the kept tokens, most probable first."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    order = order[: 1 if temperature == 0 else top_k or None]
    weights = [math.exp((logits[token] - logits[order[0]]) / (temperature or 1)) for token in order]
    total, mass, kept = sum(weights), 0.0, {}
    for token, weight in zip(order, weights, strict=True):
        if 0 < top_p < 1 and mass >= top_p * total:
            break
        kept[token] = weight
        mass += weight
    return {token: weight / mass for token, weight in kept.items()}
