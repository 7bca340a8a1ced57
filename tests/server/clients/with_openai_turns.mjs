// OpenAI's Node client over several scripted turns: runTools, parsed forms of zod, responses and their events.

import OpenAI from 'openai';
import { zodFunction, zodResponseFormat, zodTextFormat } from 'openai/helpers/zod';
import { z } from 'zod';
import { asJson, call, check, errorOf, key, model, replies, thought, url } from './checking.mjs';

const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: key, maxRetries: 0 });
const City = z.object({ name: z.string(), size: z.enum(['small', 'large']), districts: z.array(z.number()) });
const Weather = z.object({ city: z.string(), days: z.number() });
const oslo = { name: 'Oslo', size: 'large', districts: [3, 14] };
const script = replies(
  thought('Two.') + 'I look.\n' + call('weather', { city: 'Bodø', days: 2 }) + '\n' + call('weather', { city: 'Rome', days: 1 }),
  thought('One.') + call('weather', { city: 'Oslo', days: 3 }),
  'Rome is the warmest.',
);
const calls = ['Bodø', 'Rome', 'Oslo'];
let seen = [];
const weather = ({ city }) => (seen.push(city), { city, degrees: city.length });
const tools = [zodFunction({ name: 'weather', description: 'The weather.', parameters: Weather, function: weather })];
const messages = [
  { role: 'developer', content: 'Be brief.' },
  { role: 'user', content: [{ type: 'text', text: script }] },
];
const settings = { model, max_completion_tokens: 400, store: false, metadata: { purpose: 'a test' } };

for (const stream of [false, true]) {
  const name = stream ? 'streamed' : 'whole';
  seen = [];
  const runner = client.chat.completions.runTools({ ...settings, messages, tools, stream });
  check(`a run of tools (${name})`, [await runner.finalContent(), seen], ['Rome is the warmest.', calls]);
  check(`its end (${name})`, (await runner.finalChatCompletion()).choices[0].finish_reason, 'stop');
}
const asked = (...texts) => ({ ...settings, messages: [{ role: 'user', content: replies(...texts) }] });
const form = { response_format: zodResponseFormat(City, 'city') };
const formed = await client.chat.completions.parse({ ...asked(thought('A city.') + asJson(oslo)), ...form });
check('a parsed form', formed.choices[0].message.parsed, oslo);
const followed = client.chat.completions.stream({ ...asked(asJson(oslo)), ...form });
check('a streamed form', (await followed.finalChatCompletion()).choices[0].message.parsed, oslo);
const forced = { tools: [zodFunction({ name: 'weather', parameters: Weather })], tool_choice: 'required' };
const called = await client.chat.completions.parse({ ...asked(call('weather', { city: 'Rome', days: 1 })), ...forced });
check('parsed arguments', called.choices[0].message.tool_calls[0].function.parsed_arguments, { city: 'Rome', days: 1 });

const parameters = z.toJSONSchema(Weather);
const common = {
  model,
  instructions: 'Be brief.',
  tools: [{ type: 'function', name: 'weather', parameters, strict: true }],
  reasoning: { effort: 'low', summary: 'auto' },
  include: ['reasoning.encrypted_content'],
  store: true,
};
const outputs = (response) =>
  response.output
    .filter((item) => item.type === 'function_call')
    .map((item) => ({ type: 'function_call_output', call_id: item.call_id, output: item.arguments }));
let response = await client.responses.create({ ...common, input: script });
const kinds = [response.output.map((item) => item.type).join()];
while (outputs(response).length) {
  const events = client.responses.stream({ ...common, input: outputs(response), previous_response_id: response.id });
  response = await events.finalResponse();
  kinds.push(response.output.map((item) => item.type).join());
}
const wanted = ['reasoning,message,function_call,function_call', 'reasoning,function_call', 'message'];
check('responses that follow each other', [kinds, response.output_text], [wanted, 'Rome is the warmest.']);
check('cached tokens', response.usage.input_tokens_details.cached_tokens >= 64, true);
const text = { format: zodTextFormat(City, 'city') };
const parsed = await client.responses.parse({ model, input: replies(thought('A city.') + asJson(oslo)), text });
check('a parsed response', parsed.output_parsed, oslo);
const wrong = await errorOf(client.responses.create({ model, input: 'Hello.', temperature: 9 }));
check('a wrong value', [wrong instanceof OpenAI.BadRequestError, wrong.param], [true, 'temperature']);
const absent = await errorOf(client.responses.create({ model: 'absent', input: 'Hello.' }));
check('another model', [absent instanceof OpenAI.NotFoundError, absent.code], [true, 'model_not_found']);
