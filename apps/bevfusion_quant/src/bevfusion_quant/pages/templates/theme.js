// Light, dark, or what the system says; remembered where the browser allows it.
const redraws = [];
const redraw = () => redraws.forEach((draw) => draw());

function startTheme() {
  const choose = (value) => {
    if (value === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = value;
  };
  const kept = recall();
  for (const input of all("#theme input")) {
    input.checked = input.value === kept;
    input.addEventListener("change", () => {
      choose(input.value);
      remember(input.value);
      redraw();
    });
  }
  choose(kept);
  darkWanted.addEventListener("change", redraw);
  addEventListener("beforeprint", () => { printing = true; redraw(); });
  addEventListener("afterprint", () => { printing = false; redraw(); });
}

function recall() {
  try {
    const kept = localStorage.getItem("bevfusion-quant-theme");
    return ["light", "dark"].includes(kept) ? kept : "auto";
  } catch { return "auto"; }
}

function remember(value) {
  try { localStorage.setItem("bevfusion-quant-theme", value); } catch { /* private window */ }
}
