"""Replies that follow grammars stay valid, and equal, with drafts of an MTP head; an invalid draft ends before it."""

import json
from collections.abc import Mapping, Sequence
from random import Random
from types import SimpleNamespace
from typing import Any

import jsonschema_rs
import pytest
import torch

from megatron_mamba_cache import build_engine
from megatron_mamba_cache.grammars import forms
from megatron_mamba_cache.models.checkpoints.hugging_face import LoadedModel, load_hugging_face
from megatron_mamba_cache.server.parsers.call_grammars import calls_grammar
from megatron_mamba_cache.speculation.prompt_lookup import AutoDrafter
from megatron_mamba_cache.speculation.short_list import ShortList
from tests.grammars.piece_tokenizer import END
from tests.grammars.random_schemas import random_schema
from tests.mcore.engine_runs import EngineRun
from tests.mcore.grammar_runs import TOKENIZER, GrammarRequest, grammar_requests, is_valid
from tests.models.checkpoint_edits import tensors_of, write_tensors
from tests.models.mostly_right import MostlyRight
from tests.models.mtp_heads import head_tensors
from tests.models.served_run import served_config
from tests.models.tiny_checkpoints import tiny_checkpoint

CASE = "nemotron_h_moe-1"
SEEDS = [range(8), pytest.param(range(8, 100), marks=pytest.mark.long)]
BEGIN, REST = "<tool_call>\n", "\n</tool_call>"


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """Return a model with a head and the vocabulary of the tokenizer."""
    case, directory = tiny_checkpoint(CASE), tmp_path_factory.mktemp(CASE)
    case.config.get_text_config().vocab_size = TOKENIZER.vocab_size
    case.write(case.model(), directory)
    write_tensors(directory, tensors_of(directory) | head_tensors(case.config))
    return load_hugging_face(directory, torch.float32, mtp="required")


def replies_to(
    requests: Sequence[GrammarRequest], loaded: LoadedModel, known: Mapping[int, list[int]] | None = None
) -> dict[int, list[int]]:
    """Return the replies, with drafts of a head if replies are `known`."""
    config = served_config(tiny_checkpoint(CASE), num_speculative_tokens=0 if known is None else 4)
    drafter = None
    if known is not None:
        assert loaded.mtp is not None
        short_list = ShortList(loaded.model, TOKENIZER.vocab_size - 40)
        drafter = MostlyRight(loaded.model, loaded.mtp, short_list, replies=known)
    engine = build_engine(
        loaded.model, config, drafter=None if drafter is None else AutoDrafter(drafter), tokenizer=TOKENIZER
    )
    run = EngineRun(loaded, engine)  # type: ignore[arg-type]
    for request in requests:
        run.add(request.request_id, request.prompt, request.sampling(), seed=request.seed)
    run.finish()
    run.assert_nothing_held()
    assert run.counters.drafting_failures == 0 and (drafter is None or run.counters.accepted_tokens > len(requests))
    return {request.request_id: run.tokens(request.request_id) for request in requests}


def is_valid_call(schema: Any, tokens: Sequence[int]) -> bool:
    text = TOKENIZER.detokenize(list(tokens))
    call = json.loads(text.removeprefix(BEGIN).removesuffix(REST))
    return call["name"] == "find" and jsonschema_rs.is_valid(schema, call["arguments"])


@pytest.mark.parametrize("seeds", SEEDS, ids=["few", "many"])
@pytest.mark.parametrize("is_call", [False, True], ids=["json", "tool calls"])
def test_replies_stay_valid_with_drafts_of_a_head(is_call: bool, seeds: range, loaded: LoadedModel) -> None:
    schemas = [random_schema(Random(seed)) for seed in seeds]
    if is_call:
        schemas = [{"type": "object", "properties": {"a": schema}, "required": ["a"]} for schema in schemas]
        tools = [[SimpleNamespace(name="find", parameters=schema)] for schema in schemas]
        grammars = [calls_grammar("hermes", tool, TOKENIZER.id_of, only_one=True) for tool in tools]  # type: ignore[arg-type]
    else:
        grammars = [forms.json_grammar(schema) for schema in schemas]
    requests = grammar_requests([grammar.text for grammar in grammars], seeds.start)
    plain = replies_to(requests, loaded)
    drafted = replies_to(requests, loaded, plain)
    assert drafted == plain
    check = is_valid_call if is_call else is_valid
    ended = [index for index in range(len(requests)) if drafted[index][-1:] == [END]]
    print(f"{len(ended)} of {len(requests)} replies ended")
    assert len(ended) >= (0.6 if is_call and len(requests) > 8 else 0.75) * len(requests)
    assert all(check(schemas[index], drafted[index]) for index in ended)
