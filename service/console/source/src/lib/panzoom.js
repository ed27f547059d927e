// Moves and enlarges a drawing: by pointer, by wheel with Ctrl or while it has the focus, and by keys (arrows, +, -, 0).

/**
 * Attaches to `node` with `view`, an object {x, y, k}: a point p of the drawing is shown at p * k + (x, y). Calls `changed` after each change,
 * `hovered(x, y)` with the place of the pointer in pixels, or null. Returns what detaches it. `inset()`: pixels at the left and at the top that are not
 * of the drawing, such as names of rows; places are counted from there.
 */
export function panzoom(node, view, changed, hovered = () => {}, { most = 40, inset = () => 0 } = {}) {
  let from = null;
  const stop = new AbortController();
  const on = (name, handler, options = {}) => node.addEventListener(name, handler, { signal: stop.signal, ...options });
  const place = (event) => {
    const box = node.getBoundingClientRect();
    return [event.clientX - box.left - inset(), event.clientY - box.top - inset()];
  };
  const zoom = (factor, x, y) => {
    const k = Math.max(1, Math.min(most, view.k * factor));
    view.x = x - ((x - view.x) * k) / view.k;
    view.y = y - ((y - view.y) * k) / view.k;
    view.k = k;
    hold();
  };
  const hold = () => {
    const [width, height] = [node.clientWidth - inset(), node.clientHeight - inset()];
    view.x = Math.min(0, Math.max(width * (1 - view.k), view.x));
    view.y = Math.min(0, Math.max(height * (1 - view.k), view.y));
    changed();
  };
  on('pointerdown', (event) => {
    from = place(event);
    node.setPointerCapture(event.pointerId);
  });
  on('pointermove', (event) => {
    const at = place(event);
    if (from) {
      view.x += at[0] - from[0];
      view.y += at[1] - from[1];
      from = at;
      hold();
    }
    hovered(...at);
  });
  on('pointerup', () => (from = null));
  on('pointercancel', () => (from = null));
  on('pointerleave', () => hovered(null));
  on(
    'wheel',
    (event) => {
      if (!event.ctrlKey && document.activeElement !== node) return;
      event.preventDefault();
      zoom(Math.exp(-event.deltaY / 300), ...place(event));
    },
    { passive: false },
  );
  on('dblclick', (event) => zoom(2, ...place(event)));
  on('keydown', (event) => {
    const moves = { ArrowLeft: [40, 0], ArrowRight: [-40, 0], ArrowUp: [0, 40], ArrowDown: [0, -40] };
    const middle = [node.clientWidth / 2, node.clientHeight / 2];
    if (moves[event.key]) {
      view.x += moves[event.key][0];
      view.y += moves[event.key][1];
      hold();
    } else if (event.key === '+' || event.key === '=') zoom(1.4, ...middle);
    else if (event.key === '-') zoom(1 / 1.4, ...middle);
    else if (event.key === '0') {
      Object.assign(view, { x: 0, y: 0, k: 1 });
      changed();
    } else return;
    event.preventDefault();
  });
  return () => stop.abort();
}

/** Calls `draw` at most once for each frame. */
export function perFrame(draw) {
  let asked = 0;
  return () => {
    asked ||= requestAnimationFrame(() => {
      asked = 0;
      draw();
    });
  };
}
