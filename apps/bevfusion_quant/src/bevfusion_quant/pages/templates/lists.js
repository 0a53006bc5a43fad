// Decisions: one search over all lists; the command's copy button; where we are on the page.
function startLists() {
  const search = byId("decision-search");
  search?.addEventListener("input", () => {
    const wanted = words(search.value);
    let count = 0;
    for (const list of all("#decisions .decision")) {
      let found = 0;
      for (const item of all("li[data-text]", list)) {
        item.hidden = !matches(item, wanted);
        found += !item.hidden;
      }
      const total = all("li[data-text]", list).length;
      list.querySelector(".count").textContent = found === total ? total : `${found} of ${total}`;
      list.dataset.opened ??= list.open;
      list.open = wanted.length ? found > 0 : list.dataset.opened === "true";
      if (!wanted.length) delete list.dataset.opened;
      count += found;
    }
    byId("decision-shown").textContent = wanted.length ? `${count} found` : "";
  });
  addEventListener("beforeprint", () => all(".decision").forEach((list) => { list.open = true; }));
  for (const button of all("[data-copy]")) {
    button.addEventListener("click", async () => {
      const source = byId(button.dataset.copy);
      try {
        await navigator.clipboard.writeText(source.textContent);
        button.textContent = "Copied";
      } catch {
        getSelection().selectAllChildren(source);
        button.textContent = "Selected";
      }
    });
  }
}

function startNavigation() {
  const links = new Map(all(".top nav a").map((link) => [link.hash.slice(1), link]));
  const seen = new Set();
  const watch = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) seen[isIntersecting ? "add" : "delete"](target.id);
    const current = [...links.keys()].find((id) => seen.has(id));
    for (const [id, link] of links) {
      if (id === current) link.setAttribute("aria-current", "true");
      else link.removeAttribute("aria-current");
    }
    const link = links.get(current);
    if (link) link.closest("nav").scrollLeft = link.offsetLeft - link.closest("ul").offsetLeft - 40;
  }, { rootMargin: "-20% 0px -60% 0px" });
  for (const id of links.keys()) watch.observe(byId(id));
}
