"""Overload control: the rules by which requests are refused, delayed or dropped. No file here imports HTTP libraries or models.

The rules apply to a request in this order. An *encoding* is a request for vectors, scores or labels, a *text* is one for generated text.
In the column "number", names without parentheses are settings. In the column "code", a file without a folder is in this folder. 429
answers have the header `Retry-After`.

| rule | number | code |
|---|---|---|
| 503 for a connection when too many are open, in total or from one address | `most_connections()`; half of it | `http/connections.py` |
| 429 for a tenant that has used up its quota | the limits in `api_keys_file` | `http/tenants.py`, `http/shared_limits.py` |
| 429 for a request that is read late, if all recent requests were read late | waited > `max_wait_s` | `refusals.py` |
| 429 for a body or a large answer that exceeds its client's share of memory | `max_pending_bytes` | `byte_shares.py` |
| 429 for the body that waits longest for its next bytes, when too many wait | 1,024 bodies | `uploads.py` |
| 408 for a body that stops, or is too slow | `body_grace_s`, `min_body_bytes_per_s` | `uploads.py` |
| 413 for a body or an answer that is too large | `max_body_bytes`, `max_answer_bytes` | `http/edge.py`, `call.py` |
| 413 for an encoding that never fits into the queue | tokens > `max_queue_tokens` | `encoding/queue.py` |
| 429 for an encoding when the queue is too long | tokens before it / rate > bound | `encoding/queue.py`, `queue_bound.py` |
| 429 for an encoding when there is no room in the queue | queued + own tokens > `max_queue_tokens` | `encoding/queue.py` |
| 429 for an encoding that would miss its deadline | tokens before it / rate > time left | `encoding/queue.py` |
| 429 by a replica that keeps places, if another one is asked afterwards | any place | `pools/host.py` |
| 429 at a gateway for an encoding that the pool has just refused | 0.05 s since that refusal | `refusals.py` |
| 429 for a text when the wait for a slot would be, or is, too long | wait > `max_wait_s` | `generation/admission.py` |
| 429 for a text when too many wait; the client with the most waiting runs loses its newest request | 256 runs | `generation/admission.py` |
| the previous two rules for an encoder-decoder, by rows | `max_wait_s`; 256 inputs | `encoder_decoder/engine.py` |
| 429 for an attention map when too many wait | 8 texts | `encoding/maps.py` |
| 429 for an encoding that is queued, and dropped under overload | not started after 3 short queues | `encoding/queue.py` |
| 504 for a request that has no part of its answer at its deadline | `request_timeout_s`, `x-request-timeout-ms` | each engine |
| a delay of each 429 for a long queue, 1 s at most | (refusals per second) / 200, in seconds | `refusals.py` |

**The bound of a queue** is `max_wait_s` of work (`max_bulk_wait_s` in the bulk lane), so that it can absorb a burst. Under overload the
bound is a *short queue*, which keeps every thread busy: a quarter of `max_batch_tokens`, divided by the rate. The *rate* is a moving
average of tokens per second, measured at start and by each run. An empty queue admits any request.

**Overload** of a lane begins when a request is refused because the queue is too long for every client, and ends one second after the last
such refusal. Overload of the interactive lane is also detected before its queue is full: when the work that arrives is more than the
runtime can do and more than 1.5 times the work started, in three consecutive windows of at least 0.1 s and 10 requests. Such an overload
ends with the first window without this excess.

**Under overload** of the interactive lane a batch has at most half of `max_batch_tokens`, so that an admitted request waits only for one
short run and its own run. A request is dropped if it waits longer than three short queues take before a thread takes its first input. Bulk
work still gets a quarter of the rate.

**Clients** share a queue. The "tokens before" a request are all queued tokens of its own client, and at most as many of each other client.
So a client that sends without pause is refused while other clients are admitted. Such refusals are no sign of overload.

**Places** are kept for clients that come back when `Retry-After` told them to. Their work counts as queued from their refusal on, so that
each client is told a later time than those before it, and new requests do not take their places. On their return they may wait longer than
`max_wait_s`, by half of the time that they were told. In a pool one replica keeps the place of a request (`pools/tries.py`).

Read in this order: `queue_bound.py` (the bound of one queue, and whether it is overloaded), `promises.py` (places for clients that were
refused), `refusals.py` (requests that are read late, refused requests that come back, and the delay of refusals), `byte_shares.py` and
`uploads.py` (memory of bodies and answers).
"""
