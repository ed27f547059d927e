import { expect, test } from 'vitest';
import { restored } from './live.svelte.js';

const sample = (age_s, requests) => ({ age_s, metrics: `te_request_count{method="/embed",model="m"} ${requests}\nattnserve_ready{model="m"} 1\n` });

test('charts begin with the samples that the service has kept', () => {
  const { samples, history } = restored([sample(10, 0), sample(5, 20), sample(0.1, 21)], 1000);
  expect(samples.map((each) => each.at)).toEqual([990, 995]); // one of just now would give a rate over no time
  expect(history.map((each) => [each.at, each.requests])).toEqual([[995, 4]]);
});
