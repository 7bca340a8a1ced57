"""OpenAI's Python client: completions, chats, streams, models, errors and timeouts; synchronous and asynchronous."""

import asyncio

import openai
from checking import GREEDY, MESSAGES, PROMPT, STOP, TOO_LONG, Served, check

served = Served.of_arguments()
MODEL, TEXT, CHAT = served.model, served.text(), served.chat()
SETTINGS = {"base_url": f"{served.url}/v1", "api_key": served.key, "max_retries": 0}
client = openai.OpenAI(**SETTINGS)


def complete(**settings):
    return client.completions.create(model=MODEL, prompt=PROMPT, **{**GREEDY, **settings})


def chat(**settings):
    return client.chat.completions.create(model=MODEL, messages=MESSAGES, **{**GREEDY, **settings})


def error_of(act, kind):
    try:
        act()
    except kind as error:
        return error
    return None


check("the models", [model.id for model in client.models.list()], [MODEL])
check("one model", client.models.retrieve(MODEL).id, MODEL)
check("a completion", complete().choices[0].text, TEXT)
check("a chat", chat().choices[0].message.content, CHAT)
check("a streamed completion", "".join(chunk.choices[0].text for chunk in complete(stream=True)), TEXT)

*chunks, last = chat(stream=True, stream_options={"include_usage": True})
check("a streamed chat", "".join(chunk.choices[0].delta.content or "" for chunk in chunks), CHAT)
check("its last chunk has no choices", last.choices, [])
check("and the usage of the whole chat", last.usage.total_tokens, chat().usage.total_tokens)
check("its end", chunks[-1].choices[0].finish_reason, "length")

raw = client.completions.with_raw_response.create(model=MODEL, prompt=PROMPT, **GREEDY)
check("a raw response", (raw.status_code, raw.parse().choices[0].text), (200, TEXT))
with client.chat.completions.with_streaming_response.create(model=MODEL, messages=MESSAGES, **GREEDY) as response:
    check("a streaming response", response.parse().choices[0].message.content, CHAT)

stopped = complete(stop=[STOP]).choices[0]
check("a stop string", (stopped.text, stopped.finish_reason), (TEXT[: TEXT.index(STOP)], "stop"))
three = [choice.text for choice in complete(n=3, seed=7, temperature=1).choices]
check("three choices", len(set(three)), 3)
check("the same with the same seed", [choice.text for choice in complete(n=3, seed=7, temperature=1).choices], three)
log_probs = complete(logprobs=2).choices[0].logprobs
check("log-probs are those of the text's tokens", "".join(log_probs.tokens), TEXT)
best = [max(top.values()) for top in log_probs.top_logprobs]
check("each of the greedy tokens is the best", log_probs.token_logprobs, best)
content = chat(logprobs=True, top_logprobs=2).choices[0].logprobs.content
check("log-probs of a chat", ("".join(entry.token for entry in content), len(content[0].top_logprobs)), (CHAT, 2))

error = error_of(lambda: client.completions.create(model="gpt-5", prompt="x"), openai.NotFoundError)
check("another model is not found", error and error.code, "model_not_found")
error = error_of(lambda: client.completions.create(model=MODEL, prompt=TOO_LONG), openai.BadRequestError)
check("a prompt that is too long", error and error.code, "context_length_exceeded")
error = error_of(lambda: openai.OpenAI(**{**SETTINGS, "api_key": "wrong"}).models.list(), openai.AuthenticationError)
check("an unknown key", served.key == "no-key" or error is not None)
long = {"max_tokens": 2000, "extra_body": {"ignore_eos": True}}
hasty = client.with_options(timeout=0.05).completions
error = error_of(lambda: hasty.create(model=MODEL, prompt=PROMPT, **long), openai.APITimeoutError)
check("a time limit", error is not None)
with complete(stream=True, **long) as stream:
    next(iter(stream))
check("a stream that is left early", complete().choices[0].text, TEXT)


async def together():
    async with openai.AsyncOpenAI(**SETTINGS) as several:
        create, converse = several.completions.create, several.chat.completions.create
        replies = await asyncio.gather(*(create(model=MODEL, prompt=PROMPT, **GREEDY) for _ in range(12)))
        stream = await converse(model=MODEL, messages=MESSAGES, stream=True, **GREEDY)
        return {reply.choices[0].text for reply in replies}, "".join([c.choices[0].delta.content async for c in stream])


check("12 asynchronous completions and a streamed chat", asyncio.run(together()), ({TEXT}, CHAT))
