"""Masks of rows with grammars: at every draft, those of a reply that has come so far one token at a time."""

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


def row_of(grammar: str, request_id: int = 1, generated: Sequence[int] = (), num_replayed: int = 0) -> RunningRequest:
    """Return a row that decodes; the last of its prompt's tokens were generated before an interruption."""
    prompt = np.array([7, 8, 9, *generated[:num_replayed]])
    spec = RequestSpec(
        request_id, prompt, 500, SamplingSettings(grammar=grammar, termination_id=END), num_replayed=num_replayed
    )
    row = RunningRequest(spec, BlockKeyChain(bytes(32), 1), 0, 0, StateCursor(SlotId(0)), [], 0, computed=0)
    row.generated = list(generated[num_replayed:])
    set_drafts(row, ())
    return row


def set_drafts(row: RunningRequest, drafts: Sequence[int]) -> None:
    row.drafts = tuple(drafts)
    row.computed, row.scheduled = row.length - 1, 1 + len(drafts)


def allowed_tokens(masks: GrammarMasks, rows: Sequence[RunningRequest]) -> list[list[set[int]]]:
    """Return, for each row and position, the tokens that may be drawn."""
    starts = [0]
    for row in rows:
        starts.append(starts[-1] + 1 + len(row.drafts))
    logits: Tensor = torch.zeros(starts[-1], TOKENIZER.vocab_size)
    masks.begin(rows, starts)
    masks.apply(logits)
    found = [set(line.isfinite().nonzero()[:, 0].tolist()) for line in logits]
    return [found[start:end] for start, end in pairwise(starts)]


def texts() -> dict[str, tuple[str, list[int]]]:
    """Return grammars and a reply to each."""
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
def test_a_draft_has_the_mask_that_it_would_have_without_drafts(name: str, num_replayed: int) -> None:
    grammar, text = texts()[name]
    one_by_one = GrammarMasks(compiled())
    expected = []
    row = row_of(grammar)
    for token in text:
        set_drafts(row, ())
        expected += allowed_tokens(one_by_one, [row])[0]
        assert token in expected[-1]
        row.generated.append(token)
    for place in range(num_replayed, len(text)):
        masks, row = GrammarMasks(compiled()), row_of(grammar, generated=text[:place], num_replayed=num_replayed)
        drafts = masks.allowed(row, [*text[place : place + NUM_DRAFTS - 1], 0])
        wanted = text[place : place + NUM_DRAFTS - 1]
        if END not in wanted and name == "schema":
            assert list(drafts) == wanted  # a byte 0 is in no document
        set_drafts(row, drafts[: len(wanted)])
        other = row_of("", request_id=2, generated=[5])
        plain = row_of(ANSWER.text, request_id=3)
        found = allowed_tokens(masks, [plain, row, other])
        until = min(len(found[1]), len(text) - place)
        assert found[1][:until] == expected[place : place + until], place
        assert found[2] == [set(range(TOKENIZER.vocab_size))]
        assert found[0] == [allowed_tokens(GrammarMasks(compiled()), [plain])[0][0]]


def test_drafts_are_cut_where_the_grammar_refuses_them() -> None:
    masks, text = GrammarMasks(compiled()), TOKENIZER.tokenize('{"a": true}')
    row = row_of(ANSWER.text)
    assert list(masks.allowed(row, [*text[:3], 0, *text[4:]])) == text[:3]
    assert list(masks.allowed(row, [0])) == []
    assert list(masks.allowed(row, [])) == []
    assert list(masks.allowed(row_of("", 2), [0, 1])) == [0, 1]
    masks.forget(1)
    assert masks._rows == {}


def test_ranks_that_draw_nothing_only_cut_drafts() -> None:
    masks, row = GrammarMasks(compiled(), are_drawn_here=False), row_of(ANSWER.text)
    assert list(masks.allowed(row, [0])) == []
    assert allowed_tokens(masks, [row]) == [[set(range(TOKENIZER.vocab_size))]]


def test_a_row_that_leaves_its_grammar_is_noted_alone() -> None:
    grammars = compiled()
    masks, other = GrammarMasks(grammars), row_of(ANSWER.text, request_id=2)
    row = row_of(ANSWER.text, generated=[0])
    assert list(masks.allowed(row, [5])) == []
    found = allowed_tokens(masks, [row, other])
    assert found[0] == [set(range(TOKENIZER.vocab_size))]
    assert found[1] == allowed_tokens(GrammarMasks(compiled()), [row_of(ANSWER.text)])[0]
    failures = grammars.take_failures()
    assert list(failures) == [1] and "too complex to go on" in failures[1]
    assert grammars.take_failures() == {}
