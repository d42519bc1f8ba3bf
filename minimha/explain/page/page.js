/* The page of a trace: a list of steps, their matrices, and what made the cell that is pointed at.

   A small run travels whole. Of a large one only what is given does: everything else is computed
   from it, when it is first shown, by the operations that made it, which minimha has checked
   against the trace. So is whatever follows from a change of the scale or the mask. */

const $ = (id) => document.getElementById(id);
const T = JSON.parse($("trace").textContent);
const WINDOW = 16; /* rows and columns of a table: a larger matrix is a map with a table beside it */
const READABLE = 32;
const MAP = 256; /* pixels of a map's longer side */
const media = matchMedia("(prefers-color-scheme: dark)");
decimals = T.decimals;

const changes = { factor: 1, causal: T.causal };
const values = { original: new Map(), current: new Map() };
const isChanged = () => changes.factor !== 1 || changes.causal !== T.causal;

let travelled; /* numbers of all steps that travel, one after the other */
let affected = new Set(); /* the steps that a change has changed */
let group = -1; /* the one that is shown; -1 is the overview */
let pointed = null; /* {step, i, j}: the cell that is written out */
let isPinned = false;
const maps = new Map(); /* canvases, as long as their numbers are the same */
const views = new Map(); /* of large steps: the first row and column that their table shows */

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/* ---- numbers ---- */

async function load() {
  const packed = Uint8Array.from(atob($("data").textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
  if (T.isSmall) return new Float64Array(bytes.buffer);
  const count = bytes.length / 4, numbers = new Float64Array(count);
  for (const step of T.steps)
    for (let n = step.at; step.at !== null && n < step.at + step.size; n++) {
      const whole = bytes[n] | (bytes[count + n] << 8) | (bytes[2 * count + n] << 16) | (bytes[3 * count + n] << 24);
      numbers[n] = [-Infinity, Infinity, NaN][whole + 2 ** 31] ?? whole * step.quantum;
    }
  return numbers;
}

const bits = T.patterns.map((text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0)));

/* Whether a mask hides cell (i, j) of a step, as it was or as it is now. */
function hiddenBy(step, now) {
  const causal = now ? changes.causal : T.causal, { offset, pattern } = step.mask;
  const isLater = (i, j) => j > i + (offset ?? 0);
  if (offset !== null) return (i, j) => (causal || step.isBlock) && isLater(i, j);
  return (i, j) => isSet(pattern, i * step.cols + j) || (T.addsMask && causal && isLater(i, j));
}

const isSet = (pattern, n) => Boolean((bits[pattern][n >> 3] >> (7 - (n & 7))) & 1);

/* Whether a mask hides cell (i, j) of a step, or of the scores that its weights are made from; null
   where nothing can be hidden. */
function hiddenIn(step, now) {
  if (step.mask) return hiddenBy(step, now);
  if (step.hides !== null) return (i, j) => isSet(step.hides, i * step.cols + j);
  if (!["product", "running product", "share", "exp"].includes(step.made?.operation)) return null;
  const from = T.steps[step.made.from[0]];
  return isMaskedHere(step, from) ? (i, j) => now && changes.causal && j > i : hiddenIn(from, now);
}

/* The numbers of step n, as they are now or were: computed once, and kept until a change. */
function matrix(n, now = true) {
  const step = T.steps[n], isNew = now && affected.has(n);
  const kept = isNew ? values.current : values.original;
  if (!kept.has(n)) kept.set(n, isNew || step.at === null ? computed(step, isNew) : asItCame(step));
  return kept.get(n);
}

function shaped(step, data) {
  const { rows, cols, place, stage } = step;
  return { rows, cols, place, stage, data, ndim: step.shape.length, name: (i, j) => nameOf(step, i, j) };
}

const asItCame = (step) => shaped(step, travelled.subarray(step.at, step.at + step.size));

function operandsOf(step, now) {
  return step.made.from.map((n) => n !== null && masked(step, matrix(n, now), T.steps[n], now));
}

const isMaskedHere = (step, from) =>
  T.addsMask && ["row max", "exp"].includes(step.made.operation) && from.mapped && !from.mask;

/* Where no step masks the scores, the switch does it on their way into the softmax. */
function masked(step, M, from, now) {
  if (!isMaskedHere(step, from) || !now || !changes.causal) return M;
  const seen = shaped(from, new Float64Array(M.data));
  fill(seen, (i, j) => (j > i ? -Infinity : get(M, i, j)));
  return seen;
}

const constantOf = (step, now) => step.made.constant * (step.scales && now ? changes.factor : 1);

function computed(step, now) {
  const out = shaped(step, new Float64Array(step.rows * step.cols));
  const { operation } = step.made, hidden = hiddenIn(step, now);
  OPERATIONS[operation].compute(out, operandsOf(step, now), constantOf(step, now), hidden);
  if (step.scales === "product" && now && changes.factor !== 1)
    fill(out, (i, j) => get(out, i, j) * changes.factor);
  return out;
}

function written(n, i, j) {
  const step = T.steps[n], value = said(matrix(n), i, j);
  const name = nameOf(step, i, j);
  if (step.blank) return { text: `${name} is yours to find`, used: [] };
  if (!step.made) return { text: `${name} = ${value}, given`, used: [] };
  const hidden = hiddenIn(step, true);
  const operation = OPERATIONS[step.made.operation];
  const { text, fate, used } = operation.write(i, j, operandsOf(step, true), constantOf(step, true), hidden);
  const scaled = step.scales === "product" && changes.factor !== 1;
  const right = scaled ? `(${text}) · ${factor(changes.factor)}` : text;
  const cells = used.map(([operand, ...rest]) => [step.made.from[operand], ...rest]);
  return { text: fate ? `${name} = ${value}, ${fate}` : `${name} = ${right} = ${value}`, used: cells };
}

function nameOf(step, i, j) {
  const found = labels(step, i, j);
  return step.symbol + (found.length ? `[${found.join(",")}]` : "");
}

function labels(step, i, j) {
  const row = step.rowLabels === null ? i : T.labels[step.rowLabels][i];
  const column = step.columnLabels === null ? j : T.labels[step.columnLabels][j];
  if (step.shape.length === 0) return [];
  if (step.shape.length === 1) return [column];
  return step.axes.at(-1) === "1" ? [row] : [row, column];
}

/* ---- matrices ---- */

const rowLabel = (step, i) => (step.rowLabels === null ? String(i) : T.labels[step.rowLabels][i]);
const columnLabel = (step, j) =>
  step.columnLabels !== null ? T.labels[step.columnLabels][j] : step.axes.at(-1) === "1" ? "" : String(j);
const isLarge = (step) => step.rows > READABLE || step.cols > READABLE;

/* The least and the greatest finite number of a matrix. */
function extent(M) {
  if (M.extent) return M.extent;
  let low = Infinity, high = -Infinity;
  for (const x of M.data) if (Number.isFinite(x)) (low = Math.min(low, x)), (high = Math.max(high, x));
  return (M.extent = low <= high ? [low, high] : [0, 0]);
}

/* One scale for all heads of a step; a large one is not computed for the sake of another's. */
function limits(n) {
  const step = T.steps[n];
  if (step.mapped === "weights") return [0, 1];
  if (isLarge(step) || step.group === null) return extent(matrix(n));
  const all = T.groups[step.group].steps.map((other) => extent(matrix(other)));
  return [Math.min(...all.map(([low]) => low)), Math.max(...all.map(([, high]) => high))];
}

const text = (M) => (M.text ??= sayer(M.data, decimals));

/* The first row and column of the table that shows cell (i, j): where it was, if it is in there. */
function viewOf(n, i, j, moves) {
  const step = T.steps[n];
  if (!isLarge(step)) return [0, 0];
  const [top, left] = views.get(n) ?? [-WINDOW, -WINDOW];
  const isIn = i >= top && i < top + WINDOW && j >= left && j < left + WINDOW;
  if (isIn) return [top, left];
  const start = (middle, size) => Math.max(0, Math.min(size - WINDOW, middle - WINDOW / 2));
  const view = [start(i, step.rows), start(j, step.cols)];
  if (moves) views.set(n, view);
  return view;
}

/* A table of step n; of a large one, the part around (i, j). A grid can be walked with the keys. */
function table(n, i, j, isGrid) {
  const step = T.steps[n], M = matrix(n), before = matrix(n, false);
  const [top, left] = viewOf(n, i, j, isGrid);
  const [height, width] = isLarge(step) ? [Math.min(WINDOW, step.rows), Math.min(WINDOW, step.cols)] : [step.rows, step.cols];
  const [low, high] = step.mapped ? limits(n) : [0, 0];
  const made = element("table", { "aria-label": step.title, "aria-rowcount": step.rows + 1, "aria-colcount": step.cols + 1 });
  if (isGrid) made.setAttribute("role", "grid");
  const head = element("tr", {}, element("td", { class: "corner" }));
  for (let c = left; c < left + width; c++) head.append(headOf(columnLabel(step, c)));
  made.append(element("thead", {}, head));
  const body = element("tbody");
  for (let r = top; r < top + height; r++) {
    const line = element("tr", {}, element("th", { scope: "row" }, rowLabel(step, r)));
    for (let c = left; c < left + width; c++) {
      const x = get(M, r, c), cell = element("td", { "data-at": `${n},${r},${c}` });
      cell.textContent = step.blank ? "" : text(M)(x);
      if (isGrid) cell.tabIndex = r === i && c === j ? 0 : -1;
      if (step.mapped && Number.isFinite(x)) shade(cell, (x - low) / (high - low || 1));
      if (!Object.is(x, get(before, r, c))) cell.classList.add("changed");
      line.append(cell);
    }
    body.append(line);
  }
  made.append(body);
  return made;
}

/* A column of one number has no label, and an empty head would be read out. */
const headOf = (label) => (label ? element("th", { scope: "col" }, label) : element("td", { class: "corner" }));

function shade(cell, level) {
  cell.classList.add("heat");
  cell.style.setProperty("--level", level.toFixed(3));
  if (level >= 0.66) cell.classList.add("on");
}

/* A large matrix as a map, drawn when it first comes into view. */
function map(n) {
  if (maps.has(n)) return maps.get(n);
  const step = T.steps[n];
  const canvas = element("canvas", {
    width: step.cols, height: step.rows, class: "map", role: "img", "data-map": n,
    "aria-label": `map of ${step.title}, ${step.rows} rows and ${step.cols} columns; the table beside it can be walked with the arrow keys`,
  });
  const size = MAP / Math.max(step.rows, step.cols);
  canvas.style.width = `${Math.max(12, size * step.cols)}px`;
  canvas.style.height = `${Math.max(12, size * step.rows)}px`;
  seen.observe(canvas);
  maps.set(n, canvas);
  return canvas;
}

function draw(canvas) {
  const n = Number(canvas.dataset.map), M = matrix(n), [low, high] = extent(M);
  const ground = media.matches ? [21, 23, 26] : [255, 255, 255], heat = media.matches ? [110, 170, 240] : [8, 48, 107];
  const context = canvas.getContext("2d"), image = context.createImageData(M.cols, M.rows);
  const bend = T.steps[n].mapped === "weights" ? Math.cbrt : (x) => x;
  for (let p = 0; p < M.data.length; p++) {
    const level = Number.isFinite(M.data[p]) ? bend((M.data[p] - low) / (high - low || 1)) : 0;
    for (let c = 0; c < 3; c++) image.data[4 * p + c] = ground[c] + (heat[c] - ground[c]) * level;
    image.data[4 * p + 3] = 255;
  }
  context.putImageData(image, 0, 0);
}

const seen = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries)
    if (isIntersecting) draw(target), seen.unobserve(target);
});

/* A step under its title: a table, or of a large one a map, and the part of it around (i, j). */
function figure(n, [i, j], { isGrid = false, hasMap = true, hasTable = true } = {}) {
  const step = T.steps[n], shape = step.shape.length ? `${step.axes.join(" × ")} = ${step.shape.join(" × ")}` : "";
  const caption = element("figcaption", {}, element("b", {}, step.title), ` ${shape}`);
  const made = element("figure", {}, caption);
  if (!step.rows || !step.cols) return made.append("(empty)"), made;
  if (isLarge(step) && hasMap)
    made.append(map(n), element("br"), element("small", {}, step.mapped === "weights" ? "shade: cube root" : ""));
  if (isLarge(step) && hasTable) {
    const [top, left] = viewOf(n, i, j, isGrid);
    caption.append(`, rows from ${top}, columns from ${left}`);
  }
  if (hasTable) made.append(table(n, i, j, isGrid));
  return made;
}

/* ---- what is shown ---- */

function show(n) {
  group = n;
  for (const link of $("list").querySelectorAll("a"))
    Number(link.dataset.group) === n ? link.setAttribute("aria-current", "step") : link.removeAttribute("aria-current");
  $("overview").hidden = n >= 0;
  $("step").hidden = n < 0;
  $("previous").disabled = n < 0;
  $("next").disabled = n === T.groups.length - 1;
  if (n < 0) return;
  const { steps, name, note, source, printed } = T.groups[n];
  $("heading").textContent = `${n + 1}. ${name}`;
  $("formula").replaceChildren($("formulas").children[n].cloneNode(true));
  $("note").textContent = note;
  $("from").textContent = source ? `Source: ${source}.` : "";
  $("printed").replaceChildren(...(isChanged() ? [] : printed).map((line) => element("li", {}, line)));
  $("stale").hidden = !(isChanged() && steps.some((s) => T.steps[s].stale));
  if (!pointed || T.steps[pointed.step].group !== n) point({ step: steps[0], i: 0, j: 0 });
  else redraw();
}

function redraw() {
  const { step, i, j } = pointed, { steps } = T.groups[group];
  const grids = steps.map((n) =>
    figure(n, n === step ? [i, j] : [0, 0], { isGrid: true, hasTable: !isLarge(T.steps[n]) }));
  if (isLarge(T.steps[step])) grids.push(figure(step, [i, j], { isGrid: true, hasMap: false }));
  $("matrices").replaceChildren(...grids);
  explain();
}

/* Write out the cell that is pointed at, and colour what made it. */
function explain() {
  const { step, i, j } = pointed, { text, used } = written(step, i, j);
  $("says").textContent = text;
  $("pinned").hidden = !isPinned;
  const operands = [...new Set(used.map(([n]) => n))];
  const first = (n) => used.find(([other]) => other === n);
  $("operands").replaceChildren(...operands.map((n) => figure(n, first(n).slice(1, 3), { hasMap: false })));
  $("links").replaceChildren(...operands.map((n) => linkTo(first(n))));
  for (const cell of document.querySelectorAll("td.row, td.column, td.other, td.here"))
    cell.classList.remove("row", "column", "other", "here");
  for (const [n, r, c, role] of used)
    for (const cell of $("operands").querySelectorAll(`td[data-at="${n},${r},${c}"]`)) cell.classList.add(role);
  for (const cell of $("matrices").querySelectorAll("td[data-at]")) {
    const isHere = cell.dataset.at === `${step},${i},${j}`;
    cell.classList.toggle("here", isHere);
    if (cell.dataset.at.startsWith(`${step},`)) cell.tabIndex = isHere ? 0 : -1;
  }
}

function linkTo([n, i, j]) {
  const link = element("a", { href: `#${n},${i},${j}` }, `← ${T.steps[n].title}`);
  return element("li", {}, link);
}

/* Point at a cell of a step; {focus} moves the keyboard there too. */
function point({ step, i, j }, { focus = false, pin = isPinned } = {}) {
  const { rows, cols, group: other } = T.steps[step];
  const before = pointed;
  pointed = { step, i: Math.max(0, Math.min(rows - 1, i)), j: Math.max(0, Math.min(cols - 1, j)) };
  isPinned = pin;
  const isInView = $("matrices").querySelector(`td[data-at="${Object.values(pointed).join()}"]`);
  const isNear = before?.step === step || !isLarge(T.steps[step]);
  if (other !== group) show(other);
  else if (!isInView || !isNear) redraw();
  else explain();
  if (focus) $("matrices").querySelector("td.here")?.focus();
}

/* ---- changes ---- */

function findAffected() {
  const found = new Set(), isMaskNew = changes.causal !== T.causal;
  T.steps.forEach((step, n) => {
    const operands = (step.made?.from ?? []).filter((operand) => operand !== null);
    const isMasking = step.mask || operands.some((operand) => isMaskedHere(step, T.steps[operand]));
    const isFirst = (changes.factor !== 1 && step.scales) || (isMaskNew && step.made && isMasking);
    if (isFirst || operands.some((operand) => found.has(operand))) found.add(n);
  });
  return found;
}

function change() {
  values.current.clear();
  maps.clear();
  affected = findAffected();
  const badge = [];
  if (changes.factor !== 1) badge.push(`scale ${say(T.scale * changes.factor)} instead of ${say(T.scale)}`);
  if (changes.causal !== T.causal) badge.push(changes.causal ? "causal mask added" : "causal mask removed");
  $("changed").textContent = badge.length ? `changed: ${badge.join(", ")}` : "";
  $("reset").disabled = $("before").hidden = !badge.length;
  document.body.classList.toggle("is-changed", badge.length > 0);
  $("scale-now").textContent = say(T.scale * changes.factor);
  show(group);
}

function reset() {
  Object.assign(changes, { factor: 1, causal: T.causal });
  $("scale").value = T.scale;
  $("causal").checked = T.causal;
  change();
}

/* ---- events ---- */

const place = (cell) => {
  const [step, i, j] = cell.dataset.at.split(",").map(Number);
  return { step, i, j };
};
const cellOf = (target) => target.closest("[role=grid] td[data-at]");

function onMap(event) {
  const { left, top, width, height } = event.target.getBoundingClientRect(), step = Number(event.target.dataset.map);
  const i = Math.floor(((event.clientY - top) / height) * T.steps[step].rows);
  const j = Math.floor(((event.clientX - left) / width) * T.steps[step].cols);
  point({ step, i, j }, { pin: true });
}

function onPointer(event) {
  const cell = cellOf(event.target);
  if (event.type === "click" && event.target.closest("#matrices canvas")) return onMap(event);
  if (!cell || (isPinned && event.type !== "click")) return;
  point(place(cell), { pin: event.type === "click" });
}

const MOVES = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input")) return;
  const cell = cellOf(event.target), { key } = event;
  const turn = { n: 1, p: -1 }[key];
  if (turn) return go(group + turn);
  if (key === "Escape") {
    isPinned = false;
    $("pinned").hidden = true;
    if (cell) $("heading").focus();
    return;
  }
  if (!cell) return;
  const { step, i, j } = place(cell), move = MOVES[key];
  if (move) point({ step, i: i + move[0], j: j + move[1] }, { focus: true });
  else if (key === "Home") point({ step, i, j: 0 }, { focus: true });
  else if (key === "End") point({ step, i, j: T.steps[step].cols - 1 }, { focus: true });
  else if (key === "Enter" || key === " ") point({ step, i, j }, { focus: true, pin: true });
  else return;
  event.preventDefault();
}

function go(n) {
  if (n < -1 || n >= T.groups.length) return;
  isPinned = false;
  show(n);
  $(n < 0 ? "title" : "heading").focus();
  remember(n < 0 ? "#overview" : `#${T.groups[n].steps[0]},0,0`);
}

/* A link to a cell. */
function follow(event) {
  const link = event.target.closest("a");
  if (!link) return;
  event.preventDefault();
  const [step, i, j] = link.hash.slice(1).split(",").map(Number);
  remember(link.hash);
  point({ step, i, j }, { focus: true, pin: true });
}

function remember(hash) {
  try {
    history.pushState(null, "", hash);
  } catch {
    /* a sandboxed frame has no history */
  }
}

function fromAddress() {
  const [step, i, j] = location.hash.slice(1).split(",").map(Number);
  if (location.hash.includes(",") && step >= 0 && step < T.steps.length) point({ step, i: i || 0, j: j || 0 }, { focus: true, pin: true });
  else show(-1);
}

/* On paper every step, one after the other. */
function print() {
  const parts = T.groups.map(({ steps, name, note }, n) => {
    const small = steps.filter((s) => !isLarge(T.steps[s]));
    const tables = small.map((s) => figure(s, [0, 0]));
    const rest = steps.length > small.length ? [element("p", {}, "too large to print")] : [];
    return element("section", {}, element("h2", {}, `${n + 1}. ${name}`), $("formulas").children[n].cloneNode(true),
      element("p", {}, note), element("div", { class: "side" }, ...tables), ...rest);
  });
  $("paper").replaceChildren(...parts);
}

async function begin() {
  travelled = await load();
  $("controls").hidden = !T.canScale && !T.canMask;
  $("scale-control").hidden = !T.canScale;
  $("causal-control").hidden = !T.canMask;
  Object.assign($("scale"), { min: 0, max: Math.max(2, 4 * T.scale), step: 0.001, value: T.scale });
  $("scale-now").textContent = say(T.scale);
  $("causal").checked = T.causal;
  $("scale").oninput = () => ((changes.factor = Number($("scale").value) / T.scale), change());
  $("causal").onchange = () => ((changes.causal = $("causal").checked), change());
  $("reset").onclick = reset;
  $("previous").onclick = () => go(group - 1);
  $("next").onclick = () => go(group + 1);
  for (const name of ["mouseover", "click"]) $("matrices").addEventListener(name, onPointer);
  $("matrices").addEventListener("focusin", (event) => {
    const cell = cellOf(event.target);
    if (cell && cell.dataset.at !== Object.values(pointed).join()) point(place(cell), { focus: true });
  });
  $("list").addEventListener("click", (event) => {
    const link = event.target.closest("a");
    if (link) event.preventDefault(), go(Number(link.dataset.group));
  });
  $("step").addEventListener("click", follow);
  $("overview").addEventListener("click", follow);
  document.addEventListener("keydown", onKey);
  addEventListener("popstate", fromAddress);
  addEventListener("beforeprint", print);
  addEventListener("afterprint", () => $("paper").replaceChildren());
  media.addEventListener("change", () => {
    maps.clear();
    if (group >= 0) redraw();
  });
  fromAddress();
  document.body.dataset.ready = "yes";
}

begin();
