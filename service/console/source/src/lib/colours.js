// The colours of drawings: from the page's theme, as tables of 256 entries.

const STOPS = {
  light: ['#f1f3f4', '#bfe3dc', '#5cb8ab', '#0f766e', '#06302d'],
  dark: ['#1e2125', '#0f4a45', '#178577', '#55d3c2', '#eafffb'],
};
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

export const isDark = () => matchMedia('(prefers-color-scheme: dark)').matches;

export const tables = () => {
  const name = isDark() ? 'dark' : 'light';
  return { positive: table(STOPS[name]), negative: table(NEGATIVE[name]) };
};

/** n x m values -> a canvas of n x m pixels. `low` and above up to `high` are shades; below 0 of another hue if `low` is 0. */
export function painted(values, n, m, low, high) {
  const { positive, negative } = tables();
  const canvas = document.createElement('canvas');
  canvas.width = m;
  canvas.height = n;
  const image = new ImageData(m, n);
  const pixels = new Uint32Array(image.data.buffer);
  const scale = 255 / (high - low || 1);
  for (let at = 0; at < n * m; at++) {
    const x = values[at];
    const below = low === 0 && x < 0;
    pixels[at] = (below ? negative : positive)[Math.max(0, Math.min(255, Math.round(((below ? -x : x) - low) * scale)))];
  }
  canvas.getContext('2d').putImageData(image, 0, 0);
  return canvas;
}

/** The context of a canvas, sized for its box and the screen's pixels. */
export function fitted(canvas, width, height) {
  const ratio = devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext('2d');
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}

export const themed = (node, name) => getComputedStyle(node).getPropertyValue(name).trim();

/** Resolves light-dark() colours of the theme to one that a canvas takes. */
export function colourOf(node, name) {
  const probe = document.createElement('i');
  probe.style.color = `var(${name})`;
  node.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}
