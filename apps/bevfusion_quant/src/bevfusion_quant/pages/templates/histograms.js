// Histograms of the quantizers, drawn when their card comes near the window.
let logCounts = true;
const FILTERS = ["quantizer-search", "quantizer-part", "quantizer-kind"];

function startHistograms() {
  const list = byId("quantizer-cards");
  if (!list) return;
  const cards = all(":scope > li", list);
  const watch = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      if (!isIntersecting) continue;
      watch.unobserve(target);
      drawHistogram(target);
    }
  }, { rootMargin: "600px" });
  cards.forEach((card) => watch.observe(card));
  addEventListener("beforeprint", () => cards.forEach(drawHistogram));
  for (const input of all("input[name=counts]")) {
    input.addEventListener("change", () => {
      logCounts = input.value === "log";
      cards.filter((card) => card.querySelector("svg")).forEach(drawHistogram);
    });
  }
  list.addEventListener("pointermove", readBin);
  list.addEventListener("pointerout", readBin);
  startCardFilters(list, cards);
}

function startCardFilters(list, cards) {
  const filter = () => {
    const [wanted, part, kind] = FILTERS.map((id) => byId(id).value);
    for (const card of cards) {
      const kept = matches(card, words(wanted)) && (!part || card.dataset.part === part) && (!kind || card.dataset.kind === kind);
      card.hidden = !kept;
    }
    const left = cards.filter((card) => !card.hidden).length;
    byId("quantizer-shown").textContent = `${left === cards.length ? "" : `${left} of `}${cards.length} quantizers`;
  };
  for (const id of FILTERS) byId(id).addEventListener("input", filter);
  byId("quantizer-sort").addEventListener("input", (event) => {
    const key = event.target.value;
    list.append(...(key === "order" ? cards : cards.toSorted((a, b) => Number(b.dataset[key]) - Number(a.dataset[key]))));
  });
  // A link from the layer table shows its card even where the filters had hidden it.
  addEventListener("hashchange", () => {
    const card = byId(location.hash.slice(1));
    if (!card?.hidden || !cards.includes(card)) return;
    for (const id of FILTERS) byId(id).value = "";
    filter();
    card.scrollIntoView();
  });
}

const valuesOf = (card) => data.quantizers[Number(card.id.slice(10))];
const grouped = (value) => value.toLocaleString("en");
const brief = (value) => shown(Number(value.toPrecision(3)));

// What the histogram spans: `left` to `reach`, its first bin from `start`, each bin `width` wide.
function spanOf({ counts, signed, largest, range: [, high] }) {
  const reach = 1.05 * Math.max(largest, high) || 1;
  const start = signed ? -largest : 0;
  return { reach, start, left: signed ? -reach : -0.04 * reach, width: (largest - start) / counts.length };
}

function drawHistogram(card) {
  const values = valuesOf(card);
  const { counts, signed, range: [low, high], channels } = values;
  const { reach, start, left, width } = spanOf(values);
  const x = (value) => (240 * (value - left)) / (reach - left);
  const size = (count) => (logCounts ? Math.log10(1 + count) : count);
  const most = Math.max(...counts);
  const y = (count) => 96 - (most ? (82 * size(count)) / size(most) : 0);
  let outline = `M${x(start).toFixed(1)} 96`;
  counts.forEach((count, i) => {
    outline += `V${y(count).toFixed(1)}H${x(start + (i + 1) * width).toFixed(1)}`;
  });
  const picture = svg("svg", { viewBox: "0 0 240 96", preserveAspectRatio: "none", "aria-hidden": "true" },
    svg("path", { class: "counts", d: `${outline}V96z` }),
    svg("line", { class: "base", x1: 0, x2: 240, y1: 95.6, y2: 95.6 }));
  for (const side of signed ? [-1, 1] : [1]) {
    const [near, far] = [x(side * low), x(side * high)];
    if (channels) picture.append(svg("rect", { class: "spread", x: Math.min(near, far), width: Math.abs(far - near), y: 0, height: 96 }));
    picture.append(svg("line", { class: "edge", x1: far, x2: far, y1: 0, y2: 96 }));
  }
  const axis = make("div", "axis");
  const ends = signed ? [left, 0, reach] : [0, reach];
  axis.append(...ends.map((value) => make("span", "", brief(value))));
  const parts = [picture, axis, make("span", "peak", tallest(values))];
  if (channels) parts.push(channelStrip(channels));
  card.querySelector(".histogram").replaceChildren(...parts);
}

const tallest = ({ counts }) => `tallest bin ${grouped(Math.max(...counts))}`;

// The bin under the pointer, in place of the tallest bin's count.
function readBin(event) {
  const box = event.target.closest(".histogram");
  const peak = box?.querySelector(".peak");
  if (!peak) return;
  const values = valuesOf(box.closest(".card"));
  const { start, left, reach, width } = spanOf(values);
  const frame = box.getBoundingClientRect();
  const at = left + ((event.clientX - frame.left) / frame.width) * (reach - left);
  const bin = Math.floor((at - start) / width);
  const count = event.type === "pointerout" ? undefined : values.counts[bin];
  peak.textContent = count === undefined
    ? tallest(values)
    : `${grouped(count)} from ${brief(start + bin * width)} to ${brief(start + (bin + 1) * width)}`;
}

// Ranges of the channels, smallest to largest, as shares of the widest.
function channelStrip(shares) {
  const width = 240 / shares.length;
  const gap = Math.min(1, width / 5);
  const bars = shares.map((share, i) => `M${(i * width).toFixed(2)} 20v${(-20 * share).toFixed(2)}h${(width - gap).toFixed(2)}V20z`);
  return svg("svg", { class: "channels", viewBox: "0 0 240 20", preserveAspectRatio: "none", "aria-hidden": "true" },
    svg("path", { d: bars.join("") }));
}
