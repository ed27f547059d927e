// Samples /metrics every second while a page shows it, and keeps a minute of figures. The service has kept the minute before.
import { buckets, grown, parse, quantile, sum, valuesOf } from './metrics.js';
import { ask, send } from './session.svelte.js';

const EVERY_MS = 1000;
const KEPT_S = 61;
const GAP_S = 10; // after a longer pause the samples of the service replace those of this page

export const live = $state({ failure: null, history: [], minute: null, paused: false });

let samples = []; // [{at: seconds, series}], newest last

const PROBES = /^(?!.*(?:metrics|health|console|\/docs|openapi|unmatched)).+/;
const TIMED = 'te_request_duration';

/** The figures between two samples. */
export function figures(before, after, elapsed) {
  const rate = (name, wanted) => grown(before, after, name, wanted) / elapsed;
  const models = {};
  for (const model of valuesOf(after, 'attnserve_ready', 'model')) {
    const own = { model };
    const named = { model_name: model };
    const encoder = valuesOf(after, 'attnserve_tokens_total', 'model').includes(model);
    models[model] = {
      ready: sum(after, 'attnserve_ready', own) > 0,
      requests: rate('te_request_count', { ...own, method: PROBES }),
      tokens: encoder ? rate('attnserve_tokens_total', own) : rate('vllm:generation_tokens_total', named),
      waiting: sum(after, encoder ? 'te_queue_size' : 'vllm:num_requests_waiting', encoder ? own : named),
      running: sum(after, 'vllm:num_requests_running', named),
      slots: sum(after, 'attnserve_slots', own),
      queueTokens: sum(after, 'attnserve_queue_tokens', own),
      offered: rate('attnserve_offered_seconds_total', own),
      p50: quantile(0.5, buckets(before, after, TIMED, own)),
      p99: quantile(0.99, buckets(before, after, TIMED, own)),
      encoder,
    };
  }
  const all = Object.values(models);
  const total = (name) => all.reduce((whole, each) => whole + each[name], 0);
  const timed = buckets(before, after, TIMED);
  return {
    models,
    requests: rate('te_request_count', { method: PROBES, model: /.+/ }),
    tokens: total('tokens'),
    p50: quantile(0.5, timed),
    p99: quantile(0.99, timed),
    queue: quantile(0.99, buckets(before, after, 'te_request_queue_duration')) ?? quantile(0.99, buckets(before, after, 'vllm:request_queue_time_seconds')),
    refused: grown(before, after, 'te_request_failure', { err: /^(429|503)$/ }),
    failed: grown(before, after, 'te_request_failure'),
    interactive: rate(`${TIMED}_count`, { lane: 'interactive' }),
    bulk: rate(`${TIMED}_count`, { lane: 'bulk' }),
    waiting: total('waiting'),
    offered: total('offered'),
  };
}

const between = (a, b) => ({ at: b.at, ...figures(a.series, b.series, b.at - a.at) });

/** The samples that the service has kept -> {samples, history}, for a page that begins `now` (seconds since 1970). */
export function restored(kept, now) {
  const found = kept.filter((each) => each.age_s >= 1).map((each) => ({ at: now - each.age_s, series: parse(each.metrics) }));
  return { samples: found, history: found.slice(1).map((sample, at) => between(found[at], sample)) };
}

async function look() {
  live.paused = document.hidden;
  if (live.paused) return;
  try {
    const now = Date.now() / 1000;
    if (!samples.length || now - samples.at(-1).at > GAP_S) ({ samples, history: live.history } = restored((await ask({ path: '/console/history' })).content, now));
    const answer = await send({ path: '/metrics', headers: { accept: 'text/plain' } });
    const sample = { at: Date.now() / 1000, series: parse(await answer.text()) };
    const before = samples.at(-1);
    const recent = (each) => sample.at - each.at <= KEPT_S;
    samples = [...samples, sample].filter(recent);
    if (before) {
      live.history = [...live.history, between(before, sample)].filter(recent);
      live.minute = { before: samples[0].series, after: sample.series, ...between(samples[0], sample) };
    }
    live.failure = null;
  } catch (error) {
    live.failure = error;
  }
}

/** The lines of a chart of latencies. */
export const LATENCY = [{ label: 'p99', colour: '--second', of: (each) => each.p99 }, { label: 'p50', of: (each) => each.p50 }];

/** Begins to sample, and returns what ends it. */
export function watch() {
  look();
  const timer = setInterval(look, EVERY_MS);
  return () => {
    clearInterval(timer);
    live.failure = null;
  };
}
