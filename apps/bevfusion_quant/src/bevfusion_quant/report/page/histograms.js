// Histograms of the quantizers, drawn when their card comes near the window.
let logCounts = true;

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
  const filter = () => {
    const wanted = words(byId("quantizer-search").value);
    const [part, kind] = [byId("quantizer-part").value, byId("quantizer-kind").value];
    let count = 0;
    for (const card of cards) {
      const kept = matches(card, wanted) && (!part || card.dataset.part === part) && (!kind || card.dataset.kind === kind);
      card.hidden = !kept;
      count += kept;
    }
    byId("quantizer-shown").textContent = count === cards.length ? `${count} quantizers` : `${count} of ${cards.length} quantizers`;
  };
  for (const id of ["quantizer-search", "quantizer-part", "quantizer-kind"]) byId(id).addEventListener("input", filter);
  byId("quantizer-sort").addEventListener("input", (event) => {
    const key = event.target.value;
    list.append(...(key === "order" ? cards : cards.toSorted((a, b) => Number(b.dataset[key]) - Number(a.dataset[key]))));
  });
}

function drawHistogram(card) {
  const values = data.quantizers[Number(card.id.slice(10))];
  const { counts, signed, largest, range: [low, high], channels } = values;
  const reach = 1.05 * Math.max(largest, high) || 1;
  const left = signed ? -reach : -0.04 * reach;
  const x = (value) => (240 * (value - left)) / (reach - left);
  const most = Math.max(1, ...counts);
  const y = (count) => 96 - (count ? 90 * (logCounts ? Math.log10(1 + count) / Math.log10(1 + most) : count / most) : 0);
  const start = signed ? -largest : 0;
  const width = (largest - start) / counts.length;
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
  axis.append(...[left, signed ? 0 : null, reach].filter((v) => v !== null).map((v) => make("span", "", shown(!signed && v < 0 ? 0 : Number(v.toPrecision(3))))));
  const parts = [picture, axis];
  if (channels) parts.push(channelStrip(channels));
  card.querySelector(".histogram").replaceChildren(...parts);
}

// Ranges of the channels, smallest to largest, as shares of the widest.
function channelStrip(shares) {
  const width = 240 / shares.length;
  const gap = Math.min(1, width / 5);
  const bars = shares.map((share, i) => `M${(i * width).toFixed(2)} 20v${(-20 * share).toFixed(2)}h${(width - gap).toFixed(2)}V20z`);
  return svg("svg", { class: "channels", viewBox: "0 0 240 20", preserveAspectRatio: "none", "aria-hidden": "true" },
    svg("path", { d: bars.join("") }));
}
