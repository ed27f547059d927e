// Lays out states as a forest: children below their parent, indented, the oldest first.

/**
 * States -> rows in the order in which they are shown: {state, depth, last: for each level whether that ancestor is its parent's last
 * child, missing: whether the parent is not in the list}. A state whose parent is not in the list begins a tree.
 */
export function layout(states) {
  const known = new Map(states.map((state) => [state.id, state]));
  const children = new Map();
  const roots = [];
  for (const state of states) {
    if (state.parent && known.has(state.parent)) {
      if (!children.has(state.parent)) children.set(state.parent, []);
      children.get(state.parent).push(state);
    } else roots.push(state);
  }
  const oldest = (a, b) => a.created - b.created || a.position - b.position || (a.id < b.id ? -1 : 1);
  for (const list of children.values()) list.sort(oldest);
  // The tree that was used last comes first.
  const newest = (state) => Math.max(state.created, ...(children.get(state.id) ?? []).map(newest));
  roots.sort((a, b) => newest(b) - newest(a) || oldest(a, b));
  const rows = [];
  const pending = roots.toReversed().map((state) => ({ state, last: [] }));
  while (pending.length) {
    const { state, last } = pending.pop();
    rows.push({ state, depth: last.length, last, missing: Boolean(state.parent) && !known.has(state.parent) });
    const below = children.get(state.id) ?? [];
    for (let at = below.length - 1; at >= 0; at--) pending.push({ state: below[at], last: [...last, at === below.length - 1] });
  }
  return rows;
}
