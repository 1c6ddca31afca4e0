/** Reads a safetensors file, trusting nothing in it: 8 bytes header length, a JSON header, the tensors' bytes. */

/** @typedef {{shape: number[], data: Float32Array|Float64Array|Int8Array|Uint8Array|Int16Array|Uint16Array|Int32Array}} Tensor */

const ARRAYS = {
  F64: Float64Array, F32: Float32Array, I32: Int32Array, I16: Int16Array, I8: Int8Array, U8: Uint8Array, U16: Uint16Array,
};
const LONGEST_HEADER = 10_000_000;

/**
 * The tensors of a file by name.
 * @param {ArrayBuffer | Uint8Array} file
 * @returns {Map<string, Tensor>}
 * @throws {Error} one line that says what is damaged
 */
export function readTensors(file) {
  const bytes = file instanceof Uint8Array ? file : new Uint8Array(file);
  const { entries, start } = headerOf(bytes);
  const tensors = new Map();
  let expected = 0; // the tensors lie one after the other, in some order, without a gap
  for (const [name, entry] of entries.sort((a, b) => a[1].begin - b[1].begin)) {
    const { dtype, shape, begin, end } = entry;
    const kind = ARRAYS[dtype];
    const size = shape.reduce((product, n) => product * n, 1);
    if (begin !== expected || end - begin !== size * kind.BYTES_PER_ELEMENT) {
      throw damaged(`tensor "${name}" of shape [${shape}] does not lie at bytes ${begin} to ${end}`);
    }
    expected = end;
    if (start + end > bytes.length) throw damaged(`it is cut short inside tensor "${name}"`);
    // A copy: the header may leave the bytes at an address that is no multiple of the element's size.
    tensors.set(name, { shape, data: new kind(new Uint8Array(bytes.subarray(start + begin, start + end)).buffer) });
  }
  if (start + expected !== bytes.length) throw damaged(`${bytes.length - start - expected} bytes belong to no tensor`);
  return tensors;
}

function headerOf(bytes) {
  if (bytes.length < 8) throw damaged(`it has ${bytes.length} bytes`);
  const length = new DataView(bytes.buffer, bytes.byteOffset, 8).getBigUint64(0, true);
  if (length > LONGEST_HEADER || 8 + Number(length) > bytes.length) {
    throw damaged(`its header would have ${length} bytes, the file has ${bytes.length}`);
  }
  const start = 8 + Number(length);
  let header;
  try {
    header = JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(bytes.subarray(8, start)));
  } catch {
    throw damaged("its header is not JSON");
  }
  if (!isObject(header)) throw damaged("its header is not an object");
  const entries = Object.entries(header).filter(([name]) => name !== "__metadata__");
  return { entries: entries.map(([name, entry]) => [name, checkedEntry(name, entry)]), start };
}

function checkedEntry(name, entry) {
  if (!isObject(entry)) throw damaged(`the entry of tensor "${name}" is not an object`);
  const { dtype, shape, data_offsets: offsets } = entry;
  if (!Object.hasOwn(ARRAYS, dtype)) throw damaged(`tensor "${name}" is of type ${String(dtype).slice(0, 20)}`);
  const isSize = (n) => Number.isSafeInteger(n) && n >= 0;
  if (!Array.isArray(shape) || !shape.every(isSize)) throw damaged(`tensor "${name}" has no shape`);
  if (!Array.isArray(offsets) || offsets.length !== 2 || !offsets.every(isSize) || offsets[0] > offsets[1]) {
    throw damaged(`tensor "${name}" has no offsets`);
  }
  return { dtype, shape, begin: offsets[0], end: offsets[1] };
}

/**
 * The parameters of a model as float32: a matrix NAME of int8 is multiplied by its NAME.scale, row by row.
 * @param {Map<string, Tensor>} tensors
 * @returns {Map<string, {shape: number[], data: Float32Array}>}
 */
export function widened(tensors) {
  const found = new Map();
  for (const [name, { shape, data }] of tensors) {
    const scaleOf = name.endsWith(".scale") ? tensors.get(name.slice(0, -".scale".length)) : undefined;
    if (scaleOf?.data instanceof Int8Array) continue; // used below
    if (data instanceof Float32Array) found.set(name, { shape, data });
    else if (data instanceof Int8Array) found.set(name, { shape, data: widenedRows(name, shape, data, tensors) });
    else throw damaged(`parameter "${name}" is neither float32 nor int8`);
  }
  return found;
}

function widenedRows(name, shape, data, tensors) {
  const scale = tensors.get(`${name}.scale`);
  if (!(scale?.data instanceof Float32Array) || shape.length !== 2 || scale.data.length !== shape[0]) {
    throw damaged(`parameter "${name}" of shape [${shape}] has no scale for each row`);
  }
  const [rows, columns] = shape;
  const wide = new Float32Array(rows * columns);
  for (let row = 0, at = 0; row < rows; row++) {
    const factor = scale.data[row];
    for (const end = at + columns; at < end; at++) wide[at] = data[at] * factor;
  }
  return wide;
}

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
const damaged = (what) => new Error(`damaged safetensors file: ${what}`);
