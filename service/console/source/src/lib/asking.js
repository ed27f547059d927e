// Writes a request as a command or a program, and an error as a sentence with the next step.

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

const plain = (value) => JSON.stringify(value, null, 1).replace(/\n\s*/g, ' ');

/** Long lists and texts are shortened where a request is only shown. */
export function shortened(value, most = 400) {
  if (typeof value === 'string') return value.length > most ? `${value.slice(0, most)}…` : value;
  if (Array.isArray(value)) return value.length > 12 ? [...value.slice(0, 12).map((each) => shortened(each, 80)), `… ${value.length - 12} more`] : value.map((each) => shortened(each, most));
  if (value && typeof value === 'object') return Object.fromEntries(Object.entries(value).map(([name, each]) => [name, shortened(each, most)]));
  return value;
}

export function curl({ method = 'GET', path, body, headers = {} }, origin, needsKey) {
  const parts = [`curl -s${body?.stream || headers['last-event-id'] ? 'N' : ''}${method !== 'GET' && !(method === 'POST' && body !== undefined) ? ` -X ${method}` : ''} ${quoted(origin + path)}`];
  if (needsKey) parts.push('-H "authorization: Bearer $ATTNSERVE_API_KEY"');
  for (const [name, value] of Object.entries(headers)) parts.push(`-H ${quoted(`${name}: ${value}`)}`);
  if (body !== undefined) parts.push(`-H 'content-type: application/json'`, `-d ${quoted(plain(body))}`);
  return parts.join(' \\\n  ');
}

export function python({ method = 'GET', path, body, headers = {} }, origin, needsKey) {
  const all = Object.entries(headers).map(([name, value]) => `${JSON.stringify(name)}: ${JSON.stringify(value)}`);
  if (needsKey) all.push('"authorization": f"Bearer {os.environ[\'ATTNSERVE_API_KEY\']}"');
  const lines = [needsKey ? 'import os\n\nimport httpx' : 'import httpx', ''];
  const more = [body === undefined ? '' : `,\n    json=${literal(body)}`, all.length ? `,\n    headers={${all.join(', ')}}` : ''].join('');
  lines.push(`answer = httpx.request(\n    "${method}", ${JSON.stringify(origin + path)}${more},\n    timeout=60,\n)`, 'print(answer.raise_for_status().text)');
  return lines.join('\n');
}

const literal = (value) => plain(value).replace(/("(?:[^"\\]|\\.)*")|\btrue\b|\bfalse\b|\bnull\b/g, (found, text) => text ?? { true: 'True', false: 'False', null: 'None' }[found]);

export function javascript({ method = 'GET', path, body, headers = {} }, origin, needsKey) {
  const all = { ...(body === undefined ? {} : { 'content-type': 'application/json' }), ...headers };
  const shown = Object.entries(all).map(([name, value]) => `'${name}': ${JSON.stringify(value)}`);
  if (needsKey) shown.push('authorization: `Bearer ${process.env.ATTNSERVE_API_KEY}`');
  const options = [`method: '${method}'`, ...(shown.length ? [`headers: { ${shown.join(', ')} }`] : []), ...(body === undefined ? [] : [`body: JSON.stringify(${plain(body)})`])];
  return `const answer = await fetch(${JSON.stringify(origin + path)}, {\n  ${options.join(',\n  ')},\n});\nconsole.log(await answer.text());`;
}

const NEXT = {
  401: 'Enter an API key with the button at the top.',
  403: 'The tenant of this key may not do this: see its limits at /v1/usage.',
  404: 'Check the name: the Overview lists the models, the States page the states.',
  406: 'Accept a type that the message names.',
  408: 'The upload was too slow: try again, or send less.',
  410: 'It expired or was evicted: make it again from its text.',
  412: 'Somebody else moved the name meanwhile: load the page again.',
  413: 'Send less in one request.',
  429: 'The service sheds load now. Try again when the time in the message has passed.',
  499: 'The request was cancelled.',
  500: "The service's log has the reason under the request id.",
  503: 'Models are loading, or the service stops. Try again in some seconds.',
  504: 'The deadline passed: send less, or raise x-request-timeout-ms.',
};

export const nextStep = (status) => NEXT[status] ?? (status >= 500 ? NEXT[500] : 'Change the request as the message says, and send it again.');

/** The message of an error's body in any of the service's dialects. */
export function messageOf(content, status) {
  const said = content?.error?.message ?? content?.error ?? content?.message ?? content?.detail;
  return typeof said === 'string' && said ? said : `the service answered with status ${status}`;
}
