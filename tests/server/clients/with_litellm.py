"""litellm with the providers for OpenAI-compatible servers: chats and completions, streamed or not."""

import asyncio
import logging

import litellm
from checking import GREEDY, MESSAGES, PROMPT, TOO_LONG, Served, check

litellm.suppress_debug_info = True
logging.getLogger("LiteLLM").setLevel(logging.ERROR)
served = Served.of_arguments()
MODEL, TEXT, CHAT = served.model, served.text(), served.chat()
ADDRESS = {"api_base": f"{served.url}/v1", "api_key": served.key}
ASKED = {"messages": MESSAGES, **GREEDY, **ADDRESS}


def joined(stream):
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream)


def error_of(**settings):
    try:
        litellm.completion(**{**ASKED, **settings})
    except Exception as error:
        return type(error).__name__
    return None


for provider in ("openai", "hosted_vllm"):
    model = f"{provider}/{MODEL}"
    reply = litellm.completion(model=model, **ASKED)
    check(f"a chat ({provider})", reply.choices[0].message.content, CHAT)
    check(f"its tokens ({provider})", reply.usage.completion_tokens, GREEDY["max_tokens"])
    check(f"a streamed chat ({provider})", joined(litellm.completion(model=model, stream=True, **ASKED)), CHAT)
for provider in ("openai", "text-completion-openai", "hosted_vllm"):
    model = f"{provider}/{MODEL}"
    reply = litellm.text_completion(model=model, prompt=PROMPT, **GREEDY, **ADDRESS)
    check(f"a text ({provider})", reply.choices[0].text, TEXT)
    chunks = litellm.text_completion(model=model, prompt=PROMPT, stream=True, **GREEDY, **ADDRESS)
    check(f"a streamed text ({provider})", "".join(chunk.choices[0].text or "" for chunk in chunks), TEXT)

MODEL = f"openai/{MODEL}"
chunks = list(litellm.completion(model=MODEL, stream=True, stream_options={"include_usage": True}, **ASKED))
check("a stream's usage", chunks[-1].usage.completion_tokens, GREEDY["max_tokens"])
settings = {"n": 2, "seed": 4, "stop": ["zzz"], "top_p": 0.9, "logprobs": True, "top_logprobs": 1, "user": "me"}
check("two choices", len(litellm.completion(model=MODEL, **ASKED, **settings).choices), 2)
check("another model is not found", error_of(model="openai/absent"), "NotFoundError")
too_long = [{"role": "user", "content": TOO_LONG}]
check("a prompt that is too long", error_of(model=MODEL, messages=too_long), "ContextWindowExceededError")


async def asynchronous():
    reply = await litellm.acompletion(model=MODEL, **ASKED)
    stream = await litellm.acompletion(model=MODEL, stream=True, **ASKED)
    pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
    return reply.choices[0].message.content, "".join(pieces)


check("an asynchronous chat, whole and streamed", asyncio.run(asynchronous()), (CHAT, CHAT))
