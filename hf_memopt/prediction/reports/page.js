for (const button of document.querySelectorAll("button[data-copy]")) {
  button.addEventListener("click", async () => {
    const source = document.getElementById(button.dataset.copy);
    const range = document.createRange();
    range.selectNodeContents(source);
    getSelection().removeAllRanges();
    getSelection().addRange(range);
    let copied = true;
    try {
      await navigator.clipboard.writeText(source.textContent);
    } catch {
      copied = document.execCommand("copy");
    }
    button.textContent = copied ? "Copied" : "Selected";
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  });
}

// A value of a picture: under the pointer, and by arrow keys, Home and End where the picture has the focus.
for (const box of document.querySelectorAll(".picture")) {
  const shown = () => [...box.children].find((svg) => svg.getClientRects().length) ?? box.children[0];
  const marks = () => [...shown().querySelectorAll("g[data-part]")];
  const said = box.nextElementSibling;
  let read = null;
  const show = (mark) => {
    read?.classList.remove("read");
    read = mark;
    read.classList.add("read");
    said.textContent = read.firstElementChild.textContent;
  };
  for (const mark of box.querySelectorAll("g[data-part]")) mark.addEventListener("pointerenter", () => show(mark));
  box.addEventListener("keydown", (event) => {
    const all = marks(), at = all.indexOf(read);
    const to = {ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: all.length - 1}[event.key];
    if (to === undefined || !all.length) return;
    event.preventDefault();
    show(all[Math.min(Math.max(to, 0), all.length - 1)]);
  });

  // Buttons that show some parts alone.
  const parts = [...new Set(marks().map((mark) => mark.dataset.part).filter(Boolean))];
  if (parts.length < 2) continue;
  const row = document.createElement("p"), chosen = new Set();
  row.className = "alone";
  row.textContent = "Only: ";
  for (const part of parts) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = part;
    button.setAttribute("aria-pressed", "false");
    button.addEventListener("click", () => {
      chosen.delete(part) || chosen.add(part);
      button.setAttribute("aria-pressed", String(chosen.has(part)));
      for (const mark of box.querySelectorAll("g[data-part]")) {
        const other = mark.dataset.part && chosen.size && !chosen.has(mark.dataset.part);
        mark.classList.toggle("other", Boolean(other));
      }
    });
    row.append(button);
  }
  said.after(row);
}

addEventListener("beforeprint", () => {
  for (const one of document.querySelectorAll("details")) one.open = true;
});
