// Numbers out of the page's data block.
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const all = (selector, root = document) => [...root.querySelectorAll(selector)];

async function unpack(text) {
  const packed = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// A map as floats, first row on top; NaN where a cell is empty.
async function unpackMap(map) {
  const bytes = await unpack(map.data);
  const cells = map.rows * map.columns;
  const step = (map.high - map.low) / 4095;
  const values = new Float64Array(cells);
  for (let i = 0; i < cells; i++) {
    const level = (bytes[i] << 8) | bytes[cells + i];
    values[i] = level === 0xffff ? NaN : map.low + level * step;
  }
  return values;
}

// Four significant digits, the way a person writes them.
function shown(value) {
  if (!Number.isFinite(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  const text = size >= 1e5 || size < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
  return text.replace("-", "−");
}

const SVG = "http://www.w3.org/2000/svg";
function svg(name, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

function make(name, className, text) {
  const element = document.createElement(name);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}
