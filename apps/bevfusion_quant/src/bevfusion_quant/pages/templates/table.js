// The tables of layers: sort by any column, search, part of the model, what is marked only.
function startTables() {
  startTable("layer", "layers", "sqnr", "ascending", (row) => {
    pickLayer(Number(row.id.slice(6)));
  }, () => markHidden());
  startTable("integer", "operations", "most", "descending", () => {}, () => {});
}

function startTable(name, things, worst, direction, point, filtered) {
  const table = byId(`${name}-table`);
  if (!table) return;
  const body = table.tBodies[0];
  const rows = [...body.rows];
  const heads = all("thead th", table);
  const sort = (head, direction) => {
    const column = heads.indexOf(head);
    for (const other of heads) other.setAttribute("aria-sort", other === head ? direction : "none");
    const sign = direction === "ascending" ? 1 : -1;
    const text = "text" in head.dataset;
    const key = (row) => row.cells[column].dataset.value;
    body.append(...rows.toSorted((a, b) => {
      const [p, q] = [key(a), key(b)];
      if (p === "" || q === "") return (p === "") - (q === "");
      return sign * (text ? p.localeCompare(q, "en", { numeric: true }) : Number(p) - Number(q));
    }));
  };
  for (const head of heads) {
    head.querySelector("button").addEventListener("click", () => {
      const now = head.getAttribute("aria-sort");
      const turned = now === "ascending" ? "descending" : "ascending";
      sort(head, now === "none" ? head.dataset.first : turned);
    });
  }
  const filter = () => {
    const wanted = words(byId(`${name}-search`).value);
    const part = byId(`${name}-part`).value;
    const low = byId(`${name}-low`).checked;
    let count = 0;
    for (const row of rows) {
      const kept = matches(row, wanted) && (!part || row.dataset.part === part) && (!low || row.classList.contains("low"));
      row.hidden = !kept;
      count += kept;
    }
    byId(`${name}-shown`).textContent = count === rows.length ? `${count} ${things}` : `${count} of ${rows.length} ${things}`;
    filtered();
  };
  for (const id of ["search", "part", "low"]) byId(`${name}-${id}`).addEventListener("input", filter);
  byId(`${name}-worst`).addEventListener("click", () => {
    sort(heads.find((head) => head.dataset.key === worst), direction);
    table.closest(".scroll").scrollTop = 0;
  });
  body.addEventListener("pointerover", (event) => {
    const row = event.target.closest("tr");
    if (row) point(row);
  });
}

const words = (text) => text.toLowerCase().split(/\s+/).filter(Boolean);
const matches = (element, wanted) => wanted.every((word) => element.dataset.text.includes(word));
