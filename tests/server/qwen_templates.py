"""Chat templates written for these tests that treat messages like the templates of Qwen's hybrid models.

They write, drop and refuse the same reasoning, tool calls and images.
"""

_AS_JSON = '\n{"name": {{ c.function.name | tojson }}, "arguments": {{ c.function.arguments | tojson }}}\n'
_AS_XML = (  # writes text unchanged, other values as JSON
    "\n<function={{ c.function.name }}>\n{% for key, value in c.function.arguments.items() %}"
    "<parameter={{ key }}>\n{{ value if value is string else value | tojson }}\n</parameter>\n{% endfor %}"
    "</function>\n"
)
_XML_EXAMPLE = "\n<function=some_name>\n<parameter=some_key>\nsome text\n</parameter>\n</function>\n"
_JSON_EXAMPLE = '\n{"name": "some_name", "arguments": {"some_key": "some text"}}\n'

_HEAD = (  # requires a user question; a tool result does not count
    "{% macro text(content) %}{% if content is string %}{{ content }}{% else %}{% for part in content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endmacro %}"
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' and not text(m.content).startswith('<tool_response>') %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% if ns.last < 0 %}{{ raise_exception('there is no question of a user') }}{% endif %}"
    "[EFFORT]{% set first = messages[0] %}{% if tools or first.role == 'system' or effort %}<|im_start|>system\n"
    "{{ effort }}{% if tools %}Functions:\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    "Call them so:\n<tool_call>[EXAMPLE]</tool_call>{% if first.role == 'system' %}\n\n{% endif %}{% endif %}"
    "{% if first.role == 'system' %}{{ text(first.content) | trim }}{% endif %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% set content = text(m.content) | trim %}"
    "{% if m.role == 'system' %}"
    "{% if not loop.first %}{{ raise_exception('a system message has to be the first one') }}{% endif %}"
    "{% elif m.role == 'user' %}<|im_start|>user\n{{ content }}<|im_end|>\n"
    "{% elif m.role == 'assistant' %}"
)
_THOUGHTS = (  # [KEEPS]: condition for keeping the reasoning of a reply
    "{% set thoughts = '' %}"
    "{% if m.reasoning_content is string %}{% set thoughts = m.reasoning_content %}"
    "{% elif '</think>' in content %}{% set thoughts = content.split('</think>')[0].split('<think>')[-1] %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "<|im_start|>assistant\n{% if [KEEPS] %}<think>\n{{ thoughts | trim }}\n</think>\n\n{% endif %}"
)
_REST = (
    "{{ content }}{% for c in m.tool_calls or [] %}"
    "{{ '\n\n' if loop.first and content else '' if loop.first else '\n' }}<tool_call>[CALL]</tool_call>{% endfor %}"
    "<|im_end|>\n"
    "{% elif m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}{{ raise_exception('a role that is not known') }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n[BEGINS]{% endif %}"
)
_EFFORT = (  # default: the highest effort; unknown efforts are refused
    "{% set effort = '' %}{% if enable_thinking is undefined or enable_thinking %}"
    "{% set level = reasoning_effort | default('xhigh') %}"
    "{% if level not in ('xhigh', 'medium', 'low') %}{{ raise_exception('there is no effort of ' ~ level) }}{% endif %}"
    "{% set effort = '' if level == 'medium' else '(effort: ' ~ level ~ ')\n\n' %}{% endif %}"
)
_SWITCH = (
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}"
)


def _template(call: str, example: str, thoughts: str, begins: str, effort: str = "") -> str:
    """Return a template.

    Args:
        call, example: Text between the tags of a call, and of the example call in the instructions.
        thoughts: Beginning of an earlier reply's message.
        begins: Beginning of the next reply that the prompt contains.
        effort: Template code that sets the variable `effort`, which begins the prompt.
    """
    head = _HEAD.replace("[EXAMPLE]", example).replace("[EFFORT]", effort)
    return head + thoughts + _REST.replace("[CALL]", call).replace("[BEGINS]", begins)


_AFTER_THE_QUESTION = "loop.index0 > ns.last"
QWEN_3_6 = _template(
    _AS_XML,
    _XML_EXAMPLE,
    _THOUGHTS.replace("[KEEPS]", f"{_AFTER_THE_QUESTION} or (preserve_thinking is defined and preserve_thinking)"),
    _SWITCH,
)
"""Qwen 3.5 and 3.6: reasons unless that is off. Drops reasoning before the last question unless it is to be kept."""
_OWN_FIELD = (
    "<|im_start|>assistant\n{% if [KEEPS] %}<think>\n{{ (m.reasoning_content or '') | trim }}\n</think>\n\n{% endif %}"
)
QWEN_3_8 = _template(
    _AS_XML,
    _XML_EXAMPLE,
    _OWN_FIELD.replace("[KEEPS]", f"preserve_thinking is undefined or preserve_thinking or {_AFTER_THE_QUESTION}"),
    _SWITCH,
    _EFFORT,
)
"""Qwen 3.8: keeps all reasoning unless asked to drop it, and has reasoning efforts."""
QWEN_3_NEXT_THINKING = _template(
    _AS_JSON, _JSON_EXAMPLE, _THOUGHTS.replace("[KEEPS]", _AFTER_THE_QUESTION), "<think>\n"
)
QWEN_3_NEXT = _template(_AS_JSON, _JSON_EXAMPLE, "<|im_start|>assistant\n", "")
"""Instruct: has no reasoning."""
