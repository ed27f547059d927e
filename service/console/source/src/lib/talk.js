// A conversation as a tree: every message has a parent, and a view of it is the way from its first message to one of the last.

/** An empty conversation. `leaf` is the message after which the next one comes. */
export const empty = () => ({ messages: [], leaf: null });

const at = (talk, id) => talk.messages.find((message) => message.id === id);

/** The messages from the first to the leaf. */
export function path(talk) {
  const found = [];
  for (let message = at(talk, talk.leaf); message; message = at(talk, message.parent)) found.unshift(message);
  return found;
}

/** Adds a message after `parent` and makes it the leaf. */
export const added = (talk, message) => ({ messages: [...talk.messages, message], leaf: message.id });

export const changed = (talk, id, more) => ({ ...talk, messages: talk.messages.map((message) => (message.id === id ? { ...message, ...more } : message)) });

/** Messages with the same parent, in the order in which they were made. */
export const siblings = (talk, message) => talk.messages.filter((other) => other.parent === message.parent && other.role === message.role);

/** Shows another branch: the newest message below `id`. */
export function shown(talk, id) {
  let leaf = id;
  for (let below; (below = talk.messages.findLast((message) => message.parent === leaf)); ) leaf = below.id;
  return { ...talk, leaf };
}
