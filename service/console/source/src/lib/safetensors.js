// Reads the float32 tensors of a safetensors file, the form of a state's blob.

/** ArrayBuffer -> [{name, shape, data: Float32Array}], in the order of the names. */
export function tensors(buffer) {
  const view = new DataView(buffer);
  const size = Number(view.getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, size)));
  return Object.entries(header)
    .filter(([name, each]) => name !== '__metadata__' && each.dtype === 'F32')
    .map(([name, each]) => {
      const [begin, end] = each.data_offsets;
      return { name, shape: each.shape, data: new Float32Array(buffer.slice(8 + size + begin, 8 + size + end)) };
    })
    .sort((a, b) => a.name.localeCompare(b.name, 'en', { numeric: true }));
}

/** The Euclidean norm of each head's matrix of a tensor of shape (1, H, D_k, D_v) or (H, D_k, D_v). */
export function norms({ shape, data }) {
  const [heads, rows, columns] = shape.slice(-3);
  const size = rows * columns;
  return Array.from({ length: heads }, (_, head) => {
    let total = 0;
    for (let at = head * size; at < (head + 1) * size; at++) total += data[at] ** 2;
    return Math.sqrt(total);
  });
}
