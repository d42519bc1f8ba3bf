/* What a reader changes, and the address that keeps it, so that a link reproduces the page. */

const LONGEST = 40; /* characters of a word */
const several = (count, what) => `${count} ${what}${count === 1 ? "" : "s"}`;

/* Everything that is changed, in words. */
function changesInWords() {
  const { factor, causal, cells, keys, words } = changes, found = [];
  if (cells.size) found.push(several(cells.size, "number"));
  if (factor !== 1) found.push(`scale ${say(T.scale * factor)} instead of ${say(T.scale)}`);
  if (causal !== T.causal) found.push(causal ? "causal mask added" : "causal mask removed");
  if (keys.size) found.push(`${several(keys.size, "cell")} of the mask`);
  if (words.size) found.push(several(words.size, "word"));
  return found.length ? `Changed: ${found.join(", ")}` : "";
}

/* Recompute and redraw whatever a change reaches. */
function change({ isRemembered = true } = {}) {
  values.current.clear();
  maps.clear();
  affected = findAffected();
  const text = changesInWords(), scale = say(T.scale * changes.factor);
  $("changed").textContent = text;
  $("reset").disabled = !text;
  $("before").hidden = !areNumbersNew();
  $("causal").checked = changes.causal;
  $("scale").value = Math.log2(changes.factor);
  $("scale-now").textContent = scale;
  $("scale").setAttribute("aria-valuetext", scale);
  show(group);
  if (isRemembered) rememberSoon();
}

/* Keep a change under a key, unless it is what was there before any change. */
const keep = (map, key, value, before) => (Object.is(value, before) ? map.delete(key) : map.set(key, value));

/* A number as a reader types it; NaN for what is none. */
function numberIn(text) {
  const plain = text.trim().replace(/[−–]/, "-").replace(",", ".").replace(/∞|inf(inity)?$/i, "Infinity");
  return plain === "" ? NaN : Number(plain);
}

/* Put x in the place of the given number that is pointed at. */
function type(x) {
  const { step: n, i, j } = pointed, at = i * T.steps[n].cols + j;
  if (Number.isNaN(x)) return;
  keep(changes.cells, `${n}:${at}`, x, matrix(n, false).data[at]);
  isHeld = true;
  change();
}

/* Hide the key that is pointed at from its query, or show it. */
function toggleKey() {
  const { step: n, i, j } = pointed, step = T.steps[n], now = isHidden(step, i, j);
  changes.keys.delete(`${step.part}:${i}:${j}`);
  if (isHidden(step, i, j) === now) changes.keys.set(`${step.part}:${i}:${j}`, !now);
  isHeld = true;
  change();
}

/* Another text for label k of a list: no number follows from it. */
function rename(list, k, text) {
  keep(changes.words, `${list}:${k}`, text.slice(0, LONGEST) || T.labels[list][k], T.labels[list][k]);
  change();
}

function reset() {
  changes = unchanged();
  change();
}

/* ---- the address: #step,i,j&scale=…&causal=…&set=…&mask=…&word=… ---- */

const listed = (map) => [...map].map(([key, value]) => `${key}:${Number(value)}`.replace("+", "")).join();

function address() {
  const { factor, causal, cells, keys, words } = changes;
  const parts = [group < 0 ? "overview" : [pointed.step, pointed.i, pointed.j].join()];
  if (factor !== 1) parts.push(`scale=${factor}`); /* times that of the run */
  if (causal !== T.causal) parts.push(`causal=${Number(causal)}`);
  if (cells.size) parts.push(`set=${listed(cells)}`);
  if (keys.size) parts.push(`mask=${listed(keys)}`);
  for (const [key, text] of words) parts.push(`word=${key}:${encodeURIComponent(text)}`);
  return `#${parts.join("&")}`;
}

const isIndex = (n, size) => Number.isInteger(n) && n >= 0 && n < size;

/* The step and cell of an address, or null where it names no cell that is shown. */
function placeIn(hash) {
  const [where = ""] = new URLSearchParams(hash.slice(1)).keys();
  const [n, i = 0, j = 0] = where.split(",").map((text) => (/^\d+$/.test(text) ? Number(text) : NaN)), step = T.steps[n];
  const isThere = step && step.group !== null && isIndex(i, step.rows) && isIndex(j, step.cols);
  return isThere ? { step: n, i, j } : null;
}

/* The changes of an address; what is malformed, or is not there to be changed, is ignored. */
function changesIn(hash) {
  const found = unchanged(), asked = new URLSearchParams(hash.slice(1)), scale = Number(asked.get("scale"));
  const rows = (name, length) =>
    (asked.get(name) ?? "").split(",").map((item) => item.split(":")).filter((row) => row.length === length && !row.includes(""))
      .map((row) => row.map(Number));
  if (T.canScale && scale > 0 && scale < Infinity) found.factor = scale;
  if (T.canMask && ["0", "1"].includes(asked.get("causal"))) found.causal = asked.get("causal") === "1";
  for (const [n, at, x] of rows("set", 3))
    if (T.steps[n] && isGiven(T.steps[n]) && isIndex(at, T.steps[n].size) && !Number.isNaN(x))
      keep(found.cells, `${n}:${at}`, x, matrix(n, false).data[at]);
  for (const [part, i, j, x] of rows("mask", 4))
    if (T.canMask && T.steps.some((s) => s.part === part && canHide(s) && isIndex(i, s.rows) && isIndex(j, s.cols)) && (x === 0 || x === 1))
      found.keys.set(`${part}:${i}:${j}`, x === 1);
  for (const entry of asked.getAll("word")) {
    const [, list, k, text] = /^(\d+):(\d+):(.+)$/s.exec(entry) ?? [];
    if (T.labels[list]?.[k] !== undefined) keep(found.words, `${list}:${k}`, text.slice(0, LONGEST), T.labels[list][k]);
  }
  return found;
}

/* Whether a reader can hide or show a key in a step. */
function canHide(step) {
  const masker = T.canMask && isOfKeys(step) && maskerOf(step);
  return Boolean(masker) && masker.hides === null && !masker.isBlock;
}

function remember(how = "pushState") {
  try {
    history[how](null, "", address());
  } catch {
    /* a sandboxed frame has no history */
  }
}

let timer;
function rememberSoon() {
  clearTimeout(timer);
  timer = setTimeout(remember, 150, "replaceState");
}

function fromAddress() {
  clearTimeout(timer);
  changes = changesIn(location.hash);
  group = -1;
  change({ isRemembered: false });
  const asked = placeIn(location.hash), isOverview = /^#overview(&|$)/.test(location.hash) || !T.first;
  if (asked) point(asked, { focus: true, hold: true });
  else if (!isOverview) point({ step: T.first[0], i: T.first[1], j: T.first[2] });
}
