"""LangChain's ChatOpenAI and OpenAI: invoke, stream and batch, and their asynchronous variants."""

import asyncio

from checking import GREEDY, MESSAGES, PROMPT, STOP, TOO_LONG, Served, check
from langchain_core.exceptions import ContextOverflowError
from langchain_openai import ChatOpenAI, OpenAI

served = Served.of_arguments()
MODEL, TEXT, CHAT = served.model, served.text(), served.chat()
SETTINGS = {"model": MODEL, "base_url": f"{served.url}/v1", "api_key": served.key, "max_retries": 0, **GREEDY}
chat, complete = ChatOpenAI(**SETTINGS), OpenAI(**SETTINGS)

reply = chat.invoke(PROMPT)
check("a chat", reply.content, CHAT)
check("its tokens", reply.usage_metadata["output_tokens"], GREEDY["max_tokens"])
check("a streamed chat", "".join(chunk.content for chunk in chat.stream(PROMPT)), CHAT)
chunks = ChatOpenAI(**SETTINGS, stream_usage=True).stream(PROMPT)
totals = [chunk.usage_metadata["total_tokens"] for chunk in chunks if chunk.usage_metadata]
check("a stream's usage", totals, [reply.usage_metadata["total_tokens"]])
check("a batch of chats", [one.content for one in chat.batch([PROMPT] * 5)], [CHAT] * 5)
check("a stop string", chat.invoke(PROMPT, stop=[STOP]).content, CHAT[: CHAT.index(STOP)])
turns = [*MESSAGES, {"role": "assistant", "content": CHAT}, {"role": "user", "content": "\ndef g"}]
check("a conversation", chat.invoke([*MESSAGES, reply, turns[-1]]).content, served.chat(turns))
entry = chat.invoke(PROMPT, logprobs=True, top_logprobs=2).response_metadata["logprobs"]["content"][0]
check("log-probs", (CHAT.startswith(entry["token"]), len(entry["top_logprobs"])), (True, 2))
try:
    chat.invoke(TOO_LONG)
    error = None
except ContextOverflowError as raised:
    error = raised
check("a prompt that is too long raises ContextOverflowError", error is not None)

check("a completion", complete.invoke(PROMPT), TEXT)
check("a streamed completion", "".join(complete.stream(PROMPT)), TEXT)
check("20 completions in one request", complete.batch([PROMPT] * 20), [TEXT] * 20)


async def asynchronous():
    pieces = [chunk.content async for chunk in chat.astream(PROMPT)]
    events = [event["event"] async for event in chat.astream_events(PROMPT)]
    return (await chat.ainvoke(PROMPT)).content, "".join(pieces), await complete.ainvoke(PROMPT), events[-1]


check("asynchronous ones", asyncio.run(asynchronous()), (CHAT, CHAT, TEXT, "on_chat_model_end"))
