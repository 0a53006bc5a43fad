// The scene: heights under the boxes, switches for the sets, a slider for the score.
async function startScene() {
  if (!data.scene) return;
  const { rows, columns, data: packed } = data.scene.heights;
  for (const input of all("[data-boxes]")) input.addEventListener("change", showBoxes);
  byId("score")?.addEventListener("input", showBoxes);
  for (const button of all(".cameras button")) {
    button.addEventListener("click", () => {
      const large = button.closest("figure").classList.toggle("large");
      button.setAttribute("aria-pressed", String(large));
    });
  }
  showBoxes();
  const levels = await unpack(packed);
  const draw = () => paint(byId("scene-canvas"), columns, rows, (i) => levels[i] - 1, "height");
  redraws.push(draw);
  draw();
}

function showBoxes() {
  const least = Number(byId("score")?.value ?? 0);
  const scored = ({ dataset: { score } }) => score === undefined || Number(score) >= least;
  for (const input of all("[data-boxes]")) {
    for (const box of all(`.box.${input.dataset.boxes}`, byId("scene-view"))) {
      box.style.display = input.checked && scored(box) ? "" : "none";
    }
  }
  if (!byId("score")) return;
  byId("score-shown").textContent = least.toFixed(2);
  byId("classes-score").textContent = `, scores from ${least.toFixed(2)}`;
  const found = all(".birds-eye .box").filter(scored);
  for (const row of all(".classes tr[data-name]")) {
    const named = found.filter((box) => box.dataset.name === row.dataset.name);
    for (const cell of all("[data-kind]", row)) {
      cell.textContent = named.filter((box) => box.classList.contains(cell.dataset.kind)).length || "–";
    }
  }
}
