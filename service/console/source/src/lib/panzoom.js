// Moves and enlarges a drawing: by pointer, by wheel with Ctrl or while it has the focus, and by keys (arrows, +, -, 0).

const MOST = 40; // times
const MOVES = { ArrowLeft: [40, 0], ArrowRight: [-40, 0], ArrowUp: [0, 40], ArrowDown: [0, -40] };
const ZOOMS = { '+': 1.4, '=': 1.4, '-': 1 / 1.4, 0: 0 };

/**
 * Attaches to `node` and changes `view`, an object {x, y, k}: a point p of the drawing is shown at p * k + (x, y). Calls `hovered(x, y)` with
 * the place of the pointer in pixels, or null. Returns what detaches it. `inset()`: pixels at the left and at the top that are not of the
 * drawing, such as names of rows; places are counted from there.
 */
export function panzoom(node, view, hovered, inset) {
  let from = null;
  const stop = new AbortController();
  const on = (name, handler) => node.addEventListener(name, handler, { signal: stop.signal, passive: false });
  const place = (event) => {
    const box = node.getBoundingClientRect();
    return [event.clientX - box.left - inset(), event.clientY - box.top - inset()];
  };
  /** Moves and enlarges the view; the drawing keeps covering its place. */
  const change = (x, y, k = view.k) => {
    const held = (to, size) => Math.min(0, Math.max((size - inset()) * (1 - k), to));
    Object.assign(view, { x: held(x, node.clientWidth), y: held(y, node.clientHeight), k });
  };
  const zoom = (factor, x, y) => {
    const k = Math.max(1, Math.min(MOST, view.k * factor));
    change(x - ((x - view.x) * k) / view.k, y - ((y - view.y) * k) / view.k, k);
  };
  on('pointerdown', (event) => {
    from = place(event);
    node.setPointerCapture(event.pointerId);
  });
  on('pointermove', (event) => {
    const at = place(event);
    if (from) {
      change(view.x + at[0] - from[0], view.y + at[1] - from[1]);
      from = at;
    }
    hovered(...at);
  });
  for (const name of ['pointerup', 'pointercancel']) on(name, () => (from = null));
  on('pointerleave', () => hovered(null));
  on('wheel', (event) => {
    if (!event.ctrlKey && document.activeElement !== node) return;
    event.preventDefault();
    zoom(Math.exp(-event.deltaY / 300), ...place(event));
  });
  on('dblclick', (event) => zoom(2, ...place(event)));
  on('keydown', (event) => {
    const move = MOVES[event.key];
    if (move) change(view.x + move[0], view.y + move[1]);
    else if (event.key in ZOOMS) zoom(ZOOMS[event.key], node.clientWidth / 2, node.clientHeight / 2);
    else return;
    event.preventDefault();
  });
  return () => stop.abort();
}
