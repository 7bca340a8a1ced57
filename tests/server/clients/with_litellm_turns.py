"""litellm in several scripted turns, with providers openai, hosted_vllm and anthropic, and over responses."""

import asyncio
import json
import logging

import litellm
from agent_tools import OSLO, TOOL, City
from checking import Served, call, check, replies, thought

litellm.suppress_debug_info = True
logging.getLogger("LiteLLM").setLevel(logging.ERROR)
served = Served.of_arguments()
ADDRESSES = {
    "openai": f"{served.url}/v1",
    "hosted_vllm": f"{served.url}/v1",
    "anthropic": served.url,
}
SCRIPT = replies(
    thought("Two.") + "I look.\n" + call("Weather", city="Bodø", days=2) + "\n" + call("Weather", city="Oslo", days=1),
    thought("One.") + call("Weather", city="Bergen", days=3),
    "Oslo is the warmest.",
)
ROUNDS = [
    ("I look.", [{"city": "Bodø", "days": 2}, {"city": "Oslo", "days": 1}], "Two.", "tool_calls"),
    ("", [{"city": "Bergen", "days": 3}], "One.", "tool_calls"),
    ("Oslo is the warmest.", [], "", "stop"),
]


def whole(**asked):
    return litellm.completion(**asked)


def streamed(**asked):
    chunks = list(litellm.completion(stream=True, stream_options={"include_usage": True}, **asked))
    return litellm.stream_chunk_builder(chunks, messages=asked["messages"])


def error_of(**asked):
    try:
        litellm.completion(**asked)
    except Exception as error:
        return type(error).__name__
    return None


for provider, address in ADDRESSES.items():
    common = {"model": f"{provider}/{served.model}", "api_base": address, "api_key": served.key, "max_tokens": 400}
    for ask in (whole, streamed):
        name = f"{provider}, {ask.__name__}"
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": SCRIPT}]
        seen, cached = [], []
        for _ in ROUNDS:
            chat = ask(messages=messages, tools=[TOOL], tool_choice="auto", **common)
            message = chat.choices[0].message
            calls = [json.loads(one.function.arguments) for one in message.tool_calls or []]
            reasoning = getattr(message, "reasoning_content", None) or ""
            seen.append((message.content or "", calls, reasoning, chat.choices[0].finish_reason))
            cached.append(chat.usage.prompt_tokens_details.cached_tokens or 0)
            messages.append(message.model_dump(exclude_none=True))
            for one in message.tool_calls or []:
                result = {"role": "tool", "tool_call_id": one.id, "name": "Weather", "content": one.function.arguments}
                messages.append(result)
        check(f"three turns ({name})", seen, ROUNDS)
        check(f"cached tokens ({name})", min(cached[1:]) >= 64)
    asked = {"messages": [{"role": "user", "content": replies(thought("A city.") + OSLO)}], **common}
    if provider != "anthropic":
        formed = litellm.completion(response_format=City, **asked).choices[0].message.content
        check(f"an answer of a form ({provider})", City.model_validate_json(formed), City.model_validate_json(OSLO))
    check(f"another model ({provider})", error_of(**{**asked, "model": f"{provider}/absent"}), "NotFoundError")
    found = error_of(**{**asked, "messages": [{"role": "user", "content": "Hello."}], "temperature": 9})
    check(f"a wrong value ({provider})", found, "BadRequestError")


async def asynchronous():
    address = {"model": f"openai/{served.model}", "api_base": ADDRESSES["openai"], "api_key": served.key}
    answer = await litellm.aresponses(input=replies("Yes."), instructions="Be brief.", store=True, **address)
    then = await litellm.aresponses(input=replies("No."), previous_response_id=answer.id, **address)
    stream = await litellm.aresponses(input=replies("Maybe."), stream=True, **address)
    pieces = [event.delta async for event in stream if event.type == "response.output_text.delta"]
    address = {"model": f"anthropic/{served.model}", "api_base": ADDRESSES["anthropic"], "api_key": served.key}
    asked = {"messages": [{"role": "user", "content": replies("Here.")}], "max_tokens": 50}
    message = await litellm.anthropic.messages.acreate(**asked, **address)
    return [
        answer.output[0].content[0].text,
        then.output[0].content[0].text,
        "".join(pieces),
        message["content"][0]["text"],
    ]


check("responses and messages", asyncio.run(asynchronous()), ["Yes.", "No.", "Maybe.", "Here."])
