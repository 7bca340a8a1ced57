"""Replies follow their grammars, whatever is drafted, cached or interrupted, and others do not notice."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import jsonschema_rs
import pytest

from megatron_mamba_cache.grammars import forms, matching
from megatron_mamba_cache.grammars.reasoning import ReasoningGrammar
from tests.grammars.piece_tokenizer import END, PieceTokenizer
from tests.grammars.random_schemas import random_schema
from tests.mcore.engine_runs import EngineRun, add_fields, cache_config, greedy, tiny_hybrid
from tests.mcore.graph_stand_ins import capture_without_cuda
from tests.mcore.noisy_drafter import NoisyDrafter
from tests.mcore.test_warmup import rehearse_engine

NUM_TOKENS = 300
TOKENIZER = PieceTokenizer()
LEAST_ENDED = 0.99


@dataclass(frozen=True, slots=True)
class Wish:
    """A request with a grammar, or without one."""

    request_id: int
    prompt: tuple[int, ...]
    grammar: str
    seed: int
    temperature: float
    logits: Mapping[str, Any] | None = None

    def sampling(self, num_tokens: int = NUM_TOKENS) -> Any:
        """Return its parameters."""
        params = greedy(num_tokens, top_k=0, temperature=self.temperature, termination_id=END)
        if self.grammar:
            add_fields(params, grammar=self.grammar)
        if self.logits:
            add_fields(params, logits=self.logits)
        return params


def wishes_for(grammars: Sequence[str], seed: int, first_id: int = 0) -> list[Wish]:
    """Return a request for each grammar; prompts share beginnings."""
    random = Random(seed)
    shared = [random.randrange(256) for _ in range(70)]
    return [
        Wish(
            first_id + index,
            (
                *shared[: random.choice([5, 40, 64, 70])],
                *(random.randrange(256) for _ in range(random.randrange(1, 9))),
            ),
            grammar,
            random.randrange(2**40),
            random.choice([0.0, 0.7, 1.0]),
        )
        for index, grammar in enumerate(grammars)
    ]


def replies_to(
    wishes: Sequence[Wish],
    known: Mapping[int, Sequence[int]] | None = None,
    *,
    num_tokens: int = NUM_TOKENS,
    **settings: Any,
) -> dict[int, list[int]]:
    """Return the tokens of all replies, drafted as `known` texts say with some errors; several requests run at once."""
    subject = tiny_hybrid(vocab_size=TOKENIZER.vocab_size)
    drafter = None
    if known is not None:
        texts = {wish.request_id: [*wish.prompt, *known[wish.request_id]] for wish in wishes}
        drafter = NoisyDrafter(texts, accuracy=0.8, vocab_size=TOKENIZER.vocab_size, varies=True)
        settings = {"num_speculative_tokens": 4, **settings}
    config = cache_config(subject.sizes, **settings)
    run = EngineRun.start(subject, config, tokenizer=TOKENIZER, drafter=drafter)
    for wish in wishes:
        run.add(wish.request_id, wish.prompt, wish.sampling(num_tokens), seed=wish.seed)
    run.finish()
    run.assert_nothing_held()
    assert run.context.runner._changes.masks._requests == {}
    return {wish.request_id: run.tokens(wish.request_id) for wish in wishes}


def is_valid(schema: Any, tokens: Sequence[int]) -> bool:
    """Return whether a reply that ended by itself is a document of the schema."""
    assert tokens[-1] == END
    text = b"".join(TOKENIZER.bytes_of(token) or b"?" for token in tokens[:-1]).decode()
    return bool(jsonschema_rs.is_valid(schema, json.loads(text)))


def check_schemas(seeds: range) -> None:
    """Check the replies to random schemas in every mode."""
    schemas = [random_schema(Random(seed)) for seed in seeds]
    wishes = wishes_for([forms.json_grammar(schema).text for schema in schemas], seeds.start)
    plain = replies_to(wishes, prefix_caching=False)
    ended = [wish for wish in wishes if plain[wish.request_id][-1] == END]
    invalid = [
        (schemas[wish.request_id], TOKENIZER.detokenize(plain[wish.request_id]))
        for wish in ended
        if not is_valid(schemas[wish.request_id], plain[wish.request_id])
    ]
    print(f"{len(wishes)} schemas, {len(ended)} replies ended, {len(invalid)} invalid")
    assert not invalid
    assert len(ended) >= LEAST_ENDED * len(wishes)
    assert replies_to(wishes) == plain
    assert replies_to(wishes, plain) == plain
    assert replies_to(wishes, plain, prefix_caching=False) == plain


# The first of them by default, a thousand where long tests run, ten thousand in all.
SCHEMAS = [
    range(100),
    *(pytest.param(range(first, first + 180), marks=pytest.mark.long) for first in range(100, 1_000, 180)),
    *(pytest.param(range(first, first + 200), marks=pytest.mark.slow) for first in range(1_000, 10_000, 200)),
]


@pytest.mark.parametrize("seeds", SCHEMAS, ids=lambda seeds: f"from {seeds.start}")
def test_replies_follow_their_schemas_with_any_drafts_and_cache(seeds: range) -> None:
    check_schemas(seeds)


DISTURBANCES: dict[str, Callable[[EngineRun], object]] = {
    "nothing": lambda run: None,
    "graphs dropped": lambda run: run.context.runner.drop_graphs(),
    "graphs captured again": lambda run: run.engine.create_cuda_graphs(),
    "buffers written": rehearse_engine,
}


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("disturbance", DISTURBANCES)
def test_steps_with_a_grammar_overlap(disturbance: str, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward is launched before the tokens are known that decide the grammar's mask."""
    schema = {"type": "array", "items": {"enum": ["a", 10, True]}, "minItems": 10, "maxItems": 14}
    grammars = ["", forms.json_grammar(schema).text, "", forms.json_grammar({"type": "boolean"}).text]
    wishes = [replace(wish, temperature=temperature) for wish in wishes_for(grammars, 2)]
    expected = replies_to(wishes, num_tokens=60)
    capture_without_cuda(monkeypatch)
    subject = tiny_hybrid(vocab_size=TOKENIZER.vocab_size)
    config = replace(cache_config(subject.sizes), num_cuda_graphs=3, cuda_graph_prefill_tokens=40)
    run = EngineRun.start(subject, config, tokenizer=TOKENIZER)
    for wish in wishes:
        run.add(wish.request_id, wish.prompt, wish.sampling(60), seed=wish.seed)
    num_ahead = 0
    while run.engine.has_unfinished_requests():
        run.step()
        num_ahead += run.context.overlapped_step is not None
        if num_ahead in (10, 20) and run.context.overlapped_step is not None:
            DISTURBANCES[disturbance](run)
    assert {wish.request_id: run.tokens(wish.request_id) for wish in wishes} == expected
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
def test_other_grammar_formats_are_followed(name: str) -> None:
    import re

    grammar, pattern = FORMS[name]
    wishes = wishes_for([grammar.text] * 8, 3)
    plain = replies_to(wishes)
    for tokens in plain.values():
        assert tokens[-1] == END and re.fullmatch(pattern, TOKENIZER.detokenize(tokens[:-1])), tokens
    assert replies_to(wishes, plain) == plain


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
    """With drafts across the end of reasoning too."""
    answer = forms.json_grammar({"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]})
    grammar = ReasoningGrammar("<think>", closing, TOKENIZER.id_of).before(answer, is_open=is_open)
    schema = {"type": "object", "required": ["a"]}
    wishes = wishes_for([grammar.text] * 8, 1)
    plain, num_ended = replies_to(wishes), 0
    for tokens in plain.values():
        text = TOKENIZER.detokenize(tokens[:-1], skip_special_tokens=False)
        if tokens[-1] == END:
            thoughts, found, answer_text = text.rpartition(closing)
            assert bool(found) is is_open or thoughts.startswith("<think>") is bool(found), text
            assert jsonschema_rs.is_valid(schema, json.loads(answer_text)), text
            num_ended += 1
    print(f"{num_ended} of {len(plain)} replies ended")
    assert replies_to(wishes, plain) == plain


def test_too_complex_grammar_fails_only_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matching, "_MOST_ITEMS", 500)
    schema = {"type": "object", "properties": {f"p{number}": {} for number in range(200)}}
    wishes = [replace(wish, temperature=0.0) for wish in wishes_for(["", forms.json_grammar(schema).text, ""], 4)]
    subject = tiny_hybrid(vocab_size=TOKENIZER.vocab_size)
    run = EngineRun.start(subject, cache_config(subject.sizes), tokenizer=TOKENIZER)
    for wish in wishes:
        run.add(wish.request_id, wish.prompt, wish.sampling(20), seed=wish.seed)
    run.finish()
    assert "too complex to go on" in str(run.finished[1].events[0].payload), run.finished[1].events
    assert run.counters.steps_aborted == 0
    plain = replies_to([wishes[0], wishes[2]], num_tokens=20)
    assert {number: run.tokens(number) for number in (0, 2)} == plain
    run.assert_nothing_held()


@pytest.mark.parametrize("end", [-1, 5])
def test_grammar_needs_the_end_token_of_its_text(end: int) -> None:
    """Else the reply would repeat it up to its length."""
    subject = tiny_hybrid(vocab_size=TOKENIZER.vocab_size)
    run = EngineRun.start(subject, cache_config(subject.sizes), tokenizer=TOKENIZER)
    grammar = {"grammar": forms.json_grammar({"type": "boolean"}).text}
    for request_id, (own_end, stops) in enumerate([(end, []), (end, [END]), (None, [])]):
        params = greedy(20, termination_id=own_end)
        add_fields(params, **(grammar | {"stop_token_ids": stops}))
        run.add(request_id, [1, 2, 3], params)
    run.finish()
    reason = f"termination_id is {end}, and a reply that follows a grammar ends with token {END}"
    assert reason in str(run.finished[0].events[0].payload)
    for request_id in (1, 2):
        tokens = run.tokens(request_id)
        assert tokens[-1] == END and END not in tokens[:-1] and is_valid({"type": "boolean"}, tokens)
    run.assert_nothing_held()
