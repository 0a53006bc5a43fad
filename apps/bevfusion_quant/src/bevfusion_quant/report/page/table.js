// The layer table: sort by any column, search, part of the model, low SQNR only.
function startTable() {
  const table = byId("layer-table");
  if (!table) return;
  const body = table.tBodies[0];
  const rows = [...body.rows];
  const heads = all("thead th", table);
  const sort = (head, direction) => {
    const column = heads.indexOf(head);
    for (const other of heads) other.setAttribute("aria-sort", other === head ? direction : "none");
    const sign = direction === "ascending" ? 1 : -1;
    const text = ["layer", "kind"].includes(head.dataset.key);
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
      const first = ["saturated", "amax", "channels", "rows"].includes(head.dataset.key) ? "descending" : "ascending";
      const turned = now === "ascending" ? "descending" : "ascending";
      sort(head, now === "none" ? first : turned);
    });
  }
  const filter = () => {
    const wanted = words(byId("layer-search").value);
    const part = byId("layer-part").value;
    const low = byId("layer-low").checked;
    let count = 0;
    for (const row of rows) {
      const kept = matches(row, wanted) && (!part || row.dataset.part === part) && (!low || row.classList.contains("low"));
      row.hidden = !kept;
      count += kept;
    }
    byId("layer-shown").textContent = count === rows.length ? `${count} layers` : `${count} of ${rows.length} layers`;
    markHidden();
  };
  for (const id of ["layer-search", "layer-part", "layer-low"]) byId(id).addEventListener("input", filter);
  byId("layer-worst").addEventListener("click", () => {
    sort(heads.find((head) => head.dataset.key === "sqnr"), "ascending");
    table.closest(".scroll").scrollTop = 0;
  });
  body.addEventListener("pointerover", (event) => {
    const row = event.target.closest("tr");
    if (row) pickLayer(Number(row.id.slice(6)));
  });
}

const words = (text) => text.toLowerCase().split(/\s+/).filter(Boolean);
const matches = (element, wanted) => wanted.every((word) => element.dataset.text.includes(word));
