import { expect, test } from 'vitest';
import { parser } from './sse.js';

const STREAM = 'id: run_1:0:aa\nretry: 1000\nid: run_1:2:bb\ndata: {"a":1}\n\n: ping\nid: run_1:3:cc\r\ndata: one\r\ndata: two\r\n\r\nevent: end\ndata: x\n\n';
const EVENTS = [
  { id: 'run_1:2:bb', event: 'message', data: '{"a":1}' },
  { id: 'run_1:3:cc', event: 'message', data: 'one\ntwo' },
  { id: 'run_1:3:cc', event: 'end', data: 'x' },
];

test('a stream gives the same events wherever it is cut', () => {
  expect(parser().push(STREAM)).toEqual(EVENTS);
  for (let cut = 1; cut < STREAM.length; cut++) {
    const each = parser();
    expect([...each.push(STREAM.slice(0, cut)), ...each.push(STREAM.slice(cut))], `cut at ${cut}`).toEqual(EVENTS);
  }
});

test('an event with only an id tells where the stream is', () => {
  expect(parser().push('id: run_1:5:dd\n\n')).toEqual([{ id: 'run_1:5:dd', event: 'id', data: '' }]);
});

test('an event that is not complete is not told', () => {
  expect(parser().push('data: {"half":')).toEqual([]);
});
