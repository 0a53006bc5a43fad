// Stage tabs: one panel at a time, all of them on paper.
function startTabs() {
  const tabs = all("[role=tab]");
  if (!tabs.length) return;
  const select = (tab) => {
    for (const other of tabs) {
      const chosen = other === tab;
      other.setAttribute("aria-selected", String(chosen));
      other.tabIndex = chosen ? 0 : -1;
      byId(other.getAttribute("aria-controls")).hidden = !chosen;
    }
    drawStage(byId(tab.getAttribute("aria-controls"))).catch(fail);
  };
  tabs.forEach((tab, index) => {
    tab.addEventListener("click", () => select(tab));
    tab.addEventListener("keydown", (event) => {
      const to = { ArrowRight: index + 1, ArrowLeft: index - 1, Home: 0, End: tabs.length - 1 }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      const next = tabs[(to + tabs.length) % tabs.length];
      next.focus();
      select(next);
    });
  });
  select(tabs[0]);
  // The others while nothing else is to do: paper and the next click find them drawn.
  const idle = window.requestIdleCallback ?? ((task) => setTimeout(task, 50));
  const rest = all("[data-stage]").slice(1);
  const next = () => rest.length && idle(() => drawStage(rest.shift()).then(next, fail));
  next();
}
