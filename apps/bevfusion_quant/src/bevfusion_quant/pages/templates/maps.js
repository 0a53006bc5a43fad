// Feature maps: one colour scale for float and quantized, another for the difference.
const drawnStages = new Map();

function drawStage(panel) {
  const index = Number(panel.dataset.stage);
  if (!drawnStages.has(index)) drawnStages.set(index, startStage(panel, data.stages[index]));
  return drawnStages.get(index);
}

async function startStage(panel, stage) {
  const values = await Promise.all(stage.maps.map(unpackMap));
  const figures = all("figure", panel);
  const draw = () => figures.forEach((figure, i) => drawMap(figure, stage.maps[i], values[i], stage.scales[i < 2 ? 0 : 1], i === 2));
  redraws.push(draw);
  draw();
  startReading(panel, stage, values);
}

function drawMap(figure, map, values, [low, high], isDifference) {
  const signed = low < 0 && high > 0 && low === -high;
  const name = signed ? "signed" : isDifference ? "error" : "value";
  const level = (i) => (Number.isNaN(values[i]) ? -1 : (255 * Math.max(0, values[i] - low)) / (high - low));
  const [picture, bar] = all("canvas", figure);
  paint(picture, map.columns, map.rows, level, name);
  paint(bar, 256, 1, (i) => i, name);
  const labels = all(".scale span", figure);
  const bound = (value, clipped, sign) => (clipped ? sign : "") + shown(value);
  labels[0].textContent = bound(low, map.low < low, "≤ ");
  labels[1].textContent = shown((low + high) / 2);
  labels[2].textContent = bound(high, map.high > high, "≥ ");
}

function startReading(panel, stage, values) {
  const group = panel.querySelector(".maps");
  const output = panel.querySelector(".readout");
  const { rows, columns } = stage.maps[0];
  let at = null;
  const read = (row, column) => {
    at = [Math.max(0, Math.min(rows - 1, row)), Math.max(0, Math.min(columns - 1, column))];
    const i = at[0] * columns + at[1];
    output.textContent = `${place(stage, at)}: float ${shown(values[0][i])}, quantized ${shown(values[1][i])}, difference ${shown(values[2][i])}`;
    for (const cross of all(".cross", group)) {
      cross.hidden = false;
      cross.style.left = `${(100 * (at[1] + 0.5)) / columns}%`;
      cross.style.top = `${(100 * (at[0] + 0.5)) / rows}%`;
    }
  };
  group.addEventListener("pointermove", (event) => {
    const stack = event.target.closest(".stack");
    if (!stack) return;
    const frame = stack.getBoundingClientRect();
    read(Math.floor(((event.clientY - frame.top) / frame.height) * rows), Math.floor(((event.clientX - frame.left) / frame.width) * columns));
  });
  group.addEventListener("keydown", (event) => {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step) return;
    event.preventDefault();
    const [row, column] = at ?? [rows >> 1, columns >> 1];
    const far = event.shiftKey ? 10 : 1;
    read(row + far * step[0], column + far * step[1]);
  });
}

function place({ extent, maps }, [row, column]) {
  if (!extent) return `row ${row}, column ${column}`;
  const x = extent[0] + ((column + 0.5) * (extent[2] - extent[0])) / maps[0].columns;
  const y = extent[3] - ((row + 0.5) * (extent[3] - extent[1])) / maps[0].rows;
  return `x ${x.toFixed(1)} m, y ${y.toFixed(1)} m`.replaceAll("-", "−");
}
