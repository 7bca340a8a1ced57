"""Logits and tokens of transformers for the prompts of a loaded checkpoint."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.models.tiny_checkpoints import TinyCheckpoint

NUM_GENERATED = 40
MIN_DISTINCT_TOKENS = 10
_MAX_DRAWS = 8


@dataclass(frozen=True, slots=True)
class ReferenceRun:
    """Greedy runs of transformers over two prompts of one length, the second branching off the first; on the CPU."""

    model: PreTrainedModel
    prompts: Tensor  # [2, prompt]
    num_shared: int
    prompt_logits: Tensor  # [2, prompt, vocab]
    tokens: Tensor  # [2, generated]
    step_logits: Tensor  # [2, generated, vocab], that the tokens were chosen by

    def margins(self, prompt: int) -> Tensor:
        """Return the difference between the highest and the second-highest logit for each generated token."""
        best = self.step_logits[prompt].topk(2, dim=-1).values
        return best[:, 0] - best[:, 1]


def reference_run(case: TinyCheckpoint) -> ReferenceRun:
    """Run the case with the first weights for which both texts are varied enough to tell models apart.

    Raises:
        ValueError: If a few random tries find none.
    """
    for draw in range(_MAX_DRAWS):
        run = _run(case, case.model(draw))
        if all(len(set(text)) > MIN_DISTINCT_TOKENS for text in run.tokens.tolist()):
            return run
    raise ValueError(f"{case.name} repeats itself under {_MAX_DRAWS} draws of its weights; spread them otherwise")


@torch.inference_mode()
def _run(case: TinyCheckpoint, model: PreTrainedModel) -> ReferenceRun:
    block, length = case.block_size, max(60, 2 * case.block_size + 9)
    generator = torch.Generator().manual_seed(length)
    prompts = torch.randint(case.vocab_size, (2, length), generator=generator)
    num_shared = length // 2 // block * block + 3
    prompts[1, :num_shared] = prompts[0, :num_shared]
    prompts[1, num_shared] = (prompts[0, num_shared] + 1) % case.vocab_size
    generated = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=NUM_GENERATED,
        do_sample=False,
        use_cache=not case.bounds_time_steps,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return ReferenceRun(
        model=model,
        prompts=prompts,
        num_shared=num_shared,
        prompt_logits=model(prompts).logits,
        tokens=generated.sequences[:, length:],
        step_logits=torch.stack(generated.logits, dim=1),
    )
