"""LangChain's ChatOpenAI as agents use it: bind_tools, with_structured_output, and five rounds of calls."""

import json

from agent_tools import QUESTION, SETTINGS, TOOL, City, Weather, run_rounds
from checking import Served, check
from langchain_core.messages import ToolMessage
from langchain_openai import ChatOpenAI

served = Served.of_arguments()
chat = ChatOpenAI(model=served.model, base_url=f"{served.url}/v1", api_key=served.key, max_retries=0, **SETTINGS)

for tools in ([Weather], [TOOL]):
    for choice in ("required", "any", "Weather"):
        called = chat.bind_tools(tools, tool_choice=choice, parallel_tool_calls=False).invoke(QUESTION)
        (call,) = called.tool_calls
        check(f"bind_tools with tool_choice {choice}", isinstance(Weather(**call["args"]), Weather))
bound = chat.bind_tools([Weather], tool_choice="any", parallel_tool_calls=False)
whole, chunks = bound.invoke(QUESTION), list(bound.stream(QUESTION))
streamed = sum(chunks[1:], chunks[0])
check("streamed calls", streamed.tool_calls[0]["args"], whole.tool_calls[0]["args"])
for method in ("json_schema", "function_calling"):
    formed = chat.with_structured_output(City, method=method)
    check(f"with_structured_output by {method}", isinstance(formed.invoke(QUESTION), City))
schema = chat.with_structured_output(City.model_json_schema(), method="json_schema", strict=True)
check("with_structured_output of a schema", isinstance(City(**schema.invoke(QUESTION)), City))


def ask(messages):
    reply = bound.invoke(messages)
    (call,) = reply.tool_calls
    return reply, call["id"], json.dumps(call["args"])


run_rounds(ask, lambda call_id, content: ToolMessage(content, tool_call_id=call_id))
