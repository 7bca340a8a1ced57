"""Prompt log-probabilities that a server returns, and the model's own."""

from typing import Any

import torch

from tests.oracle import HybridOracle
from tests.server.running_server import RunningServer

PROMPT = "import os\n\n\ndef main(é):\n    return os.getcwd()\n"
TOLERANCE = 1e-3


def token_ids(server: RunningServer, text: str) -> list[int]:
    return server.server.settings.tokenizer.tokenize(text)


def expected_log_probs(server: RunningServer, tokens: list[int]) -> torch.Tensor:
    """Return the log-probs of the vocabulary after each token, computed in float64 without a cache."""

    def compute(engine: Any) -> torch.Tensor:
        oracle = HybridOracle.from_megatron(engine.controller.inference_wrapped_model.model)
        return oracle.logits(tokens).log_softmax(-1).float().cpu()

    return server.between_steps(compute)
