"""The shipped tokenizer with chat templates of families of models."""

import shutil
from pathlib import Path

from megatron_mamba_cache.command_line.model_choice import SHIPPED_MODEL
from megatron_mamba_cache.models.tokenizers.hugging_face_tokenizer import HuggingFaceTokenizer, load_tokenizer

_START = (
    "{% if tools %}# tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}"
)
_END = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_AS_JSON = '{"name": {{ c.function.name | tojson }}, "arguments": {{ c.function.arguments | tojson }}}'

TEMPLATES = {
    "hermes": _START
    + "{% for c in m.tool_calls or [] %}\n<tool_call>\n"
    + _AS_JSON
    + "\n</tool_call>{% endfor %}"
    + _END,
    "qwen3_coder": _START + "{% for c in m.tool_calls or [] %}\n<tool_call>\n<function={{ c.function.name }}>\n"
    "{% for key, value in c.function.arguments.items() %}<parameter={{ key }}>\n{{ value }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>{% endfor %}" + _END,
    "nemotron_nano_v2": _START
    + "{% if m.tool_calls %}<TOOLCALL>[{% for c in m.tool_calls %}"
    + _AS_JSON
    + "{{ ', ' if not loop.last }}{% endfor %}]</TOOLCALL>{% endif %}"
    + _END,
}
DROPS_REASONING = TEMPLATES["hermes"].replace("m.reasoning_content %}", "false and '</think>' %}")


def agent_tokenizer(folder: Path, template: str) -> HuggingFaceTokenizer:
    """Return the shipped tokenizer with another chat template."""
    folder.mkdir(exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SHIPPED_MODEL / name, folder)
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    tokenizer = load_tokenizer(folder, 2048)
    assert tokenizer is not None
    return tokenizer
