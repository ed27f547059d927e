// The page and its state are in the address, after #, so every view has a link.

const MOST = 6000; // characters of an address that may be shared

function read() {
  const [path, query = ''] = location.hash.replace(/^#\/?/, '').split('?');
  return { page: path || 'overview', params: Object.fromEntries(new URLSearchParams(query)) };
}

export const route = $state(read());

/** Changes the state of this page in the address, without a new entry in the history. Empty values are left out. */
export function remember(params) {
  const all = { ...route.params, ...params };
  for (const name of Object.keys(all)) if (all[name] === '' || all[name] == null || all[name] === false) delete all[name];
  let query = new URLSearchParams(all).toString();
  if (query.length > MOST) {
    const longest = Object.keys(all).reduce((a, b) => (String(all[a]).length > String(all[b]).length ? a : b));
    query = new URLSearchParams(Object.fromEntries(Object.entries(all).filter(([name]) => name !== longest))).toString();
  }
  history.replaceState(null, '', `#/${route.page}${query ? `?${query}` : ''}`);
  route.params = all;
}

addEventListener('hashchange', () => Object.assign(route, read()));
