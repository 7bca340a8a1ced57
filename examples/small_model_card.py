"""The model card of the small model of Python source, as Markdown."""

from collections.abc import Mapping, Sequence

from measure_bits_per_byte import Score

CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
tags: [nemotron_h, mamba2, python, tiny]
---

# A small model of Python source

A hybrid Mamba2 + attention language model in the Hugging Face layout of NemotronH. It ships with megatron-mamba-cache
so that the examples run without a download. It is small enough for a repository, and its output is readable.

| | |
|---|---|
| layers | `{pattern}`: M Mamba2, * attention without position embeddings, - MLP with squared ReLU |
| dimensions | hidden size {hidden_size}, MLP size {mlp_size}, context of {sequence_length:,} tokens |
| Mamba2 | {mamba_heads} heads x {mamba_head_dim}, {groups} groups, state {state_size}, convolution 4, chunk 64 |
| attention | {attention_heads} query heads and {key_value_heads} KV heads with {attention_head_dim} channels |
| parameters | {parameters:,}, stored in bf16; input and output embeddings are not tied |
| tokenizer | byte-level BPE, {vocabulary:,} tokens, from the same text; `<|endoftext|>` begins and ends documents |

## Evaluation

| files | bytes | bits per byte | xz -9e |
|---|---|---|---|
{scores}
Each file is assigned to a split by a hash of its path. Neither of these two splits was used to train the model or the
tokenizer. They contain none of CPython's tests, but some tests in the training text exercise modules in these splits.
`python examples/measure_bits_per_byte.py` repeats the measurement on the held-out files. Each document is scored as a
whole, including the line with its name, in windows of {sequence_length:,} tokens that overlap by half. CPython
versions other than {cpython} have different files and give different results.

## Prompts

A document is a line that names the file, followed by the source. Sample with top-k 20 and a temperature between 0.9
and 1. At lower temperatures, and especially in greedy decoding, the text soon repeats itself.

```
# file: json/decoder.py
\"\"\"Implementation of JSONDecoder
```

## Conversations

With `chat_template.jinja`, the server can hold conversations. A conversation is one file, to which the user and the
model alternately append text. Start with a message such as `# file: bridge.py` and a few lines of code.

## Training

- Text: {files:,} files, {size_bytes:,} bytes, {text_tokens:,} tokens from the standard library of CPython {cpython},
  including its tests, without tables such as `encodings`. The files are under the PSF License Version 2
  (https://docs.python.org/3/license.html), © Python Software Foundation; so is any text that the model repeats.
- Command: `{command}`
- AdamW with bf16 autocast on one GPU: {tokens:,} tokens ({epochs:.1f} epochs) in {steps:,} steps with
  {batch_size} x {sequence_length:,} tokens each. The training time is fixed, so a faster GPU processes more tokens.
- Machine: {device}; torch {torch}, transformers {transformers}, tokenizers {tokenizers}.

## Limitations

The model is only useful for trying out software. It generates text that looks like Python: names, signatures and
docstrings are plausible, but most of the code makes no sense. The model was trained on no other language, does not
follow instructions, and repeats passages from the standard library.
"""

HEAD = """\
## Draft head

`model.safetensors` also has a multi-token prediction (MTP) head of {parameters:,} parameters, stored in bf16: an
attention layer and an MLP layer of the model's dimensions, which read the model's hidden state and its newest token.
`--drafter mtp --num-speculative-tokens 3` drafts with it. On the held-out files, this share of drafts, in percent, is
what the model finds most likely, given that the drafts before it are:

| draft | {positions} |
|---|{rules}|
| most likely | {shares} |

- The model's weights were frozen. The head learned the model's probabilities of the next {depth} tokens.
- Command: `{command}`
- Text: as for the model. {tokens:,} tokens, each learned {passes} times, in {steps:,} steps with AdamW.
- Machine: {device}; torch {torch}, transformers {transformers}.

"""
LIMITATIONS = "## Limitations"


def with_head(card: str, facts: Mapping[str, object], shares: Sequence[float]) -> str:
    """Return a model card with a section about the model's MTP head, in place of an earlier one.

    Args:
        facts: Values for the names in braces in the section's text, except those about the drafts.
        shares: For each draft, the share of drafts that are right, of those after right ones.
    """
    before, after = card.split(LIMITATIONS)
    section = HEAD.format(
        **facts,
        positions=" | ".join(str(number + 1) for number in range(len(shares))),
        rules="|".join(["---:"] * len(shares)),
        shares=" | ".join(f"{100 * share:.0f}" for share in shares),
    )
    return before.split(HEAD.splitlines()[0])[0] + section + LIMITATIONS + after


def model_card(facts: Mapping[str, object], scores: Mapping[str, Score]) -> str:
    """Return the card, without paths of this machine.

    Args:
        facts: Values for the names in braces in the card's text, except the scores.
        scores: Split of the library → the model's score on it.
    """
    rows = [
        f"| {part} | {score.size_bytes:,} | **{score.bits_per_byte:.3f}** | {score.xz_bits_per_byte:.3f} |\n"
        for part, score in scores.items()
    ]
    return CARD.format(**facts, scores="".join(rows))
