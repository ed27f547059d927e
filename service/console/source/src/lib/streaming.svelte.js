// A stream of completions that goes on after its connection is lost.
import { Failure, send, stream } from './session.svelte.js';

const WAIT_MS = 1000;
const MOST_TRIES = 60;

/** The text of one request, while it arrives. */
export class Reading {
  tokens = $state.raw([]);
  text = $state('');
  state = $state('idle'); // idle, running, lost, done, failed
  marks = $state.raw([]); // numbers of tokens after which the connection was lost
  pauses = $state.raw([]); // seconds without a connection, for each mark
  usage = $state.raw(null);
  finish = $state('');
  failure = $state.raw(null);
  run = $state('');
  resumed = $state.raw(null); // the last request that continued the stream
  #connection = null;
  #cancelled = false;
  #pending = [];
  #frame = 0;

  constructor(request) {
    this.request = request;
  }

  /** Reads to the end, whatever happens to the connection. */
  async read() {
    this.state = 'running';
    let request = this.request;
    let since = 0;
    for (let tries = 0; ; tries++) {
      this.#connection = new AbortController();
      let end = null;
      try {
        end = await stream(request, (content, state) => this.#take(content, state, () => { if (since) { this.pauses = [...this.pauses, (performance.now() - since) / 1000]; since = 0; tries = 0; } }), this.#connection.signal);
      } catch (error) {
        const lost = error.status === 0 || error.status === 499 || error.status === 502 || (this.run && [503, 404].includes(error.status));
        if (!lost || (!this.run && error.status !== 499)) return this.#end('failed', error);
        this.state = 'lost';
      }
      this.#flush();
      if (this.#cancelled) return this.#end('done');
      if (end?.done) return this.#end('done');
      if (end) {
        this.run = end.run ?? this.run;
        this.id = end.id ?? this.id;
      }
      if (!this.run || !this.id || tries > MOST_TRIES) return this.#end('failed', new Failure('the stream broke off and cannot be continued', 0, 'Send the request again.'));
      if (!since) {
        since = performance.now();
        this.marks = [...this.marks, this.tokens.length];
      }
      this.state = 'lost';
      await new Promise((resolve) => setTimeout(resolve, WAIT_MS));
      if (this.#cancelled) return this.#end('done');
      request = { path: `/v1/stream/${this.run}`, headers: { 'last-event-id': this.id } };
      this.resumed = request;
    }
  }

  #take(content, state, came) {
    this.run = state.run ?? this.run;
    this.id = state.id ?? this.id;
    this.state = 'running';
    came();
    if (content.usage) this.usage = content.usage;
    const choice = content.choices?.[0];
    if (!choice) return;
    const piece = choice.text ?? '';
    const logprobs = choice.logprobs;
    if (logprobs) logprobs.tokens.forEach((text, at) => this.#pending.push({ text, logprob: logprobs.token_logprobs[at], top: logprobs.top_logprobs?.[at] }));
    else if (piece) this.#pending.push({ text: piece });
    this.text += piece;
    if (choice.finish_reason) this.finish = choice.finish_reason;
    if (choice.attention) this.attention = choice.attention;
    this.#frame ||= requestAnimationFrame(() => this.#flush());
  }

  #flush() {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    if (this.#pending.length) this.tokens = this.tokens.concat(this.#pending);
    this.#pending = [];
  }

  #end(state, failure = null) {
    this.#flush();
    this.state = state;
    this.failure = failure;
  }

  /** Cuts the connection, as a network would. The stream then goes on by itself. */
  drop() {
    this.#connection?.abort();
  }

  stop() {
    this.#cancelled = true;
    this.#connection?.abort();
  }
}

export const killGenerator = () => send({ method: 'POST', path: '/v1/development/kill' });
