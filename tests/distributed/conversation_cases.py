"""Functions that run on a rank: conversations with a sharded checkpoint, compared with transformers."""

import torch
import torch.distributed as dist

from megatron_mamba_cache.models.checkpoints.hugging_face import load_hugging_face
from tests.distributed.loading_cases import folder_of_all_ranks
from tests.distributed.rank_models import Layout, parallel
from tests.models.conversations import DRAFTS, Subject, converse
from tests.models.reference_run import reference_run
from tests.models.tiny_checkpoints import tiny_checkpoint


def skipped_tokens(name: str, layout: Layout) -> list[int]:
    """Hold conversations with and without drafts, compared on this rank; return the number of skipped prompt tokens."""
    case = tiny_checkpoint(name)
    case.config.get_text_config().vocab_size = 128  # the drawn ones are odd on purpose
    reference, folder, found = reference_run(case).model, folder_of_all_ranks(), []
    if dist.get_rank() == 0:
        case.write(reference, folder)
    dist.barrier()
    with parallel(layout):
        subject = Subject(case, reference, load_hugging_face(folder, torch.float32))
        for settings in ({}, DRAFTS):
            run = subject.start(rank_digest_steps=1, **settings)
            converse(subject, run)
            subject.assert_as_in_transformers(run)
            found.append(run.counters.prompt_tokens_skipped)
    return found
