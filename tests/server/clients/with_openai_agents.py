"""openai as agents use it: tools (streamed or not), parse, responses, and five rounds of calls."""

import openai
from agent_tools import QUESTION, SETTINGS, TOOL, City, Weather, run_rounds
from checking import Served, check

served = Served.of_arguments()
client = openai.OpenAI(base_url=f"{served.url}/v1", api_key=served.key, max_retries=0)
ASKED = {"model": served.model, "messages": [{"role": "user", "content": QUESTION}], **SETTINGS}
FORCED = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}

parsed = client.chat.completions.parse(response_format=City, **ASKED).choices[0].message.parsed
check("parse", isinstance(parsed, City))
with client.chat.completions.stream(response_format=City, **ASKED) as events:
    check("parse of a stream", events.get_final_completion().choices[0].message.parsed, parsed)
(call,) = client.chat.completions.create(**ASKED, **FORCED).choices[0].message.tool_calls
arguments = Weather.model_validate_json(call.function.arguments)
chunks = list(client.chat.completions.create(stream=True, **ASKED, **FORCED))
pieces = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or []]
text = "".join(part.function.arguments or "" for part in pieces)
check("streamed tools", Weather.model_validate_json(text), arguments)
strict = openai.pydantic_function_tool(Weather)
parsed_call = client.chat.completions.parse(**ASKED, **{**FORCED, "tools": [strict]}).choices[0].message.tool_calls[0]
check("parsed arguments", isinstance(parsed_call.function.parsed_arguments, Weather))
answer = client.responses.parse(model=served.model, input=QUESTION, text_format=City, max_output_tokens=300)
check("responses that parse", isinstance(answer.output_parsed, City))
flat = {"type": "function", **TOOL["function"]}
first = client.responses.create(
    model=served.model, input=QUESTION, tools=[flat], tool_choice={"type": "function", "name": "Weather"}
)
(item,) = [item for item in first.output if item.type == "function_call"]
check("responses that call", isinstance(Weather.model_validate_json(item.arguments), Weather))
output = {"type": "function_call_output", "call_id": item.call_id, "output": "5 degrees"}
then = client.responses.create(
    model=served.model, previous_response_id=first.id, input=[output], max_output_tokens=8, tools=[flat]
)
check("a response after a call", then.usage.input_tokens > first.usage.input_tokens)


def ask(messages):
    message = client.chat.completions.create(**{**ASKED, "messages": messages}, **FORCED).choices[0].message
    (call,) = message.tool_calls
    return message, call.id, call.function.arguments


run_rounds(ask, lambda call_id, content: {"role": "tool", "tool_call_id": call_id, "content": content})
