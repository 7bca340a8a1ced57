// Vercel's AI SDK over chats, responses and its provider for compatible servers: steps of tools, streams, objects.

import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateText, Output, stepCountIs, streamText, tool } from 'ai';
import { z } from 'zod';
import { asJson, call, check, errorOf, key, model, replies, thought, url } from './checking.mjs';

globalThis.AI_SDK_LOG_WARNINGS = false;
const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey: key });
const compatible = createOpenAICompatible({
  name: 'served',
  baseURL: `${url}/v1`,
  apiKey: key,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const models = { chats: openai.chat(model), responses: openai.responses(model), compatible: compatible(model) };
const city = { name: 'Oslo', size: 'large', districts: [3, 14] };
const schema = z.object({
  name: z.string().max(8),
  size: z.enum(['small', 'large']),
  districts: z.array(z.number().int().min(0).max(99)).min(1).max(2),
});
const script = replies(
  thought('Two.') + 'I look.\n' + call('weather', { city: 'Bodø', days: 2 }) + '\n' + call('weather', { city: 'Rome', days: 1 }),
  thought('One.') + call('weather', { city: 'Oslo', days: 3 }),
  'Rome is the warmest.',
);
const calls = ['Bodø', 'Rome', 'Oslo'];
let seen = [];
const tools = {
  weather: tool({
    description: 'The weather of a city.',
    inputSchema: z.object({ city: z.string(), days: z.number().int().describe('How far to look ahead.') }),
    execute: async ({ city }) => (seen.push(city), { city, degrees: city.length }),
  }),
};
const providerOptions = { openai: { reasoningSummary: 'auto', reasoningEffort: 'low', forceReasoning: true } };
const common = { maxRetries: 0, maxOutputTokens: 400, system: 'Be brief.', providerOptions };

for (const [kind, languageModel] of Object.entries(models)) {
  const settings = { ...common, model: languageModel };
  const steps = { ...settings, tools, stopWhen: stepCountIs(5) };
  const messages = [{ role: 'user', content: [{ type: 'text', text: script }] }];
  const showsReasoning = kind !== 'chats'; // the client reads it from responses and compatible servers
  const thoughts = (all) => all.map((step) => step.reasoningText).filter(Boolean);

  seen = [];
  const whole = await generateText({ ...steps, messages });
  check(`steps (${kind})`, [whole.text, seen], ['Rome is the warmest.', calls]);
  check(`their texts (${kind})`, whole.steps.map((step) => step.text.trim()), ['I look.', '', 'Rome is the warmest.']);
  if (showsReasoning) check(`their reasoning (${kind})`, thoughts(whole.steps), ['Two.', 'One.']);
  check(`their ends (${kind})`, whole.steps.map((step) => step.finishReason), ['tool-calls', 'tool-calls', 'stop']);
  check(`cached tokens (${kind})`, whole.steps[2].usage.inputTokenDetails.cacheReadTokens >= 64, true);

  seen = [];
  const stream = streamText({ ...steps, messages });
  const kinds = new Set();
  for await (const part of stream.fullStream) {
    kinds.add(part.type);
    if (part.type === 'error') throw part.error;
  }
  check(`streamed steps (${kind})`, [await stream.text, seen], ['Rome is the warmest.', calls]);
  check(`their parts (${kind})`, ['tool-input-delta', 'tool-result', 'text-delta'].filter((one) => !kinds.has(one)), []);
  if (showsReasoning) check(`streamed reasoning (${kind})`, thoughts(await stream.steps), ['Two.', 'One.']);
  check(`a stream's usage (${kind})`, (await stream.totalUsage).totalTokens, whole.totalUsage.totalTokens);

  const history = [...messages, ...whole.response.messages, { role: 'user', content: replies('Thanks too.') }];
  check(`a further question (${kind})`, (await generateText({ ...steps, messages: history })).text, 'Thanks too.');
  const prompt = replies(thought('A city.') + asJson(city));
  const formed = { ...settings, output: Output.object({ schema }), prompt };
  check(`an object (${kind})`, (await generateText(formed)).output, city);
  const partial = streamText(formed);
  const parts = [];
  for await (const part of partial.partialOutputStream) parts.push(part);
  check(`a streamed object (${kind})`, [parts.at(-1), parts.length > 1], [city, true]);
  const forced = { ...settings, tools, toolChoice: { type: 'tool', toolName: 'weather' } };
  const called = await generateText({ ...forced, prompt: replies(call('weather', { city: 'Rome', days: 1 })) });
  check(`a call that has to be made (${kind})`, called.toolCalls[0].input, { city: 'Rome', days: 1 });
  const wrong = await errorOf(generateText({ ...settings, providerOptions: {}, temperature: 9, prompt: 'Hello.' }));
  check(`a wrong value (${kind})`, [wrong?.statusCode, /temperature/.test(wrong?.message)], [400, true]);
}
const absent = await errorOf(generateText({ ...common, model: openai.chat('absent'), prompt: 'Hello.' }));
check('another model', absent?.statusCode, 404);

const chained = { ...common, model: models.responses };
const first = await generateText({ ...chained, prompt: replies('First.') });
const previousResponseId = first.providerMetadata.openai.responseId;
const then = { ...chained, prompt: replies('Second.'), providerOptions: { openai: { previousResponseId } } };
check('responses that follow each other', (await generateText(then)).text, 'Second.');
