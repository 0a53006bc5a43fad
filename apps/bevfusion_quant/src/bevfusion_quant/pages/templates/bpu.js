// The picture of the partition: what it begins with comes into view; all its width on request.
function startPartition() {
  const box = document.querySelector(".partition");
  const picture = box?.firstElementChild.shadowRoot?.querySelector("svg");
  if (!picture) return;
  const begin = () => {
    const first = picture.querySelector("g rect");
    const [node, frame] = [first.getBoundingClientRect(), box.getBoundingClientRect()];
    if (node.left >= frame.left && node.right <= frame.right) return;
    box.scrollTo({ left: box.scrollLeft + node.left - frame.left - (frame.width - node.width) / 2, top: 0, behavior: "instant" });
  };
  begin();
  const button = byId("partition-fit");
  button.hidden = false;
  button.addEventListener("click", () => {
    const fits = box.classList.toggle("fit");
    button.setAttribute("aria-pressed", fits);
    if (!fits) begin();
  });
}

try { startPartition(); } catch (error) { fail(error); }
