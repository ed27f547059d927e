// The colours of drawings: from the page's theme, as tables of 256 entries.
import { MediaQuery } from 'svelte/reactivity';

export const dark = new MediaQuery('(prefers-color-scheme: dark)');

const POSITIVE = { light: ['#f1f3f4', '#bfe3dc', '#5cb8ab', '#0f766e', '#06302d'], dark: ['#1e2125', '#0f4a45', '#178577', '#55d3c2', '#eafffb'] };
const NEGATIVE = { light: ['#f1f3f4', '#f5c8a4', '#d9822b', '#8a4b08', '#3d2003'], dark: ['#1e2125', '#5a3208', '#b4661a', '#f0a65e', '#fff0e0'] };

const channels = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));

function table(stops) {
  const all = stops.map(channels);
  return Uint32Array.from({ length: 256 }, (_, at) => {
    const place = (at / 255) * (all.length - 1);
    const low = Math.min(Math.floor(place), all.length - 2);
    const [r, g, b] = all[low].map((from, c) => Math.round(from + (all[low + 1][c] - from) * (place - low)));
    return (255 << 24) | (b << 16) | (g << 8) | r;
  });
}

/** n x m values -> a canvas of n x m pixels: values up to `high` are shades, those below 0 of another hue. */
export function painted(values, n, m, high) {
  const theme = dark.current ? 'dark' : 'light';
  const [positive, negative] = [table(POSITIVE[theme]), table(NEGATIVE[theme])];
  const canvas = Object.assign(document.createElement('canvas'), { width: m, height: n });
  const image = new ImageData(m, n);
  const pixels = new Uint32Array(image.data.buffer);
  for (let at = 0; at < n * m; at++) pixels[at] = (values[at] < 0 ? negative : positive)[Math.min(255, Math.round((255 * Math.abs(values[at])) / (high || 1)))];
  canvas.getContext('2d').putImageData(image, 0, 0);
  return canvas;
}

/** The largest absolute value. */
export const largest = (values) => values.reduce((most, x) => Math.max(most, Math.abs(x)), 0);

/** Resolves light-dark() colours of the theme to one that a canvas takes. */
export function colourOf(node, name) {
  const probe = document.createElement('i');
  probe.style.color = `var(${name})`;
  node.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}
