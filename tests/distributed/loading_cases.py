"""Functions that run on a rank: checkpoints of both formats loaded under several layouts, and their replies."""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mamba_cache import CacheConfig, build_engine
from megatron_mamba_cache.mcore.linear import prompt_tokens_of
from megatron_mamba_cache.mcore.model_ranks import ranks_of_process
from megatron_mamba_cache.mcore.model_reading import model_shape_of
from megatron_mamba_cache.mcore.mtp_head import MTPHead, RemoteHead
from megatron_mamba_cache.models.checkpoints.hugging_face import LoadedModel, load_hugging_face
from megatron_mamba_cache.models.checkpoints.megatron_checkpoint import (
    load_megatron_checkpoint,
    save_megatron_checkpoint,
)
from megatron_mamba_cache.models.drafting.mtp_drafter import drafter_of
from megatron_mamba_cache.models.shard_shape import rank_shape
from megatron_mamba_cache.speculation import short_list
from tests.distributed.rank_models import Layout, parallel
from tests.mcore.engine_runs import EngineRun
from tests.models.checkpoint_edits import tensors_of, write_tensors
from tests.models.kept_weights import assert_means
from tests.models.mtp_heads import head_tensors
from tests.models.quantized_kinds import KINDS
from tests.models.quantized_writer import quantize, write_plain
from tests.models.tensor_parallel_worker import assert_same_weights, some_prompts
from tests.models.tiny_checkpoints import TinyCheckpoint, tiny_checkpoint, wide_checkpoint


def tokens_under_layouts(name: str, layouts: list[Layout]) -> list[dict[int, list[int]]]:
    """Return a checkpoint's replies under each layout; each layout also loads what the previous one saved."""
    case = tiny_checkpoint(name)
    case.config.vocab_size = 128  # the drawn ones are odd on purpose
    folder = folder_of_all_ranks()
    hugging_face = folder / "hugging_face"
    if dist.get_rank() == 0:
        case.write(case.model(), hugging_face)
    dist.barrier()
    saved: Path | None = None
    found = []
    for number, layout in enumerate(layouts):
        with parallel(layout):
            loaded = load_hugging_face(hugging_face, torch.float32)
            assert_known_before(loaded)
            if saved is not None:
                assert_same_weights(loaded, load_megatron_checkpoint(saved, torch.float32))
            found.append(_tokens(case, loaded))
            saved = folder / f"saved_{number}"
            save_megatron_checkpoint(loaded.model, loaded.architecture, saved)
    return found


def compare_quantized_weights(name: str, kinds: list[str], layouts: list[Layout]) -> None:
    """Assert that a checkpoint in each of these formats loads bit for bit under each layout."""
    case, folder = wide_checkpoint(name), folder_of_all_ranks()
    for number, kind in enumerate(kinds):
        quantized, plain = folder / f"quantized_{number}", folder / f"plain_{number}"
        if dist.get_rank() == 0:
            for directory in (quantized, plain):
                case.write(case.model(), directory)
            write_plain(plain, quantize(quantized, KINDS[kind]), "BF16")
        dist.barrier()
        for layout in layouts:
            with parallel(layout):
                dequantized = load_hugging_face(quantized, dequantizes=True)
                assert_same_weights(dequantized, load_hugging_face(plain))
                assert_means(load_hugging_face(quantized), dequantized)


def tokens_with_quantized_prompts(name: str, kinds: list[str], layouts: list[Layout]) -> list[list[list[int]]]:
    """Return the replies to a prompt without and with a hit, under each layout, of a model that quantizes prompts."""
    case, folder, found = wide_checkpoint(name), folder_of_all_ranks(), []
    for number, kind in enumerate(kinds):
        directory = folder / f"quantized_{number}"
        if dist.get_rank() == 0:
            case.write(case.model(), directory)
            quantize(directory, KINDS[kind])
        dist.barrier()
        prompt = torch.randint(case.vocab_size, (2 * case.block_size + 9,), generator=torch.Generator().manual_seed(1))
        for layout in layouts:
            with parallel(layout):
                loaded = load_hugging_face(directory)
                assert prompt_tokens_of(loaded.model) is not None
                run = EngineRun(loaded, build_engine(loaded.model, _config(case, boundary_stride=1)))
                for request_id in range(2):
                    run.run(request_id, prompt.tolist(), 12)
                assert run.engine.cached_tokens(1) > 0
                found.append([run.tokens(request_id) for request_id in range(2)])
    return found


def drafts_under_layouts(name: str, kind: str | None, layouts: list[Layout]) -> list[dict[int, list[int]]]:
    """Return a checkpoint's replies under each layout, which are the same without and with drafts of its head.

    Each layout also loads the head that the previous one saved.

    Args:
        kind: Format of the quantized weights; None for a checkpoint without quantized weights.
    """
    case = tiny_checkpoint(name) if kind is None else wide_checkpoint(name)
    case.config.vocab_size, folder, saved = 128, folder_of_all_ranks(), None
    if dist.get_rank() == 0:
        case.write(case.model(), folder / "model")
        write_tensors(folder / "model", tensors_of(folder / "model") | head_tensors(case.config))
        if kind is not None:
            quantize(folder / "model", KINDS[kind])
    dist.barrier()
    found, dtype = [], torch.float32 if kind is None else None
    for number, layout in enumerate(layouts):
        with parallel(layout):
            loaded = load_hugging_face(folder / "model", dtype, mtp="required")
            assert loaded.mtp is not None and isinstance(loaded.mtp, MTPHead) == ranks_of_process().is_last_stage
            _assert_tied_embeddings_are_shared(loaded)
            if saved is not None:
                other = load_megatron_checkpoint(saved, dtype, mtp="required")
                _assert_same_heads(loaded.mtp, other.mtp)
                _assert_tied_embeddings_are_shared(other)
            plain = _tokens(case, loaded)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(short_list, "_LEAST_VOCABULARY", case.config.vocab_size)
                patch.setattr(short_list, "_FIRST_COUNT", 8)
                assert plain == _tokens(case, loaded, drafter_of(loaded.model, loaded.mtp))
            found.append(plain)
            if kind is None:
                saved = folder / f"saved_{number}"
                save_megatron_checkpoint(loaded.model, loaded.architecture, saved, loaded.mtp)
    return found


def compare_quantized_heads(name: str, kind: str, layouts: list[Layout]) -> None:
    """Assert that a quantized head has the weights of its dequantized form under each layout."""
    case, folder = wide_checkpoint(name), folder_of_all_ranks()
    if dist.get_rank() == 0:
        for directory in (folder / "quantized", folder / "plain"):
            case.write(case.model(), directory)
            write_tensors(directory, tensors_of(directory) | head_tensors(case.config))
        write_plain(folder / "plain", quantize(folder / "quantized", KINDS[kind]), "BF16")
    dist.barrier()
    for layout in layouts:
        with parallel(layout):
            kept, dequantized, plain = (
                replace(loaded, model=loaded.mtp)  # type: ignore[arg-type]  # as the comparisons read a model's
                for loaded in (
                    load_hugging_face(folder / "quantized", mtp="required"),
                    load_hugging_face(folder / "quantized", mtp="required", dequantizes=True),
                    load_hugging_face(folder / "plain", mtp="required"),
                )
            )
            assert_same_weights(dequantized, plain)
            assert_means(kept, dequantized)


def _assert_same_heads(one: Any, other: Any) -> None:
    if isinstance(one, RemoteHead):
        assert one == other
        return
    weights, others = one.state_dict(), other.state_dict()
    assert [name for name, found in weights.items() if isinstance(found, Tensor)]
    for name, found in weights.items():
        assert not isinstance(found, Tensor) or torch.equal(found, others[name]), name


def _assert_tied_embeddings_are_shared(loaded: LoadedModel) -> None:
    if isinstance(loaded.mtp, MTPHead) and loaded.mtp.embedding is not None:
        weights = loaded.mtp.embedding.word_embeddings.weight, loaded.model.output_layer.weight
        assert (weights[0] is weights[1]) == loaded.architecture.tie_embeddings


def assert_known_before(loaded: LoadedModel) -> None:
    """Assert that the shape of this rank's shard follows from the architecture."""
    built = model_shape_of(loaded.model, ranks_of_process())
    assert rank_shape(loaded.architecture, torch.float32) == replace(built, fingerprint="")


def folder_of_all_ranks() -> Path:
    """Return a new folder, the same on every rank."""
    folder = [tempfile.mkdtemp(prefix="ranks")]
    dist.broadcast_object_list(folder, 0)
    return Path(folder[0])


def _tokens(case: TinyCheckpoint, loaded: LoadedModel, drafter: Any = None) -> dict[int, list[int]]:
    drafts = {} if drafter is None else {"num_speculative_tokens": 2, "adaptive_drafts": False}
    run = EngineRun(loaded, build_engine(loaded.model, _config(case, **drafts), drafter=drafter))
    for request_id, prompt in enumerate(some_prompts(loaded.architecture.vocab_size).tolist()):
        run.add(request_id, prompt, 8)
    run.finish()
    run.assert_nothing_held()
    if drafter is not None:
        assert run.counters.draft_tokens and not run.counters.drafting_failures
        (num_unlisted,) = set(ranks_of_process().gather(run.counters.unlisted_tokens))  # each rank has its metrics
        assert num_unlisted
    return {request_id: run.tokens(request_id) for request_id in run.finished}


def _config(case: TinyCheckpoint, **settings: int) -> CacheConfig:
    return CacheConfig(
        **case.cache_settings,
        buffer_size_gb=0.01,
        prefix_caching_mamba_gb=0.01,
        max_requests=4,
        max_sequence_length=640,
        rank_digest_steps=1,
        **settings,
    )
