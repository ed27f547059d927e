import { expect, test } from 'vitest';
import { curl, javascript, messageOf, python, shortened } from './asking.js';
import { added, changed, empty, path, shown, siblings } from './talk.js';

const REQUEST = { method: 'POST', path: '/v1/completions', body: { prompt: "it's\n", stream: true, seed: null, text: 'null and true' } };

test('a command is quoted for the shell', () => {
  expect(curl(REQUEST, 'http://h', false)).toBe(
    `curl -sN 'http://h/v1/completions' \\\n  -H 'content-type: application/json' \\\n  -d '{ "prompt": "it'\\''s\\n", "stream": true, "seed": null, "text": "null and true" }'`,
  );
});

test('a key is named by its variable, never shown', () => {
  for (const write of [curl, python, javascript]) expect(write(REQUEST, 'http://h', true)).toContain('ATTNSERVE_API_KEY');
});

test('Python has its own constants, but not inside texts', () => {
  expect(python(REQUEST, 'http://h', false)).toContain(`json={ "prompt": "it's\\n", "stream": True, "seed": None, "text": "null and true" }`);
});

test('a request without a body has its method', () => {
  expect(curl({ method: 'DELETE', path: '/v1/states/a' }, 'http://h', false)).toBe("curl -s -X DELETE 'http://h/v1/states/a'");
  expect(javascript({ path: '/info' }, 'http://h', false)).toContain("method: 'GET',\n});");
});

test('long lists are shortened', () => {
  expect(shortened({ input: Array(20).fill('a') }).input).toEqual([...Array(12).fill('a'), '… 8 more']);
});

test('every dialect has its message', () => {
  expect(messageOf({ error: { message: 'a' } }, 400)).toBe('a');
  expect(messageOf({ error: 'b', error_type: 'c' }, 424)).toBe('b');
  expect(messageOf(null, 502)).toBe('the service answered with status 502');
});

test('a conversation has branches, and each view is one way through it', () => {
  let talk = empty();
  for (const [id, parent, role] of [[1, null, 'user'], [2, 1, 'assistant'], [3, 2, 'user'], [4, 3, 'assistant']]) talk = added(talk, { id, parent, role, text: '' });
  talk = added({ ...talk, leaf: 2 }, { id: 5, parent: 2, role: 'user', text: 'other' });
  expect(path(talk).map(({ id }) => id)).toEqual([1, 2, 5]);
  expect(siblings(talk, path(talk).at(-1)).map(({ id }) => id)).toEqual([3, 5]);
  expect(path(shown(talk, 3)).map(({ id }) => id)).toEqual([1, 2, 3, 4]);
  expect(path(changed(talk, 5, { text: 'new' })).at(-1).text).toBe('new');
});
