"""Chat templates written for these tests that treat messages like the templates of published model families.

They read, drop and refuse the same messages; the texts around the messages differ.
"""

from tests.server.qwen_templates import QWEN_3_6, QWEN_3_8

_CALL = '{"name": {{ c.function.name | tojson }}, "arguments": {{ c.function.arguments | tojson }}}'

LLAMA_3 = (  # one call per message, without text; results as JSON; tools require a first user message
    "{{ bos_token }}{% set ns = namespace(system='', shown=false) %}"
    "{% if messages[0].role == 'system' %}{% set ns.system = messages[0].content | trim %}"
    "{% set messages = messages[1:] %}{% endif %}"
    "<|header|>system\n{{ ns.system }}<|eot|>"
    "{% for m in messages %}"
    "{% if tools and not ns.shown %}{% set ns.shown = true %}"
    "{% if m.role != 'user' %}{{ raise_exception('tools need a message of the user first') }}{% endif %}"
    "<|header|>user\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}{{ m.content | trim }}<|eot|>"
    "{% elif m.tool_calls %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('only single calls are supported') }}{% endif %}"
    "{% set c = m.tool_calls[0] %}<|header|>assistant\n" + _CALL + "<|eot|>"
    "{% elif m.role == 'tool' %}<|header|>ipython\n{{ m.content | tojson }}<|eot|>"
    "{% else %}<|header|>{{ m.role }}\n{{ m.content | trim }}<|eot|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|header|>assistant\n{% endif %}"
)

QWEN_3 = (  # results inside a user message; drops reasoning before the last question
    "{% if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}"
    "{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n"
    "{% elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'user' or (m.role == 'system' and not loop.first) %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% elif m.role == 'assistant' %}<|im_start|>assistant\n{{ m.content.split('</think>')[-1].lstrip('\n') }}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n" + _CALL + "\n</tool_call>{% endfor %}<|im_end|>\n"
    "{% elif m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

QWEN_3_5 = QWEN_3.replace(  # like QWEN_3, but instructions may only come first
    "{% if m.role == 'user' or",
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('System message must be at the beginning') }}"
    "{% elif m.role == 'user' or",
)

MISTRAL_3 = (  # roles alternate; instructions go into a last user message; ids have nine characters
    "{{ bos_token }}{% set ns = namespace(system='', index=0) %}"
    "{% if messages[0].role == 'system' %}{% set ns.system = messages[0].content %}"
    "{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (ns.index % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.index = ns.index + 1 %}{% endif %}{% endfor %}"
    "{% for m in messages %}"
    "{% if m.role == 'user' %}{% if loop.last and tools %}[TOOLS]{{ tools | tojson }}[/TOOLS]{% endif %}"
    "[INST] {% if loop.last and ns.system %}{{ ns.system }}\n\n{% endif %}{{ m.content }}[/INST]"
    "{% elif m.tool_calls %}[CALLS] [{% for c in m.tool_calls %}"
    "{% if c.id is not defined or c.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}"
    + _CALL
    + "{{ c.id }}{{ ', ' if not loop.last }}{% endfor %}]{{ eos_token }}"
    "{% elif m.role == 'assistant' %} {{ m.content | trim }}{{ eos_token }}"
    "{% elif m.role == 'tool' %}"
    "{% if m.tool_call_id is not defined or m.tool_call_id | length != 9 %}"
    "{{ raise_exception('ids have nine characters') }}{% endif %}"
    "[RESULTS] {{ m.content }} {{ m.tool_call_id }}[/RESULTS]"
    "{% else %}{{ raise_exception('only user and assistant, and a system message at the beginning') }}{% endif %}"
    "{% endfor %}"
)

GEMMA = (  # roles alternate; no instructions and no tools
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "<turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<turn>model\n{% endif %}"
)

NEMOTRON_NANO_2 = (  # drops later instructions; calls are one list; removes control words from texts
    "{% if messages[0].role == 'system' %}<SPECIAL_10>System\n"
    "{{ messages[0].content.replace('/no_think', '') | trim }}\n{% endif %}"
    "{% if tools %}<AVAILABLE_TOOLS>{{ tools | tojson }}</AVAILABLE_TOOLS>\n{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'user' %}<SPECIAL_11>User\n{{ m.content.replace('/no_think', '') | trim }}\n"
    "{% elif m.role == 'assistant' %}<SPECIAL_11>Assistant\n{{ m.content.split('</think>')[-1] | trim }}"
    "{% if m.tool_calls %}<TOOLCALL>[{% for c in m.tool_calls %}" + _CALL + "{{ ', ' if not loop.last }}{% endfor %}]"
    "</TOOLCALL>{% endif %}\n"
    "{% elif m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<SPECIAL_11>User\n<TOOL_RESPONSE>[{% endif %}"
    "{{ m.content }}{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}]</TOOL_RESPONSE>\n"
    "{% else %}, {% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<SPECIAL_11>Assistant\n{% endif %}"
)

GRANITE_4 = (  # renders every role in its original order
    "{% if tools %}<|role|>system<|/role|>{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|end|>\n{% endif %}"
    "{% for m in messages %}<|role|>{{ 'user' if m.role == 'tool' else m.role }}<|/role|>"
    "{% if m.role == 'tool' %}<tool_response>\n{{ m.content }}\n</tool_response>{% else %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n" + _CALL + "\n</tool_call>{% endfor %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|role|>assistant<|/role|>{% endif %}"
)

PHI_4 = (  # renders tools but no results: unknown roles are dropped
    "{% for m in messages %}{% if m.role in ('system', 'user', 'assistant') %}<|{{ m.role }}|>"
    "{% if loop.first and tools %}<|tool|>{{ tools | tojson }}<|/tool|>{% endif %}{{ m.content }}"
    "{% if m.tool_calls %}<|tool_call|>{{ m.tool_calls | tojson }}<|/tool_call|>{% endif %}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

HERMES = (  # ChatML; renders every message in its original order
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n" + _CALL + "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

FAMILIES = {
    "llama 3": LLAMA_3,
    "qwen 3": QWEN_3,
    "qwen 3.5": QWEN_3_5,
    "qwen 3.6": QWEN_3_6,
    "qwen 3.8": QWEN_3_8,
    "mistral 3": MISTRAL_3,
    "gemma": GEMMA,
    "nemotron nano 2": NEMOTRON_NANO_2,
    "granite 4": GRANITE_4,
    "phi 4": PHI_4,
    "hermes": HERMES,
}
