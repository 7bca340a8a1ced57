"""The model card of the small model of Python source, as Markdown."""

from collections.abc import Mapping

from measure_bits_per_byte import Score

CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
tags: [nemotron_h, mamba2, python, tiny]
---

# A small model of Python source

A hybrid Mamba2 + attention language model in the Hugging Face layout of NemotronH. It ships with megatron-mamba-cache
so that its examples run without a download: small enough for a repository, trained enough to write readable text.

| | |
|---|---|
| layers | `{pattern}`: M Mamba2, * attention without positions, - MLP with squared ReLU |
| sizes | hidden {hidden_size}, MLP {mlp_size}, context {sequence_length:,} tokens |
| Mamba2 | {mamba_heads} heads of {mamba_head_dim}, {groups} groups, state {state_size}, convolution 4, chunks of 64 |
| attention | {attention_heads} heads of {attention_head_dim}, {key_value_heads} of keys and values |
| parameters | {parameters:,}, stored in bf16; input and output embeddings are not tied |
| tokenizer | byte-level BPE, {vocabulary:,} tokens, of the same text; `<|endoftext|>` begins and ends documents |

## How well it predicts

| files | bytes | bits per byte | xz -9e |
|---|---|---|---|
{scores}
Neither split was used to train the model or the tokenizer; a hash of a file's path assigns it to a split. Both exclude
CPython's own tests, but the tests in the training text exercise modules of both.
`python examples/measure_bits_per_byte.py` measures the held-out files again. Each document is scored whole, including
the line with its name, in windows of {sequence_length:,} tokens that overlap by half. CPython versions other than
{cpython} have other files and give other numbers.

## Prompts

A document is a line that names the file, then the source. Sample at temperature 0.9 to 1, with top-k 20: at
lower temperatures, and above all in greedy decoding, the text soon repeats itself.

```
# file: json/decoder.py
\"\"\"Implementation of JSONDecoder
```

## Conversations

`chat_template.jinja` lets the server hold conversations: a conversation is one file, to which the user and the model
append text in turn. Start with a message such as `# file: bridge.py` and a few lines of code.

## Training

- Text: {files:,} files, {size_bytes:,} bytes, {text_tokens:,} tokens of the standard library of CPython {cpython},
  including its tests, without tables such as `encodings`. The files are under the PSF License Version 2
  (https://docs.python.org/3/license.html), © Python Software Foundation; so is any text that the model repeats.
- Command: `{command}`
- {tokens:,} tokens in {steps:,} steps of {batch_size} x {sequence_length:,}, {epochs:.1f} epochs; AdamW, on a
  GPU in bf16 autocast. The training time is fixed, so a faster GPU sees more tokens.
- Machine: {device}; torch {torch}, transformers {transformers}, tokenizers {tokenizers}.

## What it is not good for

The model is only good for trying out software. It writes text that looks like Python: names, signatures and docstrings
are plausible, but the code mostly makes no sense. It knows no other language, follows no instructions, and repeats
passages of the standard library.
"""


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
