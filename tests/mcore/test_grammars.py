"""Replies follow their grammars with any drafts, cache hits and interruptions, and other requests are unaffected."""

import json
from collections.abc import Callable
from dataclasses import replace
from random import Random

import jsonschema_rs
import pytest

from megatron_mamba_cache.grammars import forms, matching
from megatron_mamba_cache.grammars.reasoning import ReasoningGrammar
from tests.grammars.piece_tokenizer import END
from tests.grammars.random_schemas import random_schema
from tests.mcore.engine_runs import EngineRun, add_fields, cache_config, greedy, tiny_hybrid
from tests.mcore.grammar_runs import TOKENIZER, grammar_requests, is_valid, replies_to
from tests.mcore.graph_stand_ins import capture_without_cuda
from tests.mcore.launch_records import rehearse_engine

LEAST_ENDED = 0.99


def check_schemas(seeds: range) -> None:
    """Check the replies to random schemas in every mode."""
    schemas = [random_schema(Random(seed)) for seed in seeds]
    requests = grammar_requests([forms.json_grammar(schema).text for schema in schemas], seeds.start)
    plain = replies_to(requests, prefix_caching=False)
    ended = [request for request in requests if plain[request.request_id][-1] == END]
    invalid = [
        (schemas[request.request_id], TOKENIZER.detokenize(plain[request.request_id]))
        for request in ended
        if not is_valid(schemas[request.request_id], plain[request.request_id])
    ]
    print(f"{len(requests)} schemas, {len(ended)} replies ended, {len(invalid)} invalid")
    assert not invalid
    assert len(ended) >= LEAST_ENDED * len(requests)
    assert replies_to(requests) == plain
    assert replies_to(requests, plain) == plain
    assert replies_to(requests, plain, prefix_caching=False) == plain


# The first of them by default, a thousand where long tests run, ten thousand in all.
SCHEMAS = [
    range(50),
    *(pytest.param(range(first, first + 190), marks=pytest.mark.long) for first in range(50, 1_000, 190)),
    *(pytest.param(range(first, first + 200), marks=pytest.mark.slow) for first in range(1_000, 10_000, 200)),
]


@pytest.mark.parametrize("seeds", SCHEMAS, ids=lambda seeds: f"from {seeds.start}")
def test_replies_follow_their_json_schemas_with_and_without_drafts_and_cache(seeds: range) -> None:
    check_schemas(seeds)


DISTURBANCES: dict[str, Callable[[EngineRun], object]] = {
    "nothing": lambda run: None,
    "graphs dropped": lambda run: run.context.runner.drop_graphs(),
    "graphs captured again": lambda run: run.engine.create_cuda_graphs(),
    "buffers written": rehearse_engine,
}


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("disturbance", DISTURBANCES)
def test_steps_overlap_while_a_request_follows_a_grammar(
    disturbance: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forward is launched before the tokens are known that decide the grammar's mask."""
    schema = {"type": "array", "items": {"enum": ["a", 10, True]}, "minItems": 10, "maxItems": 14}
    grammars = ["", forms.json_grammar(schema).text, "", forms.json_grammar({"type": "boolean"}).text]
    requests = [replace(request, temperature=temperature) for request in grammar_requests(grammars, 2)]
    expected = replies_to(requests, num_tokens=60)
    capture_without_cuda(monkeypatch)
    subject = tiny_hybrid(vocab_size=TOKENIZER.vocab_size)
    config = replace(cache_config(subject.sizes), num_cuda_graphs=3, cuda_graph_prefill_tokens=40)
    run = EngineRun.start(subject, config, tokenizer=TOKENIZER)
    for request in requests:
        run.add(request.request_id, request.prompt, request.sampling(60), seed=request.seed)
    num_ahead = 0
    while run.engine.has_unfinished_requests():
        run.step()
        num_ahead += run.context.overlapped_step is not None
        if num_ahead in (10, 20) and run.context.overlapped_step is not None:
            DISTURBANCES[disturbance](run)
    assert {request.request_id: run.tokens(request.request_id) for request in requests} == expected
    assert num_ahead >= (10 if disturbance == "graphs dropped" else 25), num_ahead
    assert expected[1][-1] == END and is_valid(schema, expected[1])
    run.assert_nothing_held()


FORMS = {
    "regex": (forms.regex_grammar(r"[a-f]{3}/\d{2}"), r"[a-f]{3}/\d{2}"),
    "choice": (forms.choice_grammar(["yes", "no", 'per"haps\n']), 'yes|no|per"haps\n'),
    "lark": (forms.lark_grammar('start: "a" item{2,3} "z"\nitem: /[0-4]/ ","'), r"a([0-4],){2,3}z"),
    "two in a row": (
        forms.sequence(forms.choice_grammar(["<", ">"]), forms.json_grammar({"type": "boolean"})),
        "[<>](true|false)",
    ),
    "either": (
        forms.any_of(forms.choice_grammar(["never"]), forms.json_grammar({"const": [1]}, "one")),
        r"never|\[( |\n {0,16})?1( |\n {0,16})?\]",
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_replies_follow_regex_choice_and_lark_grammars(name: str) -> None:
    import re

    grammar, pattern = FORMS[name]
    requests = grammar_requests([grammar.text] * 8, 3)
    plain = replies_to(requests)
    for tokens in plain.values():
        assert tokens[-1] == END and re.fullmatch(pattern, TOKENIZER.detokenize(tokens[:-1])), tokens
    assert replies_to(requests, plain) == plain


@pytest.mark.parametrize(
    ("closing", "is_open"),
    [
        ("</think>", True),
        ("so:", False),
        pytest.param("</think>", False, marks=pytest.mark.long),
        pytest.param("so:", True, marks=pytest.mark.long),
    ],
)
def test_grammar_applies_after_reasoning(closing: str, is_open: bool) -> None:
    """Drafts cross the end of reasoning too."""
    answer = forms.json_grammar({"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]})
    grammar = ReasoningGrammar("<think>", closing, TOKENIZER.id_of).before(answer, is_open=is_open)
    schema = {"type": "object", "required": ["a"]}
    requests = grammar_requests([grammar.text] * 8, 1)
    plain, num_ended = replies_to(requests), 0
    for tokens in plain.values():
        text = TOKENIZER.detokenize(tokens[:-1], skip_special_tokens=False)
        if tokens[-1] == END:
            thoughts, found, answer_text = text.rpartition(closing)
            assert bool(found) is is_open or thoughts.startswith("<think>") is bool(found), text
            assert jsonschema_rs.is_valid(schema, json.loads(answer_text)), text
            num_ended += 1
    print(f"{num_ended} of {len(plain)} replies ended")
    assert replies_to(requests, plain) == plain


def test_request_with_a_too_complex_grammar_fails_and_others_continue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matching, "_MOST_ITEMS", 500)
    schema = {"type": "object", "properties": {f"p{number}": {} for number in range(200)}}
    requests = [
        replace(request, temperature=0.0) for request in grammar_requests(["", forms.json_grammar(schema).text, ""], 4)
    ]
    subject = tiny_hybrid(vocab_size=TOKENIZER.vocab_size)
    run = EngineRun.start(subject, cache_config(subject.sizes), tokenizer=TOKENIZER)
    for request in requests:
        run.add(request.request_id, request.prompt, request.sampling(20), seed=request.seed)
    run.finish()
    assert "too complex to continue" in str(run.finished[1].events[0].payload), run.finished[1].events
    assert run.counters.steps_aborted == 0
    plain = replies_to([requests[0], requests[2]], num_tokens=20)
    assert {number: run.tokens(number) for number in (0, 2)} == plain
    run.assert_nothing_held()


@pytest.mark.parametrize("end", [-1, 5])
def test_grammar_request_must_stop_at_the_tokenizers_end_token(end: int) -> None:
    """Otherwise the reply would repeat it up to its length."""
    subject = tiny_hybrid(vocab_size=TOKENIZER.vocab_size)
    run = EngineRun.start(subject, cache_config(subject.sizes), tokenizer=TOKENIZER)
    grammar = {"grammar": forms.json_grammar({"type": "boolean"}).text}
    for request_id, (own_end, stops) in enumerate([(end, []), (end, [END]), (None, [])]):
        params = greedy(20, termination_id=own_end)
        add_fields(params, **(grammar | {"stop_token_ids": stops}))
        run.add(request_id, [1, 2, 3], params)
    run.finish()
    reason = f"termination_id is {end}, but a reply that follows a grammar ends with token {END}"
    assert reason in str(run.finished[0].events[0].payload)
    for request_id in (1, 2):
        tokens = run.tokens(request_id)
        assert tokens[-1] == END and END not in tokens[:-1] and is_valid({"type": "boolean"}, tokens)
    run.assert_nothing_held()
