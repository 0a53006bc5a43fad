// SQNR of every layer in the order of execution, linked to the rows of the table.
let pickLayer = () => {};
let markHidden = () => {};

function startChart() {
  const box = byId("layer-chart");
  if (!box) return;
  const readout = make("div", "readout", "\u00a0");
  const draw = () => drawChart(box, readout);
  let width = 0;
  new ResizeObserver(() => {
    if (Math.abs(box.clientWidth - width) < 2) return;
    width = box.clientWidth;
    draw();
  }).observe(box);
}

function drawChart(box, readout) {
  const { layers, low } = data.layers;
  const width = Math.max(240, box.clientWidth - 16);
  const height = width < 500 ? 190 : 240;
  const frame = { left: 34, right: width - 10, top: 36, bottom: height - 12 };
  const known = layers.map((layer) => layer[2]).filter((value) => value !== null);
  const least = Math.min(0, ...known);
  const most = Math.max(low, 1, ...known) * 1.06;
  const x = (i) => frame.left + 6 + ((i + 0.5) / layers.length) * (frame.right - frame.left - 6);
  const y = (value) => frame.bottom - ((value - least) / (most - least)) * (frame.bottom - frame.top);
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "slider", tabindex: 0,
    "aria-label": "Layer, SQNR of its output", "aria-valuemin": 1, "aria-valuemax": layers.length, "aria-valuenow": 1, "aria-valuetext": "none read yet" });
  const step = [1, 2, 5, 10, 20, 50].find((s) => (most - least) / s <= 6) ?? 100;
  for (let tick = Math.ceil(least / step) * step; tick <= most; tick += step) {
    picture.append(svg("line", { class: "rule", x1: frame.left, x2: frame.right, y1: y(tick), y2: y(tick) }));
    picture.append(svg("text", { x: frame.left - 6, y: y(tick) + 4, "text-anchor": "end" }, shown(tick)));
  }
  picture.append(svg("text", { x: 0, y: 12 }, "dB"));
  drawParts(picture, layers, x, frame);
  picture.append(svg("line", { class: "threshold", x1: frame.left, x2: frame.right, y1: y(low), y2: y(low) }));
  const radius = Math.max(1.8, Math.min(4, (frame.right - frame.left) / layers.length / 2.2));
  const dots = layers.map(([, , value], i) => {
    if (value === null) return null;
    if (x(1) - x(0) > 4) picture.append(svg("line", { class: "stalk", x1: x(i), x2: x(i), y1: y(Math.max(least, 0)), y2: y(value) }));
    return svg("circle", { class: value < low ? "dot low" : "dot", cx: x(i), cy: y(value), r: radius });
  });
  picture.append(...dots.filter(Boolean));
  const ring = svg("circle", { class: "pick", r: radius + 3, visibility: "hidden" });
  picture.append(ring);
  box.replaceChildren(picture, readout);
  linkChart(picture, { layers, dots, ring, x, y, frame, readout });
}

// The parts of the model, named over the dots they cover.
function drawParts(picture, layers, x, frame) {
  const half = (x(1) - x(0)) / 2 || 0;
  const ends = [-Infinity, -Infinity];
  for (let i = 0; i < layers.length; i++) {
    if (i && layers[i][1] === layers[i - 1][1]) continue;
    if (i) picture.append(svg("line", { class: "rule", x1: x(i) - half, x2: x(i) - half, y1: frame.top - 10, y2: frame.bottom }));
    const text = layers[i][1];
    const size = 6.5 * text.length;
    const left = Math.min(Math.max(frame.left + 2, x(i) - half + 4), frame.right - size);
    const line = ends.findIndex((end) => end < left);
    if (line < 0) continue;
    picture.append(svg("text", { x: left, y: 12 + 13 * line }, text));
    ends[line] = left + size + 6;
  }
}

function linkChart(picture, chart) {
  const { layers, dots, ring, x, y, frame, readout } = chart;
  let at = -1;
  const pick = (i) => {
    at = i;
    const [name, , value] = layers[i];
    readout.textContent = `${i + 1}. ${name}: ${value === null ? "no SQNR (equal, or all zero)" : `${value.toFixed(1)} dB`}`;
    picture.setAttribute("aria-valuenow", i + 1);
    picture.setAttribute("aria-valuetext", readout.textContent);
    ring.setAttribute("visibility", value === null ? "hidden" : "visible");
    ring.setAttribute("cx", x(i));
    ring.setAttribute("cy", y(value ?? 0));
    for (const row of all("#layer-table .picked")) row.classList.remove("picked");
    byId(`layer-${i}`).classList.add("picked");
  };
  const nearest = (event) => {
    const bounds = picture.getBoundingClientRect();
    const share = (event.clientX - bounds.left) * (picture.viewBox.baseVal.width / bounds.width);
    const i = Math.floor(((share - frame.left - 6) / (frame.right - frame.left - 6)) * layers.length);
    return Math.max(0, Math.min(layers.length - 1, i));
  };
  const open = () => at >= 0 && showRow(at);
  picture.addEventListener("pointermove", (event) => pick(nearest(event)));
  picture.addEventListener("click", (event) => { pick(nearest(event)); open(); });
  picture.addEventListener("keydown", (event) => {
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: layers.length - 1 }[event.key];
    if (event.key === "Enter") open();
    if (to === undefined) return;
    event.preventDefault();
    pick(Math.max(0, Math.min(layers.length - 1, to)));
  });
  pickLayer = pick;
  markHidden = () => {
    for (const row of all("#layer-table tbody tr")) {
      dots[Number(row.id.slice(6))]?.classList.toggle("faint", row.hidden);
    }
  };
  markHidden();
}

function showRow(index) {
  const row = byId(`layer-${index}`);
  const scroll = row.closest(".scroll");
  row.hidden = false;
  scroll.scrollTop += row.getBoundingClientRect().top - scroll.getBoundingClientRect().top - scroll.clientHeight / 2;
}
