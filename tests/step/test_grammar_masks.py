"""Grammar masks of requests with drafts equal those of the same reply without drafts."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_mamba_cache.grammars import forms
from megatron_mamba_cache.grammars.compiler import Grammars
from megatron_mamba_cache.grammars.reasoning import ReasoningGrammar
from megatron_mamba_cache.policy.block_hashing import BlockKeyChain
from megatron_mamba_cache.policy.identifiers import SlotId
from megatron_mamba_cache.policy.request_settings import RequestSpec, SamplingSettings
from megatron_mamba_cache.policy.requests import RunningRequest, StateCursor
from megatron_mamba_cache.step.grammar_masks import GrammarMasks
from tests.grammars.piece_tokenizer import END, THINK, THINK_END, PieceTokenizer

TOKENIZER = PieceTokenizer()
ANSWER = forms.json_grammar({"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]})
NUM_DRAFTS = 5


def compiled() -> Grammars:
    grammars = Grammars(TOKENIZER.vocab_size)
    grammars.read(TOKENIZER)
    return grammars


def running_request(
    grammar: str, request_id: int = 1, generated: Sequence[int] = (), num_replayed: int = 0
) -> RunningRequest:
    """Return a decoding request; the last `num_replayed` prompt tokens were generated before an interruption."""
    prompt = np.array([7, 8, 9, *generated[:num_replayed]])
    spec = RequestSpec(
        request_id, prompt, 500, SamplingSettings(grammar=grammar, termination_id=END), num_replayed=num_replayed
    )
    request = RunningRequest(spec, BlockKeyChain(bytes(32), 1), 0, 0, StateCursor(SlotId(0)), [], 0, computed=0)
    request.generated = list(generated[num_replayed:])
    set_drafts(request, ())
    return request


def set_drafts(request: RunningRequest, drafts: Sequence[int]) -> None:
    request.drafts = tuple(drafts)
    request.computed, request.scheduled = request.length - 1, 1 + len(drafts)


def allowed_tokens(masks: GrammarMasks, requests: Sequence[RunningRequest]) -> list[list[set[int]]]:
    """Return the tokens that may be sampled, for each request and position."""
    starts = [0]
    for request in requests:
        starts.append(starts[-1] + 1 + len(request.drafts))
    logits: Tensor = torch.zeros(starts[-1], TOKENIZER.vocab_size)
    masks.begin(requests, starts)
    masks.apply(logits)
    found = [set(line.isfinite().nonzero()[:, 0].tolist()) for line in logits]
    return [found[start:end] for start, end in pairwise(starts)]


def texts() -> dict[str, tuple[str, list[int]]]:
    """Return named grammars, each with a reply that follows it."""
    answer = [*TOKENIZER.tokenize('{"a": true}'), END]
    thoughts = TOKENIZER.tokenize('hm {"a": 1} </thin')
    special = ReasoningGrammar("<think>", "</think>", TOKENIZER.id_of).before(ANSWER, is_open=False)
    plain = ReasoningGrammar("<think>", "so:", TOKENIZER.id_of).before(ANSWER, is_open=True)
    return {
        "schema": (ANSWER.text, answer),
        "special markers": (special.text, [THINK, *thoughts, THINK_END, *TOKENIZER.tokenize("\n"), *answer]),
        "text as marker": (plain.text, [*thoughts, *TOKENIZER.tokenize("so:"), *answer]),
    }


@pytest.mark.parametrize("name", texts())
@pytest.mark.parametrize("num_replayed", [0, 4])
def test_grammar_masks_with_drafts_equal_those_without_drafts(name: str, num_replayed: int) -> None:
    grammar, text = texts()[name]
    one_by_one = GrammarMasks(compiled())
    expected = []
    request = running_request(grammar)
    for token in text:
        set_drafts(request, ())
        expected += allowed_tokens(one_by_one, [request])[0]
        assert token in expected[-1]
        request.generated.append(token)
    for row in range(num_replayed, len(text)):
        masks, request = (
            GrammarMasks(compiled()),
            running_request(grammar, generated=text[:row], num_replayed=num_replayed),
        )
        drafts = masks.allowed(request, [*text[row : row + NUM_DRAFTS - 1], 0])
        wanted = text[row : row + NUM_DRAFTS - 1]
        if END not in wanted and name == "schema":
            assert list(drafts) == wanted  # no JSON text has a zero byte
        set_drafts(request, drafts[: len(wanted)])
        other = running_request("", request_id=2, generated=[5])
        plain = running_request(ANSWER.text, request_id=3)
        found = allowed_tokens(masks, [plain, request, other])
        until = min(len(found[1]), len(text) - row)
        assert found[1][:until] == expected[row : row + until], row
        assert found[2] == [set(range(TOKENIZER.vocab_size))]
        assert found[0] == [allowed_tokens(GrammarMasks(compiled()), [plain])[0][0]]


def test_drafts_are_truncated_at_the_first_token_that_the_grammar_rejects() -> None:
    masks, text = GrammarMasks(compiled()), TOKENIZER.tokenize('{"a": true}')
    request = running_request(ANSWER.text)
    assert list(masks.allowed(request, [*text[:3], 0, *text[4:]])) == text[:3]
    assert list(masks.allowed(request, [0])) == []
    assert list(masks.allowed(request, [])) == []
    assert list(masks.allowed(running_request("", 2), [0, 1])) == [0, 1]
    masks.forget(1)
    assert masks._requests == {}


def test_rank_that_does_not_sample_truncates_drafts_but_does_not_mask_logits() -> None:
    masks, request = GrammarMasks(compiled(), samples_here=False), running_request(ANSWER.text)
    assert list(masks.allowed(request, [0])) == []
    assert allowed_tokens(masks, [request]) == [[set(range(TOKENIZER.vocab_size))]]


def test_request_whose_text_violates_its_grammar_fails_alone() -> None:
    grammars = compiled()
    masks, other = GrammarMasks(grammars), running_request(ANSWER.text, request_id=2)
    request = running_request(ANSWER.text, generated=[0])
    assert list(masks.allowed(request, [5])) == []
    found = allowed_tokens(masks, [request, other])
    assert found[0] == [set(range(TOKENIZER.vocab_size))]
    assert found[1] == allowed_tokens(GrammarMasks(compiled()), [running_request(ANSWER.text)])[0]
    failures = grammars.take_failures()
    assert list(failures) == [1] and "too complex to continue" in failures[1]
    assert grammars.take_failures() == {}
