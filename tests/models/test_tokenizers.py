"""Tokenizers of model directories."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

from megatron_mamba_cache.build import TokenIdTokenizer
from megatron_mamba_cache.models.tokenizers.hugging_face_tokenizer import HuggingFaceTokenizer, load_tokenizer
from megatron_mamba_cache.models.tokenizers.token_reader import image_error, image_tokens_of
from tests.command_line.tiny_directories import END_OF_TEXT, VOCABULARY, save_tokenizer
from tests.models.tokenizer_kinds import NOT_SPECIAL, THREE_KINDS, TURN_END, save_kind

TEXTS = ["", "def f(x):\n\treturn x  # é", " ", "\r\n\r\n", "日本語 🙂", f"a{END_OF_TEXT}b", "\x00\x1b[31m" * 3]
CHAT = [{"role": "user", "content": "May I pass?"}, {"role": "assistant", "content": "Yes."}]
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def loaded(directory: Path, vocab_size: int = VOCABULARY) -> HuggingFaceTokenizer:
    tokenizer = load_tokenizer(directory, vocab_size)
    assert tokenizer is not None
    return tokenizer


def change_json(path: Path, **changes: object) -> None:
    fields = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**fields, **changes}))


def save_with_bos(directory: Path) -> PreTrainedTokenizerFast:
    """Write a tokenizer that adds the begin-of-text token."""
    backend = save_tokenizer(directory).backend_tokenizer
    backend.post_processor = TemplateProcessing(single=f"{END_OF_TEXT} $A", special_tokens=[(END_OF_TEXT, 0)])
    saved = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT)
    saved.save_pretrained(directory)
    return saved


def save_qwen(directory: Path) -> Qwen3_5Tokenizer:
    """Write the tokenizer of a multimodal Qwen3.5 model, with the other files of such models."""
    saved = json.loads(save_tokenizer(directory).backend_tokenizer.to_str())["model"]
    tokenizer = Qwen3_5Tokenizer(vocab=saved["vocab"], merges=[tuple(pair) for pair in saved["merges"]])
    tokenizer.save_pretrained(directory)
    change_json(directory / "config.json", model_type="qwen3_5", text_config={"model_type": "qwen3_5_text"})
    change_json(
        directory / "tokenizer_config.json", processor_class="Qwen3VLProcessor", tokenizer_class="Qwen2Tokenizer"
    )
    change_json(directory / "preprocessor_config.json", processor_class="Qwen3VLProcessor", patch_size=16)
    change_json(directory / "video_preprocessor_config.json", processor_class="Qwen3VLProcessor")
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return tokenizer


def hide_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)


@pytest.mark.parametrize("save", [save_tokenizer, save_with_bos, save_qwen])
@pytest.mark.parametrize("text", TEXTS)
def test_tokens_match_transformers_and_decode_to_the_text(save: object, text: str, tmp_path: Path) -> None:
    save(tmp_path)  # type: ignore[operator]
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), loaded(tmp_path)
    tokens = ours.tokenize(text)
    assert tokens == theirs(text)["input_ids"]
    assert ours.detokenize(tokens) == text.replace(END_OF_TEXT, "")
    assert ours.detokenize(tokens, skip_special_tokens=False).removeprefix(END_OF_TEXT) == text
    assert (ours.bos, ours.eod, ours.vocab_size) == (theirs.bos_token_id, theirs.eos_token_id, VOCABULARY)


def test_bos_is_not_added_to_a_text_that_starts_with_bos(tmp_path: Path) -> None:
    save_with_bos(tmp_path)
    tokenizer = loaded(tmp_path)
    assert tokenizer.tokenize("a") == tokenizer.tokenize(f"{END_OF_TEXT}a")


@pytest.mark.parametrize(
    ("generation", "model", "inner", "expected", "without"),
    [
        ([7, 9], None, None, (7, 9, 0), (7, 9)),
        (5, 6, 7, (5, 0, 6, 7), (5, 6, 7)),
        (None, [3, 0, 3], None, (0, 3), (3, 0)),
        ([], [], [4, 5], (0, 4, 5), (4, 5)),
        (0, 0, 0, (0,), (0,)),
        (None, None, None, (0,), (-1,)),
        (VOCABULARY - 1, None, VOCABULARY - 2, (VOCABULARY - 1, 0, VOCABULARY - 2), (VOCABULARY - 1, VOCABULARY - 2)),
    ],
)
def test_end_tokens_are_collected_from_every_file(
    generation: object,
    model: object,
    inner: object,
    expected: tuple[int, ...],
    without: tuple[int, ...],
    tmp_path: Path,
) -> None:
    save_tokenizer(tmp_path)
    change_json(tmp_path / "generation_config.json", eos_token_id=generation)
    change_json(tmp_path / "config.json", eos_token_id=model, text_config={"eos_token_id": inner})
    tokenizer = loaded(tmp_path)
    assert (tokenizer.eod, *tokenizer.other_end_ids) == expected
    (tmp_path / "tokenizer_config.json").unlink()  # which names the tokenizer's own
    tokenizer = loaded(tmp_path)
    assert (tokenizer.eod, *tokenizer.other_end_ids) == without


def test_image_tokens_are_read_from_config_and_tokenizer(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    assert loaded(tmp_path).image_tokens == {}
    fields: dict[str, object] = {"image_token_id": 5, "video_token_id": None, "vision_start_token_id": 3}
    others = {"image_size": 7, "audio_token_index": [8, 9], "eos_token_id": 1, "text_config": {"pad_token_id": 2}}
    change_json(tmp_path / "config.json", **fields, **others)
    named = {5: "image_token_id", 3: "vision_start_token_id", 8: "audio_token_index", 9: "audio_token_index"}
    assert loaded(tmp_path).image_tokens == named
    assert image_tokens_of(tmp_path) == named
    change_json(tmp_path / "tokenizer_config.json", additional_special_tokens=["<|image_pad|>"])
    tokenizer = loaded(tmp_path, VOCABULARY + 1)
    assert tokenizer.image_tokens == {**named, tokenizer.id_of("<|image_pad|>"): "<|image_pad|>"}
    change_json(tmp_path / "config.json", image_token_id="five")
    with pytest.raises(
        ValueError, match=r"config\.json: image_token_id='five', but must be a token id; correct the file"
    ):
        loaded(tmp_path)


def test_prompt_with_an_image_token_is_refused(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    change_json(tmp_path / "config.json", image_token_id=5)
    words = "the prompt has token 5 (image_token_id) at position 2, which is for images"
    for tokenizer in (loaded(tmp_path), TokenIdTokenizer(8, image_tokens_of(tmp_path))):
        assert (image_error(tokenizer, (1, 4, 5, 5)) or "").startswith(words)
        assert image_error(tokenizer, (1, 4)) is None
    assert image_error(TokenIdTokenizer(8), (5,)) is None


def test_tokenizer_without_special_tokens_has_no_bos_or_eod(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    tokenizer = loaded(tmp_path)
    assert (tokenizer.bos, tokenizer.eod) == (None, -1)


def test_special_tokens_are_read_as_text_or_as_objects(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": "a"}, "eos_token": None}))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": "c", "eos_token": "b"}))
    tokenizer = loaded(tmp_path)
    assert [tokenizer.bos, tokenizer.eod] == [*tokenizer.tokenize("a"), *tokenizer.tokenize("b")]


def declared(content: str, **flags: bool) -> dict[str, object]:
    usual = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word", "special"), False)
    return {"content": content, **usual, **flags}


def typed(content: str, **flags: bool) -> dict[str, object]:
    """Return a token as transformers writes it outside of `added_tokens_decoder`."""
    return {"__type": "AddedToken", **declared(content, **flags)}


DECLARED: dict[str, dict[str, Any]] = {
    "by role": {"eos_token": "</s>", "bos_token": typed("<s>"), "extra_special_tokens": ["<|im_start|>", TURN_END]},
    "by id": {"added_tokens_decoder": {"4": declared(TURN_END, special=True), "3": declared("<|im_start|>")}},
    "without an id": {"eos_token": "<|new|>", "added_tokens_decoder": {"9999": declared("two words", rstrip=True)}},
    "in a list": {"additional_special_tokens": [typed(TURN_END, lstrip=True, special=True), "<|new|>", "</s>"]},
    "special where the vocabulary has text": {"pad_token": NOT_SPECIAL[0], "mask_token": None},
}


@pytest.mark.parametrize("kind", THREE_KINDS)
@pytest.mark.parametrize("fields", DECLARED.values(), ids=DECLARED)
@pytest.mark.parametrize("keeps", [True, False])
def test_tokens_declared_only_in_the_config_match_transformers(
    fields: dict[str, Any], kind: str, keeps: bool, tmp_path: Path
) -> None:
    save_kind(tmp_path, kind)
    if not keeps:
        change_json(tmp_path / "tokenizer.json", added_tokens=[])
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **fields}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), loaded(tmp_path, 2000)
    text = f"a {TURN_END} b<s></s><|im_start|>{NOT_SPECIAL[0]}x<|new|> two words  c"
    tokens = theirs(text)["input_ids"]
    assert ours.tokenize(text) == tokens
    for hides in (True, False):
        assert ours.detokenize(tokens, skip_special_tokens=hides) == theirs.decode(tokens, skip_special_tokens=hides)
    assert (ours.bos, None if ours.eod < 0 else ours.eod) == (theirs.bos_token_id, theirs.eos_token_id)


def test_declared_token_without_a_model_id_is_ignored(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    change_json(tmp_path / "tokenizer_config.json", pad_token="[PAD]", added_tokens_decoder=[3, {"content": None}])
    fitting, larger = loaded(tmp_path), loaded(tmp_path, VOCABULARY + 1)
    assert (fitting.id_of("[PAD]"), larger.id_of("[PAD]")) == (None, VOCABULARY)
    assert larger.tokenize("[PAD]") == [VOCABULARY] and fitting.detokenize(fitting.tokenize("[PAD]")) == "[PAD]"


def test_batch_settings_neither_truncate_nor_pad_prompts(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    path = str(tmp_path / "tokenizer.json")
    backend = Tokenizer.from_file(path)
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    backend.save(path)
    assert loaded(tmp_path).detokenize(loaded(tmp_path).tokenize("a longer text")) == "a longer text"


def test_unused_ids_decode_to_no_text(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    tokenizer = loaded(tmp_path, vocab_size=2 * VOCABULARY)
    assert tokenizer.detokenize([VOCABULARY + 1, *tokenizer.tokenize("a"), -1, 2**40]) == "a"
    assert tokenizer.vocab_size == 2 * VOCABULARY


def test_directory_without_tokenizer_files_has_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert load_tokenizer(tmp_path, VOCABULARY) is None


def test_error_for_token_ids_beyond_the_vocabulary_gives_both_sizes(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    loaded(tmp_path, VOCABULARY)
    with pytest.raises(ValueError) as raised:
        load_tokenizer(tmp_path, VOCABULARY - 1)
    for part in (f"{tmp_path}/tokenizer.json", f"{tmp_path}/config.json is 511", "up to 511"):
        assert part in str(raised.value)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff"])
def test_error_names_a_damaged_tokenizer_file(name: str, content: bytes, tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=name):
        load_tokenizer(tmp_path, VOCABULARY)


def test_tokenizer_json_does_not_need_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tokenizer(tmp_path)
    hide_transformers(monkeypatch)
    assert loaded(tmp_path).detokenize(loaded(tmp_path).tokenize("text")) == "text"


def test_other_tokenizers_are_read_by_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = ByT5Tokenizer()
    theirs.save_pretrained(tmp_path)
    assert not (tmp_path / "tokenizer.json").exists()
    ours = loaded(tmp_path, vocab_size=len(theirs))
    assert ours.tokenize("é\n") == theirs("é\n")["input_ids"]
    assert ours.detokenize([*ours.tokenize("é\n"), 10**6]) == "é\n"
    assert (ours.bos, ours.eod) == (None, theirs.eos_token_id)
    with pytest.raises(ValueError, match=f"up to {len(theirs) - 1}"):
        load_tokenizer(tmp_path, len(theirs) - 1)
    hide_transformers(monkeypatch)
    with pytest.raises(ValueError, match=r"pip install 'megatron-mamba-cache\[hf\]'"):
        load_tokenizer(tmp_path, len(theirs))


def test_unreadable_tokenizer_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "NoSuchTokenizer"}')
    with pytest.raises(ValueError, match="transformers cannot read"):
        load_tokenizer(tmp_path, VOCABULARY)


@pytest.mark.parametrize("file", ["chat_template.jinja", "tokenizer_config.json"])
def test_rendered_chat_matches_transformers(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tokenizer(tmp_path)
    if file.endswith(".json"):
        change_json(tmp_path / file, chat_template=TEMPLATE)
    else:
        (tmp_path / file).write_text(TEMPLATE)
    tokenizer = loaded(tmp_path)
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.render_chat(CHAT) == "<user>May I pass?<assistant>Yes.<assistant>"
    hide_transformers(monkeypatch)
    with pytest.raises(ValueError, match="transformers is needed"):
        loaded(tmp_path).render_chat(CHAT)


def test_detokenizer_shows_only_the_listed_special_tokens(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    tokenizer = loaded(tmp_path)
    special = sorted(tokenizer._codec.special_ids)
    texts = [tokenizer.token_of(token) for token in special]
    tokens = [*special, *tokenizer.tokenize("pass")]
    assert special and tokenizer.detokenizer(())(tokens) == tokenizer.detokenize(tokens)
    assert tokenizer.detokenizer(texts)(tokens) == tokenizer.detokenize(tokens, skip_special_tokens=False)
    assert texts[0] in tokenizer.detokenizer(texts[:1])(tokens)
    assert tokenizer.detokenizer(["<none>"])(tokens) == tokenizer.detokenize(tokens)


def test_chat_that_cannot_be_rendered_is_refused(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    tokenizer = loaded(tmp_path)
    assert tokenizer.chat_template == ""
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer.render_chat(CHAT)
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValueError, match="roles must alternate"):
        loaded(tmp_path).render_chat(CHAT)


def test_deeply_nested_messages_are_refused(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0] | tojson }}")
    tokenizer = load_tokenizer(tmp_path, VOCABULARY)
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    content: Any = "x"
    for _ in range(sys.getrecursionlimit()):
        content = [content]
    with pytest.raises(ValueError, match="nested too deeply for the model's chat template"):
        tokenizer.render_chat([{"role": "user", "content": content}])


@pytest.mark.parametrize("named", ["2", {}, [[1]], ["2"], -1, 1.5, True, VOCABULARY, [0, 10**12]])
@pytest.mark.parametrize("file", ["generation_config.json", "config.json", "text_config.", "llm_config."])
def test_end_token_that_is_not_a_token_id_is_refused(file: str, named: object, tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    fields: dict[str, Any] = {"eos_token_id": named}
    is_inner = file.endswith("_config.")
    path = tmp_path / ("config.json" if is_inner else file)
    path.write_text(json.dumps({file.removesuffix("."): fields} if is_inner else fields))
    with pytest.raises(ValueError) as raised:
        load_tokenizer(tmp_path, VOCABULARY)
    inner = file if is_inner else ""
    assert str(raised.value).startswith(f"{path}: {inner}eos_token_id={named!r}, but must be a token id")
    assert f"between 0 and {VOCABULARY - 1}" in str(raised.value) and "\n" not in str(raised.value)


SOURCES = {"default": "{{ messages[0].content }}", "tool_use": "{{ tools | length }} tools", "rag": "documents"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize("names", [["default"], ["default", "tool_use"], ["rag", "default", "tool_use"], ["tool_use"]])
@pytest.mark.parametrize("are_files", [True, False])
def test_choice_among_named_templates_matches_transformers(names: list[str], are_files: bool, tmp_path: Path) -> None:
    saved = save_tokenizer(tmp_path)
    saved.chat_template = {name: SOURCES[name] for name in names}
    saved.save_pretrained(tmp_path, save_jinja_files=are_files)
    assert (tmp_path / "additional_chat_templates").exists() is (are_files and names != ["default"])
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), loaded(tmp_path)
    for tools, source in (([], ours.chat_template), ([TOOL], ours.tool_template)):
        try:
            expected = theirs.apply_chat_template(CHAT, tools=tools or None, tokenize=False)
        except ValueError:
            assert source == ""
            with pytest.raises(ValueError, match=r"no default chat template, only 'tool_use'"):
                ours.render_chat(CHAT, tools)
            continue
        assert ours.render_chat(CHAT, tools) == expected
        assert source == theirs.get_chat_template(tools=tools or None)
        assert expected == ("1 tools" if tools and "tool_use" in names else CHAT[0]["content"])


def test_template_files_override_the_config_field_and_old_files(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "old"}))
    assert loaded(tmp_path).render_chat(CHAT) == loaded(tmp_path).chat_template == "old"
    change_json(tmp_path / "tokenizer_config.json", chat_template=[{"name": "default", "template": "field"}])
    assert loaded(tmp_path).render_chat(CHAT) == loaded(tmp_path).chat_template == "field"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert loaded(tmp_path).render_chat(CHAT) == loaded(tmp_path).chat_template == "file"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    assert [loaded(tmp_path).render_chat(CHAT, tools) for tools in ([], [TOOL])] == ["file", "tools"]


@pytest.mark.parametrize("name", ["chat_template.jinja", "additional_chat_templates/rag.jinja", "chat_template.json"])
def test_error_names_a_damaged_chat_template(name: str, tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"\xff{")
    with pytest.raises(ValueError, match=name):
        load_tokenizer(tmp_path, VOCABULARY)
