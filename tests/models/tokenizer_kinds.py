"""Small tokenizers of the kinds of published models, with and without begin and end tokens, as saved files."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

BEGIN, END, UNKNOWN, TURN, TURN_END, CALL = "<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>", "<tool_call>"
SPECIAL = (UNKNOWN, BEGIN, END, TURN, TURN_END)
NOT_SPECIAL = (CALL, "</tool_call>")
TEXTS = (
    "The quick brown fox jumps over the lazy dog, and 42 others; it's 3.14 or so.",
    '{"name": "get_weather", "arguments": {"city": "Berlin", "days": [1, 2, 3], "ok": true, "no": null}}',
    "def f(x):\n    return x + 1\n\n\tif a == b:\n        pass\n",
    "Falsches Üben von Xylophonmusik quält jeden größeren Zwerg. Ça été, où? Señor, mañana.",
    "Съешь же ещё этих мягких французских булок. Ξεσκεπάζω την ψυχοφθόρα βδελυγμία.",
)
"""Training text of the vocabularies; characters of other scripts become bytes or unknown tokens."""
SCRIPTS = {
    "Latin": "The lazy dog déjà vu, naïve!",
    "Greek": "Ξεσκεπάζω την ψυχή",
    "Cyrillic": "Съешь же ещё булок",
    "Arabic": "مرحبا بالعالم",
    "Hebrew": "שלום עולם",
    "Devanagari": "नमस्ते दुनिया",
    "Bengali": "ওহে বিশ্ব",
    "Thai": "สวัสดีชาวโลก",
    "Korean": "안녕하세요 세계",
    "Japanese": "こんにちは世界",
    "Chinese": "你好世界",
    "emoji": "🙂👩‍👩‍👧 🇩🇪 x",
}
TEMPLATE = (
    "{{ bos_token }}{% if tools %}" + TURN + "system\n{{ tools | tojson }}" + TURN_END + "\n{% endif %}"
    "{% for message in messages %}"
    + TURN
    + "{{ message.role }}\n{{ message.content }}"
    + "{% for call in message.tool_calls %}\n<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    + TURN_END
    + "\n{% endfor %}{% if add_generation_prompt %}"
    + TURN
    + "assistant\n{% endif %}"
)
"""A chat template that begins with the begin token and writes calls like Hermes."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of tokenizer.

    Args:
        make: Returns one without begin and end tokens.
        covers_all: True if every text can be written with its tokens.
    """

    make: Callable[[], Tokenizer]
    covers_all: bool = True


def _byte_level() -> Tokenizer:
    return _byte_level_with(pre_tokenizers.ByteLevel(add_prefix_space=False))


def _byte_level_prefix_space() -> Tokenizer:
    return _byte_level_with(pre_tokenizers.ByteLevel(add_prefix_space=True))


def _byte_level_split() -> Tokenizer:
    """Return a tokenizer that splits words by its own regular expression, like Llama 3."""
    words = Regex(r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+")
    split = pre_tokenizers.Split(words, "isolated")
    return _byte_level_with(pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)]))


def _byte_level_with(pre_tokenizer: Any) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=[*SPECIAL], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def _sentence_piece() -> Tokenizer:
    """Return BPE with byte fallback whose normalizer adds a leading space to a text, like Llama 2."""
    tokenizer = _sentence_piece_vocabulary()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


def _sentence_piece_first() -> Tokenizer:
    """Return BPE with byte fallback that adds a leading space to a text's first word, like Mistral."""
    tokenizer = _sentence_piece_vocabulary()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return tokenizer


def _sentence_piece_never() -> Tokenizer:
    """Return BPE with byte fallback without a leading space, like Gemma."""
    tokenizer = _sentence_piece_vocabulary()
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def _sentence_piece_vocabulary() -> Tokenizer:
    found = _trained_pieces()
    pieces = [*SPECIAL, *_byte_tokens(), *found["vocab"]]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    merges = [tuple(merge) for merge in found["merges"]]
    model = models.BPE(vocab=vocabulary, merges=merges, unk_token=UNKNOWN, byte_fallback=True, fuse_unk=True)
    tokenizer = Tokenizer(model)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _unigram(scheme: str, byte_fallback: bool) -> Tokenizer:
    pieces = [*SPECIAL, *(_byte_tokens() if byte_fallback else ()), *_trained_pieces()["vocab"]]
    scored = [(piece, -10.0 - number / 1000) for number, piece in enumerate(dict.fromkeys(pieces))]
    tokenizer = Tokenizer(models.Unigram(scored, unk_id=0, byte_fallback=byte_fallback))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    if byte_fallback:
        tokenizer.decoder = decoders.Sequence([tokenizer.decoder, decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


@cache
def _trained_pieces() -> dict[str, Any]:
    """Return the vocabulary and the merges of BPE in which a space is written `▁`."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=420, show_progress=False))
    found: dict[str, Any] = json.loads(trained.to_str())["model"]
    return found


def _byte_tokens() -> list[str]:
    return [f"<0x{byte:02X}>" for byte in range(256)]


KINDS = {
    "byte-level BPE": Kind(_byte_level),
    "byte-level BPE with a prefix space": Kind(_byte_level_prefix_space),
    "byte-level BPE that splits": Kind(_byte_level_split),
    "SentencePiece BPE": Kind(_sentence_piece),
    "SentencePiece BPE, first": Kind(_sentence_piece_first),
    "SentencePiece BPE, never": Kind(_sentence_piece_never),
    "unigram": Kind(lambda: _unigram("always", byte_fallback=False), covers_all=False),
    "unigram, first": Kind(lambda: _unigram("first", byte_fallback=False), covers_all=False),
    "unigram, never": Kind(lambda: _unigram("never", byte_fallback=False), covers_all=False),
    "unigram with bytes": Kind(lambda: _unigram("always", byte_fallback=True)),
}
ENDS = {"plain": (), "begin": (BEGIN,), "end": (END,), "both": (BEGIN, END)}
"""The special tokens added around a text."""
THREE_KINDS = ("byte-level BPE", "SentencePiece BPE", "unigram")
CASES = [(kind, ends) for kind in KINDS for ends in ENDS if ends in ("plain", "both") or kind in THREE_KINDS]
"""Kinds, and names of `ENDS`."""


@cache
def saved_form(kind: str, ends: str) -> str:
    """Return the `tokenizer.json` of a kind that adds these tokens around a text."""
    tokenizer = KINDS[kind].make()
    tokenizer.add_special_tokens([*SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in NOT_SPECIAL])
    if ENDS[ends]:
        parts = [*(BEGIN,) * (BEGIN in ENDS[ends]), "$A", *(END,) * (END in ENDS[ends])]
        named = [(text, tokenizer.token_to_id(text)) for text in ENDS[ends]]
        template = processors.TemplateProcessing(single=" ".join(parts), special_tokens=named)
        tokenizer.post_processor = template
    return tokenizer.to_str()


def save_kind(directory: Path, kind: str, ends: str = "plain", template: str | None = TEMPLATE) -> Any:
    """Write a kind's tokenizer as transformers saves it, and return transformers' own.

    Args:
        ends: A name of `ENDS`.
        template: The chat template; None for a tokenizer without one.
    """
    saved = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(saved_form(kind, ends)),
        bos_token=BEGIN,
        eos_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=[TURN, TURN_END],
        chat_template=template,
    )
    saved.save_pretrained(directory)
    return saved


def size_of(directory: Path) -> int:
    """Return the size of a saved vocabulary."""
    return Tokenizer.from_file(str(directory / "tokenizer.json")).get_vocab_size()
