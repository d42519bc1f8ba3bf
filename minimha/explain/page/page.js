/* The page of a trace: a list of steps, the matrix of one head, and what made the cell that a
   reader points at, by hovering, focusing, clicking or tapping. */

const WINDOW = 16; /* rows and columns of a table: a larger matrix is a map with a table below it */
const READABLE = 32;
const MAP = 256; /* pixels of a map's longer side */
const SMALL_MAP = 2 ** 12; /* numbers of a picture that is drawn at once */
const LARGE_MAP = 2 ** 19; /* numbers of a matrix that is not computed for its picture alone */
const MOST_CELLS = 24; /* of an operand */
const MOST_LIKELY = 8;
const darkness = matchMedia("(prefers-color-scheme: dark)");
const isNarrow = matchMedia("(max-width: 62rem)"); /* as in the style */

let group = -1; /* the one that is shown; -1 is the overview */
let pointed = null; /* {step, i, j}: the cell that is explained */
let isHeld = false;
let head = { at: 0, of: 1 }; /* the one that was looked at last, of how many */
const maps = new Map(); /* canvases, as long as their numbers are the same */
const views = new Map(); /* of large steps: the first row and column that their table shows */

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const linkTo = ([n, i, j], ...children) =>
  T.steps[n].group === null ? element("span", {}, ...children) : element("a", { href: `#${n},${i},${j}` }, ...children);
const titled = (n) => T.steps[n].title;
const isLarge = (step) => step.rows > READABLE || step.cols > READABLE;

/* ---- matrices ---- */

/* How strong a number of step n is shaded, from -1 to 1: one scale for all heads of a step, unless
   it is large. Of large weights the cube root is shown. */
function levels(n) {
  const step = T.steps[n], isWhole = step.mapped === "weights";
  if (isWhole && !isLarge(step)) return (x) => x;
  const all = isLarge(step) || step.group === null ? [n] : T.groups[step.group].steps;
  const most = Math.max(...all.flatMap((other) => extent(matrix(other)).map(Math.abs))) || 1;
  return isWhole ? (x) => Math.cbrt(x / most) : (x) => x / most;
}

const text = (M) => (M.text ??= sayer(M.data, decimals, M.isEdited));

/* The first row and column of the table that shows cell (i, j): where it was, if it is in there. */
function viewOf(n, i, j, moves) {
  const step = T.steps[n];
  if (!isLarge(step)) return [0, 0];
  const [top, left] = views.get(n) ?? [-WINDOW, -WINDOW];
  if (i >= top && i < top + WINDOW && j >= left && j < left + WINDOW) return [top, left];
  const start = (middle, size) => Math.max(0, Math.min(size - WINDOW, middle - WINDOW / 2));
  const view = [start(i, step.rows), start(j, step.cols)];
  if (moves) views.set(n, view);
  return view;
}

/* A table of step n; of a large one, the part around (i, j). A grid can be walked with the keys. */
function table(n, i, j, isGrid) {
  const step = T.steps[n], M = matrix(n), level = step.mapped && levels(n);
  const [top, left] = viewOf(n, i, j, isGrid);
  const [height, width] = [step.rows, step.cols].map((size) => (isLarge(step) ? Math.min(WINDOW, size) : size));
  const made = element("table", { "aria-label": step.title, "aria-rowcount": step.rows + 1, "aria-colcount": step.cols + 1 });
  if (isGrid) made.setAttribute("role", "grid");
  const head = element("tr", {}, element("td", { class: "corner" }));
  for (let c = left; c < left + width; c++) head.append(headOf(columnLabel(step, c), c));
  const body = element("tbody");
  for (let r = top; r < top + height; r++) {
    const line = element("tr", {}, element("th", { scope: "row", "data-row": r }, rowLabel(step, r)));
    for (let c = left; c < left + width; c++) {
      const x = get(M, r, c), cell = element("td", { "data-at": `${n},${r},${c}` }, step.blank ? "" : text(M)(x));
      if (isGrid) cell.tabIndex = r === i && c === j ? 0 : -1;
      if (isHidden(step, r, c)) hide(cell, x);
      else if (level && Number.isFinite(x)) shade(cell, level(x));
      if (isNewAt(n, r, c)) cell.classList.add("changed");
      line.append(cell);
    }
    body.append(line);
  }
  made.append(element("thead", {}, head), body);
  return made;
}

/* A column of one number has no label, and an empty head would be read out. */
const headOf = (label, c) =>
  label ? element("th", { scope: "col", "data-column": c }, label) : element("td", { class: "corner" });

/* A hidden key: × where its share is 0; a masked score stays -∞. */
function hide(cell, x) {
  cell.classList.add("hidden");
  if (x !== 0) return;
  cell.setAttribute("aria-label", `${cell.textContent}, hidden by the mask`);
  cell.textContent = "×";
}

/* A shade; from ``turn`` on the number has the other ink, so that the contrast is 4.6 at least. */
function shade(cell, level) {
  const turn = level >= 0 ? 0.66 : darkness.matches ? 0.63 : 0.71;
  cell.classList.add("heat");
  cell.style.setProperty("--level", Math.min(1, Math.abs(level)).toFixed(3));
  cell.classList.toggle("cold", level < 0);
  cell.classList.toggle("on", Math.abs(level) >= turn);
}

/* A large matrix as a map. */
function map(n) {
  const { title, rows, cols } = T.steps[n];
  if (maps.has(n)) return maps.get(n);
  const canvas = element("canvas", {
    class: "map", role: "img", "data-map": n,
    "aria-label": `map of ${title}, ${rows} rows and ${cols} columns; the arrow keys move in the table below it`,
  });
  const size = MAP / Math.max(rows, cols);
  canvas.style.width = `${Math.max(12, size * cols)}px`;
  canvas.style.height = `${Math.max(12, size * rows)}px`;
  maps.set(n, canvas);
  return draw(canvas);
}

function draw(canvas) {
  const n = Number(canvas.dataset.map), M = matrix(n), level = levels(n), style = getComputedStyle(document.body);
  const [heat, cold] = ["--heat", "--cold"].map((name) => style.getPropertyValue(name).trim().split(" ").map(Number));
  Object.assign(canvas, { width: M.cols, height: M.rows });
  const context = canvas.getContext("2d"), image = context.createImageData(M.cols, M.rows);
  for (let p = 0; p < M.data.length; p++) {
    const x = Number.isFinite(M.data[p]) ? level(M.data[p]) : 0, colour = x < 0 ? cold : heat;
    for (let c = 0; c < 3; c++) image.data[4 * p + c] = colour[c];
    image.data[4 * p + 3] = 255 * Math.abs(x);
  }
  context.putImageData(image, 0, 0);
  return canvas;
}

/* A small picture of a matrix, to choose it by: a large one is drawn when nothing else is to do. */
function thumb(n) {
  const canvas = element("canvas", { "data-map": n, "aria-hidden": "true" }), { rows, cols } = T.steps[n], size = rows * cols;
  const isThere = T.steps[n].at !== null || size <= LARGE_MAP || (affected.has(n) ? values.current : values.original).has(n);
  if (size <= SMALL_MAP) return draw(canvas);
  if (isThere) waiting.push(canvas) === 1 && whenIdle(drawNext);
  return canvas;
}

const waiting = [];
const whenIdle = (work) => (window.requestIdleCallback ?? setTimeout)(work);

function drawNext() {
  while (waiting.length && !waiting[0].isConnected) waiting.shift();
  if (waiting.length) draw(waiting[0]);
  waiting.shift();
  if (waiting.length) whenIdle(drawNext);
}

/* A step under its title, on paper or on the page: its map where it is large, and its table. */
function figure(n, i, j, isGrid) {
  const step = T.steps[n], shape = step.shape.length ? `${step.axes.join(" × ")} = ${step.shape.join(" × ")}` : "";
  const caption = element("figcaption", {}, element("b", {}, step.title), ` ${shape}`), made = element("figure", {}, caption);
  if (!step.rows || !step.cols) return made.append("(empty)"), made;
  const grid = table(n, i, j, isGrid);
  if (isLarge(step)) {
    const [top, left] = viewOf(n, i, j, false);
    const shades = step.mapped === "weights" ? "; shade: cube root" : "";
    made.append(map(n), element("p", { class: "muted" }, `below: rows from ${top}, columns from ${left}${shades}`));
  }
  made.append(grid);
  return made;
}

/* ---- what is shown ---- */

function show(n) {
  group = n;
  for (const link of $("list").querySelectorAll("[data-group]")) {
    const isHere = Number(link.dataset.group) === n, fold = link.closest("details");
    isHere ? link.setAttribute("aria-current", "step") : link.removeAttribute("aria-current");
    if (isHere && fold) fold.open = true;
  }
  n < 0 ? $("chart").setAttribute("aria-current", "page") : $("chart").removeAttribute("aria-current");
  if (isNarrow.matches) $("all").open = false;
  else $("list").querySelector("[aria-current]")?.scrollIntoView({ block: "nearest" });
  $("overview").hidden = n >= 0;
  $("step").hidden = $("explanation").hidden = n < 0;
  document.body.classList.toggle("is-overview", n < 0);
  $("previous").disabled = n < 0;
  $("next").disabled = n === T.groups.length - 1;
  if (n < 0) return;
  const { steps, name, source } = T.groups[n];
  $("heading").textContent = name;
  $("count").textContent = `step ${n + 1} of ${T.groups.length}`;
  $("formula").replaceChildren($("formulas").children[n].cloneNode(true));
  $("from").textContent = source ? `Source: ${source}.` : "";
  $("stale").hidden = !(areNumbersNew() && steps.some((s) => stale.has(s)));
  if (!pointed || T.steps[pointed.step].group !== n) point(nearest(steps));
  else redraw();
}

/* The cell among these steps that is most like the one before: of its head, row and column. */
function nearest(steps) {
  const n = steps[Math.floor((head.at * steps.length) / head.of)];
  if (!pointed) return { step: n, i: 0, j: 0 };
  const step = T.steps[n], old = T.steps[pointed.step];
  const same = (labels, size) => step[labels] === old[labels] && step[size] === old[size];
  return { step: n, i: same("rowLabels", "rows") ? pointed.i : 0, j: same("columnLabels", "cols") ? pointed.j : 0 };
}

function redraw() {
  const { step: n, i, j } = pointed, { steps, notes, printed } = T.groups[group], { shape, axes } = T.steps[n];
  const at = steps.indexOf(n);
  if (steps.length > 1) head = { at, of: steps.length };
  $("note").textContent = notes[at];
  $("printed").replaceChildren(...(areNumbersNew() ? [] : printed[at]).map((line) => element("li", {}, line)));
  $("shape").textContent = shape.length > 1 ? `${axes.join(" × ")} = ${shape.join(" × ")}` : "";
  const scrolled = $("matrices").firstChild?.scrollLeft ?? 0;
  $("matrices").replaceChildren(figure(n, i, j, true));
  $("matrices").firstChild.scrollLeft = scrolled;
  drawTabs(n, steps);
  drawWords(n);
  explain();
}

/* One tab for each head, with a picture of its weights. Where numbers are given, pictures of the
   weights that follow from them, so that a change can be watched. */
function drawTabs(n, steps) {
  const hasFocus = document.activeElement?.matches("[role=tab]"), isMany = steps.length > 1;
  const beside = T.groups.find(({ steps: [s, ...rest] }) =>
    isWeights(T.steps[s]) && T.steps[s].part === T.steps[n].part && rest.length === steps.length - 1);
  const tabs = steps.map((s, k) => {
    const pictured = T.steps[s].mapped ? s : beside?.steps[k], isHere = s === n;
    const tab = element("button", { type: "button", role: "tab", "data-step": s, "aria-selected": isHere, "aria-controls": "matrices" });
    tab.tabIndex = isHere ? 0 : -1;
    tab.append(...(pictured === undefined ? [] : [thumb(pictured)]), element("span", {}, T.steps[s].place || titled(s)));
    return tab;
  });
  $("heads").hidden = !isMany;
  $("heads").replaceChildren(...(isMany ? tabs : []));
  isMany ? $("matrices").setAttribute("role", "tabpanel") : $("matrices").removeAttribute("role");
  if (hasFocus) $("heads").querySelector("[aria-selected=true]")?.focus();
  const after = isGiven(T.steps[n]) ? following((_, s) => s === n) : new Set();
  const first = T.groups.find((one) => one.steps.some((s) => isWeights(T.steps[s]) && after.has(s)));
  const pictures = (first?.steps ?? []).map((s) => linkTo([s, 0, 0], thumb(s), T.steps[s].place || titled(s)));
  $("follows").hidden = !pictures.length;
  $("follows").querySelector("div").replaceChildren(...pictures);
}

/* ---- the explanation ---- */

const quoted = (label) => (/^\d*$/.test(label) ? `token ${label}` : `“${label}”`);
const percent = (x) => `${(100 * x).toFixed(x < 0.0995 || (x > 0.99 && x < 1) ? 1 : 0)}%`;

function inWords(n, i, j) {
  const step = T.steps[n], x = get(matrix(n), i, j), row = quoted(rowLabel(step, i)), column = quoted(columnLabel(step, j));
  if (isGiven(step)) return "A given number.";
  if (step.blank) return "";
  if (isHidden(step, i, j)) return `The mask hides ${column} from ${row}.`;
  if (isWeights(step)) return `${row} gives ${percent(x)} of its attention to ${column}.`;
  if (step.mapped === "scores") return `How well the key of ${column} matches the query of ${row}.`;
  if (step.base === "probabilities") return `After ${row}, the next token is ${column} with probability ${percent(x)}.`;
  return "";
}

/* Write out the cell that is pointed at, and what made it. */
function explain() {
  const { step: n, i, j } = pointed, step = T.steps[n], { text, used } = written(n, i, j);
  const shown = (now) => (isHidden(step, i, j, now) ? "×" : said(matrix(n, now), i, j));
  $("where").textContent = step.title;
  $("cell").textContent = nameOf(step, i, j);
  $("value").textContent = step.blank ? "?" : shown(true);
  $("was").textContent = isNewAt(n, i, j) ? `it was ${shown(false)}` : "";
  $("sentence").textContent = inWords(n, i, j);
  $("says").textContent = text;
  $("held").hidden = !isHeld;
  $("hold").hidden = isHeld;
  offerChanges(step, n, i, j);
  const operands = [...new Set(used.map(([other]) => other))].map((other) => used.filter(([o]) => o === other));
  $("made").hidden = !operands.length;
  $("operands").replaceChildren(...operands.map((own) => operand(own, operands)));
  const trail = trailTo(used);
  $("way").hidden = !trail.length;
  $("trail").replaceChildren(...trail.map((at) =>
    element("li", {}, linkTo(at, titled(at[0])), element("code", {}, written(...at).text))));
  for (const cell of $("matrices").querySelectorAll("td[data-at]")) {
    const isHere = cell.dataset.at === `${n},${i},${j}`;
    cell.classList.toggle("here", isHere);
    cell.tabIndex = isHere ? 0 : -1;
  }
  for (const label of $("matrices").querySelectorAll("th"))
    label.classList.toggle("here", label.dataset.row === String(i) || label.dataset.column === String(j));
  drawLines("query", i);
  drawLikeliest(step, n, i);
}

/* The cells before a cell, as long as each comes from a single one and not from a whole row. */
function trailTo(used) {
  const trail = [];
  for (; used.length && trail.length < 6; { used } = written(...trail[0])) {
    const [[from, r, c], next] = used;
    if (next?.[0] === from || !T.steps[from].made) break;
    trail.unshift([from, r, c]);
  }
  return trail;
}

/* An operand by the cells of it that count; of too many, those that add most to the sum. */
function operand(used, all) {
  const [n, i, j] = used[0], step = T.steps[n], isOneRow = used.every(([, r]) => r === i);
  const label = ([, r, c]) => (used.length === 1 ? labels(step, r, c).join(", ") : isOneRow ? columnLabel(step, c) : rowLabel(step, r));
  const beside = all.filter((other) => other.length === used.length), at = ([s, r, c]) => get(matrix(s), r, c);
  const product = (k) => beside.reduce((x, other) => x * at(other[k]), 1) || 0;
  const size = beside.length > 1 ? (k) => Math.abs(product(k)) : product;
  const order = range(used.length).sort((a, b) => size(b) - size(a)), kept = order.slice(0, MOST_CELLS).sort((a, b) => a - b);
  const cells = kept.map((k) => {
    const [, r, c, role] = used[k], shown = isHidden(step, r, c) ? "×" : said(matrix(n), r, c);
    return element("li", { class: role }, element("small", {}, label(used[k])), shown);
  });
  if (order.length > kept.length) cells.push(element("li", {}, `${order.length - kept.length} smaller`));
  const where = used.length === 1 || step.rows === 1 ? "" : isOneRow ? ` row ${rowLabel(step, i)}` : ` column ${columnLabel(step, j)}`;
  return element("section", {}, element("h3", {}, linkTo([n, i, j], titled(n)), where), element("ol", {}, ...cells));
}

/* A given number can be typed over, a key hidden or shown, and a word renamed. */
function offerChanges(step, n, i, j) {
  const x = get(matrix(n), i, j), canType = isGiven(step), row = quoted(rowLabel(step, i)), column = quoted(columnLabel(step, j));
  $("edit").hidden = !canType;
  $("hide").hidden = !canHide(step);
  $("hide").textContent = isHidden(step, i, j) ? `Show ${column} to ${row}` : `Hide ${column} from ${row}`;
  if (canType) {
    const limit = Math.min(1e9, Math.max(3, 2 * Math.abs(get(matrix(n, false), i, j)))) || 3;
    if (document.activeElement !== $("number")) $("number").value = Number.isFinite(x) ? Number(x.toFixed(6)) : say(x);
    if (document.activeElement !== $("drag")) Object.assign($("drag"), { min: -limit, max: limit, step: limit / 300, value: x });
  }
  const words = [[step.rowLabels, i, "row"], [step.columnLabels, j, "column"]].filter(([list]) => list !== null);
  const isTwice = words.length > 1 && words[0][0] === words[1][0] && i === j;
  $("names").hidden = !words.length;
  for (const [list, k, side] of [[null, 0, "row"], [null, 0, "column"], ...(isTwice ? words.slice(1) : words)]) {
    const input = $(`${side}-word`);
    input.parentElement.hidden = list === null;
    Object.assign(input.dataset, { list, k });
    if (list !== null && document.activeElement !== input) input.value = word(list, k);
  }
}

/* The likeliest tokens after row i, where a step has their probabilities. */
function drawLikeliest(step, n, i) {
  $("likeliest").hidden = step.base !== "probabilities" || step.blank;
  if ($("likeliest").hidden) return;
  const row = rowOf(matrix(n), i), order = range(row.length).sort((a, b) => row[b] - row[a]).slice(0, MOST_LIKELY);
  $("likeliest").querySelector("h3").textContent = `Likeliest after ${quoted(rowLabel(step, i))}`;
  $("likeliest").querySelector("ol").replaceChildren(...order.map((j) => {
    const bar = element("span", { class: "bar" });
    bar.style.setProperty("--level", row[j]);
    return element("li", {}, linkTo([n, i, j], columnLabel(step, j)), bar, percent(row[j]));
  }));
}

/* Point at a cell of a step; {focus} moves the keyboard there too, {hold} keeps it. */
function point({ step, i, j }, { focus = false, hold = isHeld } = {}) {
  const { rows, cols, group: other } = T.steps[step], before = pointed;
  pointed = { step, i: Math.max(0, Math.min(rows - 1, i)), j: Math.max(0, Math.min(cols - 1, j)) };
  isHeld = hold;
  const isInView = $("matrices").querySelector(`td[data-at="${step},${pointed.i},${pointed.j}"]`);
  if (other !== group) show(other);
  else if (!isInView || before?.step !== step) redraw();
  else explain();
  if (focus) $("matrices").querySelector("td.here")?.focus();
}

/* ---- events ---- */

const place = (cell) => {
  const [step, i, j] = cell.dataset.at.split(",").map(Number);
  return { step, i, j };
};
const cellOf = (target) => target.closest("[role=grid] td[data-at]");
const isPointed = (cell) => cell.dataset.at === [pointed.step, pointed.i, pointed.j].join();

function onMap(event) {
  const { left, top, width, height } = event.target.getBoundingClientRect(), step = Number(event.target.dataset.map);
  const i = Math.floor(((event.clientY - top) / height) * T.steps[step].rows);
  const j = Math.floor(((event.clientX - left) / width) * T.steps[step].cols);
  point({ step, i, j }, { hold: true });
}

/* A click holds a cell, and a second one lets it go. */
function onPointer(event) {
  const cell = cellOf(event.target), isClick = event.type === "click";
  if (isClick && event.target.closest("canvas")) return onMap(event);
  if (!cell || (isHeld && !isClick)) return;
  point(place(cell), { hold: isClick && !(isHeld && isPointed(cell)) });
  if (isClick) rememberSoon();
}

function choose(tab) {
  if (!tab) return;
  point({ ...pointed, step: Number(tab.dataset.step) });
  rememberSoon();
}

function onTab(event) {
  const tabs = [...$("heads").children], at = tabs.indexOf(event.target.closest("[role=tab]"));
  const next = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: tabs.length - 1 }[event.key];
  if (next === undefined) return;
  event.preventDefault();
  choose(tabs[(next + tabs.length) % tabs.length]);
}

const MOVES = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], Home: [0, -Infinity], End: [0, Infinity] };

function onKey(event) {
  const { key, target } = event;
  if (event.ctrlKey || event.metaKey || event.altKey || target.closest("input")) return;
  const turn = { n: 1, p: -1 }[key], cell = cellOf(target), move = MOVES[key];
  if (turn) return go(group + turn);
  if (key === "Escape") {
    isHeld = false;
    if (group >= 0) explain();
    if (cell) $("heading").focus();
  }
  if (!cell) return;
  const { step, i, j } = place(cell);
  if (move) point({ step, i: i + move[0], j: j + move[1] }, { focus: true });
  else if (key === "Enter" || key === " ") point({ step, i, j }, { focus: true, hold: true }), rememberSoon();
  else return isGiven(T.steps[step]) && /^([-.,0-9]|F2)$/.test(key) && startTyping();
  event.preventDefault();
}

/* What is typed at a cell goes where its number is written. */
function startTyping() {
  isHeld = true;
  $("number").focus();
  $("number").select();
}

function go(n) {
  if (n < -1 || n >= T.groups.length) return;
  isHeld = false;
  show(n);
  $(n < 0 ? "title" : "heading").focus();
  remember();
}

/* A link to a cell, a step or the flow chart, or a box of that. */
function follow(event) {
  const link = event.target.closest("a"), box = event.target.closest("#overview text.bold"), { group: n } = link?.dataset ?? {};
  const named = box && T.groups.findIndex(({ name }) => name === box.textContent);
  if (named >= 0 && box) return go(named);
  if (!link) return;
  event.preventDefault();
  if (n !== undefined) return go(Number(n));
  point(placeIn(link.hash), { focus: true, hold: true });
  remember();
}

/* On paper every step, one after the other. */
function print() {
  const parts = T.groups.map(({ steps, name, notes }, n) => {
    const small = steps.filter((s) => !isLarge(T.steps[s])), [first, ...rest] = small.map((s) => figure(s, 0, 0, false));
    const large = steps.length > small.length ? [element("p", {}, "too large to print")] : [];
    const top = element("div", { class: "together" }, element("h2", {}, `${n + 1}. ${name}`), $("formulas").children[n].cloneNode(true),
      element("p", {}, [...new Set(notes)].join(" ")), ...(first ? [first] : large));
    return element("section", {}, top, ...rest, ...(first ? large : []));
  });
  $("paper").replaceChildren(element("p", {}, changesInWords()), ...parts);
}

async function begin() {
  embedded = await load();
  $("scale-control").hidden = !T.canScale;
  $("causal-control").hidden = !T.canMask;
  $("scale").oninput = () => ((changes.factor = 2 ** Number($("scale").value)), change());
  $("causal").onchange = () => ((changes.causal = $("causal").checked), change());
  $("reset").onclick = reset;
  $("hide").onclick = toggleKey;
  for (const id of ["number", "drag"]) $(id).oninput = () => type(numberIn($(id).value));
  $("number").onkeydown = ({ key }) => void (["Enter", "Escape"].includes(key) && $("matrices").querySelector("td.here")?.focus());
  for (const id of ["row-word", "column-word"])
    $(id).oninput = () => rename(Number($(id).dataset.list), Number($(id).dataset.k), $(id).value);
  $("heads").onclick = (event) => choose(event.target.closest("[role=tab]"));
  $("heads").onkeydown = onTab;
  for (const name of ["mouseover", "mouseleave", "focusin", "click", "keydown"]) $("words").addEventListener(name, onWord);
  $("previous").onclick = () => go(group - 1);
  $("next").onclick = () => go(group + 1);
  for (const name of ["mouseover", "click"]) $("matrices").addEventListener(name, onPointer);
  $("matrices").addEventListener("focusin", (event) => {
    const cell = cellOf(event.target);
    if (cell && !isPointed(cell)) point(place(cell), { focus: true });
  });
  for (const part of ["nav", "#step", "#explanation", "#overview"]) document.querySelector(part).addEventListener("click", follow);
  document.addEventListener("keydown", onKey);
  addEventListener("popstate", fromAddress);
  addEventListener("beforeprint", print);
  addEventListener("afterprint", () => $("paper").replaceChildren());
  darkness.addEventListener("change", () => {
    maps.clear();
    if (group >= 0) redraw();
  });
  isNarrow.onchange = () => ($("all").open = !isNarrow.matches);
  isNarrow.onchange();
  fromAddress();
  document.body.dataset.ready = "yes";
}

begin();
