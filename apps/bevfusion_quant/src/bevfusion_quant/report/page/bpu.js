// The picture of the partition: what it begins with comes into view; the whole of it on request.
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
  const button = byId("partition-whole");
  button.hidden = false;
  button.addEventListener("click", () => {
    const whole = box.classList.toggle("whole");
    button.setAttribute("aria-pressed", whole);
    if (!whole) begin();
  });
}

try { startPartition(); } catch (error) { fail(error); }
