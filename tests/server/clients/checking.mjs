// What the Node scripts share: arguments, the server's replies without any client, checks, and scripted replies.

import { isDeepStrictEqual } from 'node:util';

export const [url, key = 'no-key'] = process.argv.slice(2);

export async function answer(path, body) {
  const headers = { Authorization: `Bearer ${key}`, 'Content-Type': 'application/json', 'User-Agent': 'plain HTTP' };
  const reply = await fetch(url + path, { method: body ? 'POST' : 'GET', headers, body: body && JSON.stringify(body) });
  return reply.json();
}

export const model = (await answer('/v1/models')).data[0].id;

export function check(what, found, wanted) {
  if (!isDeepStrictEqual(found, wanted)) {
    console.error(`not so: ${what}\n  found  ${JSON.stringify(found)}\n  wanted ${JSON.stringify(wanted)}`);
    process.exit(1);
  }
  console.log('holds:', what);
}

export async function errorOf(promise) {
  try {
    await promise;
  } catch (error) {
    return error;
  }
}

// As in checking.py.
export const replies = (...texts) => 'Replies: ' + JSON.stringify(texts).replaceAll('<', '\\u003c');
const member = (value) =>
  Array.isArray(value)
    ? `[${value.map(member).join(', ')}]`
    : value && typeof value === 'object'
      ? `{${Object.entries(value).map(([name, one]) => `"${name}": ${member(one)}`).join(', ')}}`
      : JSON.stringify(value);
export const call = (name, args) => `<tool_call>\n${member({ name, arguments: args })}\n</tool_call>`;
export const thought = (text) => `<think>\n${text}\n</think>\n\n`;
export const asJson = member;
