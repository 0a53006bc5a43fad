// Colour scales: more is further from the paper, in both themes.
const RAMPS = {
  light: {
    value: ["#eef6f1", "#bfe3cf", "#7cc7b5", "#45a5ab", "#36809f", "#3a5a90", "#3b3970", "#2a1e45"],
    error: ["#fbf3ea", "#f8dcbd", "#f0b27c", "#dd8142", "#b95718", "#873a0c", "#542408"],
    signed: ["#0f4c8f", "#4a8ac4", "#a9cbe6", "#f4f4f1", "#f3c39b", "#d47a33", "#8f3c06"],
    height: ["#c9d3dd", "#9fb3c8", "#6f8fb0", "#456b94", "#264a73", "#122c4d"],
  },
  dark: {
    value: ["#141a2b", "#2b2650", "#393f7b", "#37669c", "#3590a6", "#46b9ab", "#94dbb4", "#e6f7ea"],
    error: ["#191411", "#45210f", "#7d3a12", "#b85c1c", "#e58b42", "#f8bf86", "#fff0de"],
    signed: ["#9fd0ff", "#4f93d8", "#234b78", "#151a21", "#7a3d12", "#d9792b", "#ffc890"],
    height: ["#2b3a4d", "#3f5a78", "#5b82a8", "#84aacd", "#b5d0e8", "#e9f3fb"],
  },
};

const darkWanted = matchMedia("(prefers-color-scheme: dark)");
let printing = false;
function theme() {
  if (printing) return "light";
  return document.documentElement.dataset.theme || (darkWanted.matches ? "dark" : "light");
}

// 256 colours, RGBA, from a few stops.
const tables = new Map();
function ramp(name) {
  const key = theme() + name;
  if (!tables.has(key)) {
    const stops = RAMPS[theme()][name].map((hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16)));
    const table = new Uint8ClampedArray(1024);
    for (let i = 0; i < 256; i++) {
      const at = (i / 255) * (stops.length - 1);
      const low = Math.min(Math.floor(at), stops.length - 2);
      for (let c = 0; c < 3; c++) {
        table[4 * i + c] = stops[low][c] + (at - low) * (stops[low + 1][c] - stops[low][c]);
      }
      table[4 * i + 3] = 255;
    }
    tables.set(key, table);
  }
  return tables.get(key);
}

// Paint level(i) in 0 … 255, or below 0 for an empty cell, onto a canvas of that size.
function paint(canvas, columns, rows, level, name) {
  canvas.width = columns;
  canvas.height = rows;
  const table = ramp(name);
  const context = canvas.getContext("2d");
  const image = context.createImageData(columns, rows);
  for (let i = 0; i < columns * rows; i++) {
    const value = level(i);
    if (value < 0 || Number.isNaN(value)) continue;
    const at = 4 * Math.min(255, Math.round(value));
    for (let c = 0; c < 4; c++) image.data[4 * i + c] = table[at + c];
  }
  context.putImageData(image, 0, 0);
}
