// OpenAI's Node client: completions, chats, streams, models, errors, time limits. node with_openai.mjs URL [KEY]

import OpenAI from 'openai';
import { answer, check, errorOf, key, model, url } from './checking.mjs';

const prompt = 'import os\n\n\ndef main';
const messages = [{ role: 'user', content: prompt }];
const greedy = { temperature: 0, max_tokens: 12 };

async function joined(stream, part) {
  let text = '';
  for await (const chunk of await stream) text += part(chunk) ?? '';
  return text;
}

const text = (await answer('/v1/completions', { prompt, ...greedy })).choices[0].text;
const chat = (await answer('/v1/chat/completions', { messages, ...greedy })).choices[0].message.content;
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: key, maxRetries: 0 });
const complete = (settings, options) => client.completions.create({ model, prompt, ...greedy, ...settings }, options);
const converse = (settings) => client.chat.completions.create({ model, messages, ...greedy, ...settings });

const models = [];
for await (const one of client.models.list()) models.push(one.id);
check('the models', models, [model]);
check('a completion', (await complete()).choices[0].text, text);
check('a chat', (await converse()).choices[0].message.content, chat);
check('a streamed completion', await joined(complete({ stream: true }), (chunk) => chunk.choices[0].text), text);
let usage;
const streamed = converse({ stream: true, stream_options: { include_usage: true } });
check('a streamed chat', await joined(streamed, (chunk) => ((usage = chunk.usage), chunk.choices[0]?.delta.content)), chat);
check('its usage', usage.total_tokens, (await converse()).usage.total_tokens);
const followed = client.chat.completions.stream({ model, messages, ...greedy });
check('a stream that is followed by events', await followed.finalContent(), chat);
const { data, response } = await complete().withResponse();
check('a reply with its response', [data.choices[0].text, response.status], [text, 200]);
const stopped = (await complete({ stop: ['sys'] })).choices[0];
check('a stop string', [stopped.text, stopped.finish_reason], [text.slice(0, text.indexOf('sys')), 'stop']);
check('three choices', (await complete({ n: 3, seed: 7, temperature: 1 })).choices.length, 3);
const together = await Promise.all(Array.from({ length: 12 }, () => complete()));
check('12 completions at once', together.map((reply) => reply.choices[0].text), Array(12).fill(text));
check('another model is not found', (await errorOf(complete({ model: 'gpt-5' })))?.code, 'model_not_found');
const long = { max_tokens: 2000, ignore_eos: true };
const late = await errorOf(complete(long, { timeout: 50 }));
check('a time limit', late instanceof OpenAI.APIConnectionTimeoutError, true);
const left = await complete({ ...long, stream: true });
for await (const chunk of left) {
  if (chunk) break;
}
check('a stream that is left early', (await complete()).choices[0].text, text);
