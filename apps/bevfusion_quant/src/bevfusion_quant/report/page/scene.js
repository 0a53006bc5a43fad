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
  if (byId("score")) byId("score-shown").textContent = least.toFixed(2);
  for (const input of all("[data-boxes]")) {
    for (const box of all(`.box.${input.dataset.boxes}`, byId("scene-view"))) {
      const score = box.dataset.score;
      box.style.display = input.checked && (score === undefined || Number(score) >= least) ? "" : "none";
    }
  }
}
