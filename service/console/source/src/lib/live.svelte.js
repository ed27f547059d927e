// Samples /metrics every second while a page shows it, and keeps a minute of figures. The service has kept the minute before.
import { buckets, grown, parse, quantile, sum, valuesOf } from './metrics.js';
import { ask, send } from './session.svelte.js';

const EVERY_MS = 1000;
const KEPT_S = 61;
const GAP_S = 10; // after a longer pause the samples of the service replace those of this page

export const live = $state({ samples: 0, failure: null, history: [], latest: null, minute: null, paused: false });

let samples = []; // [{at: seconds, series}], newest last
let watchers = 0;
let timer = null;

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
      failures: grown(before, after, 'te_request_failure', own),
      tokens: encoder ? rate('attnserve_tokens_total', own) : rate('vllm:generation_tokens_total', named),
      promptTokens: rate('vllm:prompt_tokens_total', named),
      waiting: sum(after, encoder ? 'te_queue_size' : 'vllm:num_requests_waiting', encoder ? own : named),
      running: sum(after, 'vllm:num_requests_running', named),
      slots: sum(after, 'attnserve_slots', own),
      queueTokens: sum(after, 'attnserve_queue_tokens', own),
      offered: rate('attnserve_offered_seconds_total', own),
      capacity: sum(after, 'attnserve_tokens_per_second', own),
      padding: rate('attnserve_padding_tokens_total', own),
      hits: rate('attnserve_cache_hits_total', own),
      joined: rate('attnserve_joined_inputs_total', own),
      p50: quantile(0.5, buckets(before, after, TIMED, own)),
      p99: quantile(0.99, buckets(before, after, TIMED, own)),
      encoder,
    };
  }
  const all = Object.values(models);
  const total = (name) => all.reduce((whole, each) => whole + each[name], 0);
  const timed = buckets(before, after, TIMED);
  const queued = buckets(before, after, 'te_request_queue_duration');
  const waited = buckets(before, after, 'vllm:request_queue_time_seconds');
  return {
    models,
    requests: rate('te_request_count', { method: PROBES, model: /.+/ }),
    tokens: total('tokens'),
    p50: quantile(0.5, timed),
    p99: quantile(0.99, timed),
    queue: quantile(0.99, queued) ?? quantile(0.99, waited),
    refused: grown(before, after, 'te_request_failure', { err: /^(429|503)$/ }),
    failed: grown(before, after, 'te_request_failure'),
    interactive: rate(`${TIMED}_count`, { lane: 'interactive' }),
    bulk: rate(`${TIMED}_count`, { lane: 'bulk' }),
    waiting: total('waiting'),
    offered: total('offered'),
    active: sum(after, 'attnserve_active_requests'),
  };
}

/** The samples that the service has kept -> {samples, history}, for a page that begins `now` (seconds) and at `date` (seconds). */
export function restored(kept, now, date) {
  const found = kept.filter((each) => each.age_s >= 1).map((each) => ({ at: now - each.age_s, series: parse(each.metrics) }));
  const history = found.slice(1).map((sample, at) => ({ at: date - (now - sample.at), ...figures(found[at].series, sample.series, sample.at - found[at].at) }));
  return { samples: found, history };
}

async function look() {
  if (document.hidden) {
    live.paused = true;
    return;
  }
  live.paused = false;
  try {
    const begun = performance.now() / 1000;
    if (!samples.length || begun - samples.at(-1).at > GAP_S) {
      const { content } = await ask({ path: '/console/history' });
      ({ samples, history: live.history } = restored(content, begun, Date.now() / 1000));
    }
    const answer = await send({ path: '/metrics', headers: { accept: 'text/plain' } });
    const sample = { at: performance.now() / 1000, series: parse(await answer.text()) };
    const before = samples.at(-1);
    samples = [...samples, sample].filter((each) => sample.at - each.at <= KEPT_S);
    live.latest = sample.series;
    if (before) {
      const at = Date.now() / 1000;
      live.history = [...live.history, { at, ...figures(before.series, sample.series, sample.at - before.at) }].filter((each) => at - each.at <= KEPT_S);
      live.minute = { seconds: sample.at - samples[0].at, before: samples[0].series, after: sample.series, ...figures(samples[0].series, sample.series, sample.at - samples[0].at) };
    }
    live.samples++;
    live.failure = null;
  } catch (error) {
    live.failure = error;
  }
}

/** Begins to sample, and returns what ends it. */
export function watch() {
  watchers++;
  if (!timer) {
    look();
    timer = setInterval(look, EVERY_MS);
  }
  return () => {
    if (--watchers === 0) {
      clearInterval(timer);
      timer = null;
    }
  };
}
