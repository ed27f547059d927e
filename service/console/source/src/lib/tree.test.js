import { expect, test } from 'vitest';
import { layout } from './tree.js';

const state = (id, parent, created) => ({ id, parent, created, position: created });
const shown = (states) => layout(states).map(({ state: { id }, depth, last, missing }) => `${' '.repeat(depth)}${id}${last.map((each) => (each ? '!' : '.')).join('')}${missing ? '?' : ''}`);

test('children are below their parent, the oldest first, whatever the order of the list', () => {
  const states = [state('d', 'b', 4), state('c', 'a', 3), state('b', 'a', 2), state('a', null, 1)];
  expect(shown(states)).toEqual(['a', ' b.', '  d.!', ' c!']);
  expect(shown(states.toReversed())).toEqual(['a', ' b.', '  d.!', ' c!']);
});

test('the tree that was used last comes first', () => {
  expect(shown([state('a', null, 1), state('b', null, 2), state('c', 'a', 3)])).toEqual(['a', ' c!', 'b']);
});

test('a state whose parent is gone begins a tree', () => {
  expect(shown([state('c', 'gone', 3)])).toEqual(['c?']);
});
