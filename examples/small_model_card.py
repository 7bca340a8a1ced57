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
so that its example has something to generate with: small enough to live in a repository, trained enough to be read.

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
Both parts were kept out of the training of the model and of the tokenizer; a hash of a file's path puts it in its part.
They hold no file of CPython's own tests, but the tests in the training text do exercise modules of both.
`python examples/measure_bits_per_byte.py` measures the held-out files again. Each document is scored whole, the line
with its name included, in windows of {sequence_length:,} tokens that overlap by half. Another version of CPython than
{cpython} has other files and gives another number.

## Prompts

A document is a line that names the file, then the source. Sample at temperature 0.9 to 1, with top-k 20: lower
temperatures, and the likeliest token each time above all, soon repeat themselves.

```
# file: json/decoder.py
\"\"\"Implementation of JSONDecoder
```

## Conversations

`chat_template.jinja` is for the server's sake: a conversation is one file, in which what was given and what the model
wrote follow each other as they are. A first message such as `# file: bridge.py` and a few lines begins it.

## Training

- Text: {files:,} files, {size_bytes:,} bytes, {text_tokens:,} tokens of the standard library of CPython {cpython}, its
  tests among them, without tables such as `encodings`. They are under the PSF License Version 2
  (https://docs.python.org/3/license.html), © Python Software Foundation; so is what the model repeats from them.
- Command: `{command}`
- {tokens:,} tokens seen in {steps:,} steps of {batch_size} x {sequence_length:,}, {epochs:.1f} epochs; AdamW, on a
  GPU in bf16 autocast. The time is the limit, so a faster card sees more tokens.
- Machine: {device}; torch {torch}, transformers {transformers}, tokenizers {tokenizers}.

## What it is not good for

Anything but trying software out. It writes text that looks like Python: names, signatures and docstrings are plausible,
what the code does mostly is not. It knows no other language, follows no instructions, and repeats passages of the
standard library.
"""


def model_card(facts: Mapping[str, object], scores: Mapping[str, Score]) -> str:
    """Return the card; it names no path of the machine it was made on.

    Args:
        facts: A value for each name that the card's text has in braces, except the scores.
        scores: Part of the library → how well the model predicts it.
    """
    rows = [
        f"| {part} | {score.size_bytes:,} | **{score.bits_per_byte:.3f}** | {score.xz_bits_per_byte:.3f} |\n"
        for part, score in scores.items()
    ]
    return CARD.format(**facts, scores="".join(rows))
