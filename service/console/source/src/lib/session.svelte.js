// What all pages share: the API key, the models, and how to ask the service.
import { messageOf, nextStep } from './asking.js';
import { events } from './sse.js';

/** The key is kept in this variable alone, and gone with the page. */
let key = '';

export const session = $state({
  hasKey: false,
  needsKey: false, // the service refused a request without a key
  ready: null, // null: not known yet; false: models are loading
  problem: null, // a failure that concerns all pages
  about: null, // the answer of GET /
  models: [],
});

export class Failure extends Error {
  constructor(message, status, next, requestId = '') {
    super(message);
    this.status = status;
    this.next = next;
    this.requestId = requestId;
  }
}

const withKey = (headers) => (key ? { ...headers, authorization: `Bearer ${key}` } : headers);

/** Sends a request; raises Failure unless the answer is a success. */
export async function send({ method = 'GET', path, body, headers = {} }, signal) {
  let answer;
  try {
    const raw = body instanceof Blob || body instanceof ArrayBuffer;
    const type = body === undefined || raw ? {} : { 'content-type': 'application/json' };
    answer = await fetch(path, { method, signal, headers: withKey({ accept: 'application/json', ...type, ...headers }), body: body === undefined || raw ? body : JSON.stringify(body), cache: 'no-store' });
  } catch (error) {
    if (error.name === 'AbortError') throw new Failure('cancelled', 499, nextStep(499));
    throw new Failure('the service does not answer', 0, `Is it running at ${location.origin}? Start it, and try again.`);
  }
  if (answer.ok) return answer;
  if (answer.status === 401) session.needsKey = true;
  const content = await answer.json().catch(() => null);
  throw new Failure(messageOf(content, answer.status), answer.status, nextStep(answer.status), answer.headers.get('x-request-id') ?? '');
}

export async function ask(request, signal) {
  const answer = await send(request, signal);
  try {
    return { content: answer.status === 204 ? null : await answer.json(), headers: answer.headers };
  } catch (error) {
    throw error.name === 'AbortError' ? new Failure('cancelled', 499, nextStep(499)) : new Failure('the answer was cut off', 0, 'Send the request again.');
  }
}

/**
 * Reads a stream: calls `onEvent(content, id)` for each event. Returns {run, id, done}: done is false if the stream broke off before its
 * end, and then `id` is that of the last event.
 */
export async function stream(request, onEvent, signal) {
  const answer = await send({ ...request, headers: { ...request.headers, accept: 'text/event-stream' } }, signal);
  const state = { run: answer.headers.get('x-run-id'), id: request.headers?.['last-event-id'] ?? null, done: false };
  try {
    for await (const event of events(answer)) {
      if (event.id !== null) state.id = event.id;
      if (event.event === 'id') continue;
      if (event.data === '[DONE]') {
        state.done = true;
        continue;
      }
      const content = JSON.parse(event.data);
      if (content.error && !content.choices && !content.type?.startsWith('response')) {
        throw new Failure(messageOf(content, 500), Number(content.error.code) || 500, 'The stream ended with this error. Send the request again.');
      }
      onEvent(content, state);
    }
  } catch (error) {
    if (error instanceof Failure) throw error;
    if (error instanceof SyntaxError) throw new Failure('the stream has an event that is not JSON', 0, 'Send the request again.');
  }
  return state;
}

/** Asks what the service is and which models it has. Returns whether it told. */
export async function refresh() {
  try {
    const [about, models] = await Promise.all([ask({ path: '/' }), ask({ path: '/v1/models' })]);
    session.about = about.content;
    session.models = models.content.data;
    session.ready = true;
    session.problem = null;
    session.hasKey = session.needsKey = Boolean(key);
    return true;
  } catch (error) {
    if (error.status === 401) {
      session.ready = true;
      session.problem = null;
      forget();
    } else {
      session.ready = error.status === 503 ? false : session.ready;
      session.problem = error.status === 503 ? null : error;
      setTimeout(refresh, 1500);
    }
    return false;
  }
}

/** Returns whether the service takes the key. */
export function useKey(text) {
  key = text.trim();
  return refresh();
}

export function forget() {
  key = '';
  session.hasKey = false;
  session.models = [];
}

/** Served models without their aliases, of the kinds that are wanted. */
export const modelsOf = (test) => session.models.filter((model, at) => test(model) && session.models.findIndex((other) => other.fingerprint === model.fingerprint) === at);

/** The id that is wanted, if such a model is there, else that of the first. */
export const idOf = (models, wanted) => (models.find((model) => model.id === wanted) ?? models[0])?.id;

export const isText = (model) => model.kind === 'decoder' && !model.pictures;
