"""anthropic: messages, streaming, required tool calls, a formatted answer, and five rounds of calls."""

import json

import anthropic
from agent_tools import QUESTION, City, Weather, run_rounds
from checking import GREEDY, MESSAGES, Served, check

served = Served.of_arguments()
client = anthropic.Anthropic(base_url=served.url, api_key=served.key, max_retries=0)
CHAT = served.chat()
ASKED = {"model": served.model, "max_tokens": 300, "messages": [{"role": "user", "content": QUESTION}]}
TOOL = {"name": "Weather", "description": Weather.__doc__, "input_schema": Weather.model_json_schema()}
FORCED = {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "Weather", "disable_parallel_tool_use": True}}

BEST = {"max_tokens": GREEDY["max_tokens"], "extra_body": {"temperature": 0}}
message = client.messages.create(model=served.model, messages=MESSAGES, **BEST)
check("a message", "".join(block.text for block in message.content), CHAT)
with client.messages.stream(model=served.model, messages=MESSAGES, **BEST) as stream:
    check("a streamed message", "".join(stream.text_stream), CHAT)
counted = client.messages.count_tokens(model=served.model, messages=MESSAGES)
usage = message.usage
total = usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
check("the tokens of a message", counted.input_tokens, total)
called = client.messages.create(**ASKED, **FORCED)
(block,) = [block for block in called.content if block.type == "tool_use"]
check("a call", (called.stop_reason, isinstance(Weather(**block.input), Weather)), ("tool_use", True))
with client.messages.stream(**ASKED, **FORCED) as stream:
    final = stream.get_final_message()
check("a streamed call", [isinstance(Weather(**block.input), Weather) for block in final.content], [True])
formed = {"format": {"type": "json_schema", "schema": City.model_json_schema()}}
answer = client.messages.create(output_config=formed, **ASKED)
text = "".join(block.text for block in answer.content)
check("an answer of a form", isinstance(City.model_validate_json(text), City))


def ask(messages):
    message = client.messages.create(**{**ASKED, "messages": messages}, **FORCED)
    (block,) = [block for block in message.content if block.type == "tool_use"]
    return {"role": "assistant", "content": message.content}, block.id, json.dumps(block.input)


def result(call_id, content):
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call_id, "content": content}]}


run_rounds(ask, result)
