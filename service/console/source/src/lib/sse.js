// Reads server-sent events (HTML standard, section 9.2) from the body of an answer.

/** A parser of one stream. `push` takes text and returns the events that it completes: {id, event, data}. */
export function parser() {
  let rest = '';
  let data = [];
  let id = null;
  let event = '';
  return {
    push(text) {
      const found = [];
      rest += text;
      const lines = rest.split(/\r\n|\n|\r(?=[^\n])/);
      rest = lines.pop();
      for (const line of lines) {
        if (line === '') {
          if (data.length) found.push({ id, event: event || 'message', data: data.join('\n') });
          else if (id !== null && !event) found.push({ id, event: 'id', data: '' });
          data = [];
          event = '';
          continue;
        }
        if (line.startsWith(':')) continue;
        const at = line.indexOf(':');
        const field = at < 0 ? line : line.slice(0, at);
        const value = at < 0 ? '' : line.slice(at + 1).replace(/^ /, '');
        if (field === 'data') data.push(value);
        else if (field === 'id' && !value.includes('\0')) id = value;
        else if (field === 'event') event = value;
      }
      return found;
    },
  };
}

/** Yields the events of an answer until its end. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  const each = parser();
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      yield* each.push(value);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
