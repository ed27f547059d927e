-- wrk script: sends the lines of a file as JSON bodies, each once, in order; prints one line of JSON at the end.
-- wrk ... -s bodies.lua URL -- FILE        With one wrk thread: each thread would send all of them.

local thread_of_wrk

function setup(thread)
  thread_of_wrk = thread
end

function init(arguments)
  wrk.method = "POST"
  wrk.headers["Content-Type"] = "application/json"
  requests, sent, repeated = {}, 0, 0
  for line in io.lines(arguments[1]) do
    requests[#requests + 1] = wrk.format(nil, nil, nil, line)
  end
end

function request()
  sent = sent + 1
  if sent > #requests then
    sent, repeated = 1, repeated + 1
  end
  return requests[sent]
end

function done(summary, latency)
  local errors = summary.errors
  print(string.format(
    'RESULT {"requests": %d, "duration_s": %.6f, "p50_ms": %.3f, '
      .. '"connect_errors": %d, "read_errors": %d, "write_errors": %d, "status_errors": %d, "timeouts": %d, "repeated": %d}',
    summary.requests, summary.duration / 1e6,
    latency:percentile(50) / 1e3,
    errors.connect, errors.read, errors.write, errors.status, errors.timeout, thread_of_wrk:get("repeated")))
end
