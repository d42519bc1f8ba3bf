/* Lines between words: from a query to every key, or to a key from every query; a line is as strong
   as its weight. */

/* The two rows of words of step n, which has weights; a row is walked with the arrow keys. */
function drawWords(n) {
  const step = T.steps[n], isShown = isWeights(step) && !isLarge(step) && !step.blank;
  $("words").hidden = !isShown;
  if (!isShown) return;
  $("words").style.setProperty("--count", Math.max(step.rows, step.cols));
  const row = (side, count, label) =>
    range(count).map((k) => element("button", { type: "button", "data-side": side, "data-word": k }, label(step, k)));
  $("keys").replaceChildren(...row("key", step.cols, columnLabel));
  $("queries").replaceChildren(...row("query", step.rows, rowLabel));
}

function drawLines(side, k) {
  if ($("words").hidden) return;
  const M = matrix(pointed.step), { rows, cols } = M;
  const pairs = side === "query" ? range(cols).map((j) => [k, j]) : range(rows).map((i) => [i, k]);
  const weight = (i, j) => (get(M, i, j) > 0 ? get(M, i, j) : 0); /* 0 for NaN */
  const lines = pairs.map(([i, j]) => {
    const line = document.createElementNS($("lines").namespaceURI, "line");
    const ends = { x1: (i + 0.5) / rows, y1: 1, x2: (j + 0.5) / cols, y2: 0, "stroke-opacity": weight(i, j) };
    for (const [name, value] of Object.entries(ends)) line.setAttribute(name, value);
    return line;
  });
  $("lines").replaceChildren(...lines);
  for (const button of $("words").querySelectorAll("button")) {
    const w = Number(button.dataset.word), isOwn = button.dataset.side === side;
    const level = isOwn ? 0 : side === "query" ? weight(k, w) : weight(w, k);
    button.classList.toggle("here", isOwn && w === k);
    button.setAttribute("aria-pressed", isOwn && w === k);
    button.tabIndex = w === (isOwn ? k : 0) ? 0 : -1;
    shade(button, level);
  }
}

function onWord(event) {
  const button = event.target.closest("button");
  if (event.type === "mouseleave") return drawLines("query", pointed.i);
  if (!button) return;
  const { side, word: k } = button.dataset;
  if (event.type === "keydown") {
    const next = { ArrowRight: button.nextSibling, ArrowLeft: button.previousSibling }[event.key];
    if (next) next.focus();
  } else if (event.type === "click" && side === "query") point({ ...pointed, i: Number(k) }, { hold: true });
  else drawLines(side, Number(k));
}
