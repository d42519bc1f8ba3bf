/* The numbers of a trace, as they came and as they are after a change.

   A small run is embedded whole. Of a large one only the inputs are: everything else is computed
   from them when it is first shown, by the operations that made it, which minimha has checked
   against the trace. So is everything that follows from a change. */

const $ = (id) => document.getElementById(id);
const T = JSON.parse($("trace").textContent);
decimals = T.decimals;

/* What a reader has changed. cells: "step:place" → number; keys: "part:i:j" → whether the mask
   hides key j from query i in a part of the run; words: "list:k" → the new text of a label. */
const unchanged = () => ({ factor: 1, causal: T.causal, cells: new Map(), keys: new Map(), words: new Map() });
let changes = unchanged();
const isMaskNew = () => changes.causal !== T.causal || changes.keys.size > 0;
const areNumbersNew = () => changes.factor !== 1 || isMaskNew() || changes.cells.size > 0;

let embedded; /* numbers of all steps that are embedded, one after the other */
let affected = new Set(); /* the steps that a change reaches */
const values = { original: new Map(), current: new Map() };

const isGiven = (step) => !step.made && !step.blank && !step.stale;
const isWeights = (step) => step.base === "weights" && step.mapped !== null && step.group !== null;

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

/* ---- masks ---- */

const bits = T.patterns.map((text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0)));
const isSet = (pattern, n) => Boolean((bits[pattern][n >> 3] >> (7 - (n & 7))) & 1);

/* What the reader has chosen for a cell of the mask, if anything; all heads share it. */
const chosen = (step, i, j) => changes.keys.get(`${step.part}:${i}:${j}`);

/* Whether step ``step`` masks key j from query i, as it was or as it is now. */
function hiddenBy(step, now) {
  const causal = now ? changes.causal : T.causal, { offset, pattern } = step.mask;
  const isLater = (i, j) => j > i + (offset ?? 0);
  const rule = (i, j) =>
    offset !== null
      ? (causal || step.isBlock) && isLater(i, j)
      : isSet(pattern, i * step.cols + j) || (T.addsMask && causal && isLater(i, j));
  return now && !step.isBlock ? (i, j) => chosen(step, i, j) ?? rule(i, j) : rule;
}

/* The same where no step masks: the page does it between the scores and the softmax. */
const hiddenByPage = (step) => (i, j) => chosen(step, i, j) ?? (changes.causal && j > i);

const isMaskedHere = (step, from) =>
  T.addsMask && ["row max", "exp"].includes(step.made.operation) && from.mapped && !from.mask;

/* The step whose mask a step's keys are hidden by; null where nothing can be hidden. */
function maskerOf(step) {
  if (step.mask || step.hides !== null) return step;
  if (!["product", "running product", "share", "exp"].includes(step.made?.operation)) return null;
  const from = T.steps[step.made.from[0]];
  return isMaskedHere(step, from) ? step : maskerOf(from);
}

/* Whether key j is hidden from query i in a step, as a function; null where nothing can be. */
function hiddenIn(step, now) {
  const masker = maskerOf(step);
  if (!masker) return null;
  if (masker.mask) return hiddenBy(masker, now);
  if (masker.hides !== null) return (i, j) => isSet(masker.hides, i * masker.cols + j);
  return now ? hiddenByPage(masker) : () => false;
}

/* Whether row i and column j of a step are themselves a query and a key that a mask may hide. */
const isOfKeys = (step) =>
  Boolean(step.mask) || step.hides !== null || ["exp", "share"].includes(step.made?.operation);
const isHidden = (step, i, j, now = true) => Boolean(isOfKeys(step) && hiddenIn(step, now)?.(i, j));

/* ---- matrices ---- */

function shaped(step, data) {
  const { rows, cols, place, stage } = step;
  return { rows, cols, place, stage, data, ndim: step.shape.length, name: (i, j) => nameOf(step, i, j) };
}

/* The numbers of step n, as they were or are ``now``: computed once, and kept until a change. */
function matrix(n, now = true) {
  const step = T.steps[n], isNew = now && affected.has(n), kept = isNew ? values.current : values.original;
  if (!kept.has(n)) kept.set(n, made(n, step, isNew));
  return kept.get(n);
}

function made(n, step, isNew) {
  if (step.made && (isNew || step.at === null)) return computed(step, isNew);
  return isNew ? edited(n, step) : shaped(step, embedded.subarray(step.at, step.at + step.size));
}

/* Given numbers, with those that the reader has put in their place. */
function edited(n, step) {
  const out = shaped(step, Float64Array.from(matrix(n, false).data));
  for (const [key, x] of changes.cells) {
    const [other, at] = key.split(":").map(Number);
    if (other === n) out.data[at] = x;
  }
  return Object.assign(out, { isEdited: true });
}

function operandsOf(step, now) {
  return step.made.from.map((n) => n !== null && masked(step, matrix(n, now), T.steps[n], now));
}

function masked(step, M, from, now) {
  if (!isMaskedHere(step, from) || !now || !isMaskNew()) return M;
  const seen = shaped(from, new Float64Array(M.data)), hidden = hiddenByPage(step);
  fill(seen, (i, j) => (hidden(i, j) ? -Infinity : get(M, i, j)));
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

/* The steps that ``isFirst`` chooses, and all that are computed from them. */
function following(isFirst) {
  const found = new Set();
  T.steps.forEach((step, n) => {
    if (isFirst(step, n) || step.made?.from.some((operand) => found.has(operand))) found.add(n);
  });
  return found;
}

/* Steps that no known operation makes from others, though they come from them, and what follows. */
const stale = following((step) => step.stale);

function findAffected() {
  const typed = new Set([...changes.cells.keys()].map(parseFloat)), isNew = isMaskNew();
  const isMasking = (step) =>
    step.made && (step.mask || step.made.from.some((n) => n !== null && isMaskedHere(step, T.steps[n])));
  return following((step, n) =>
    typed.has(n) || (changes.factor !== 1 && step.scales) || (isNew && isMasking(step)));
}

/* Whether cell (i, j) is another than it was, apart from what a browser rounds in another way. */
function isNewAt(n, i, j) {
  if (!affected.has(n)) return false;
  const before = matrix(n, false), x = get(matrix(n), i, j), old = get(before, i, j);
  return !Object.is(x, old) && !(Math.abs(x - old) <= 1e-12 * Math.max(...extent(before).map(Math.abs)));
}

/* The least and the greatest finite number of a matrix. */
function extent(M) {
  if (M.extent) return M.extent;
  let low = Infinity, high = -Infinity;
  for (const x of M.data) if (Number.isFinite(x)) (low = Math.min(low, x)), (high = Math.max(high, x));
  return (M.extent = low <= high ? [low, high] : [0, 0]);
}

/* ---- names ---- */

const word = (list, k) => changes.words.get(`${list}:${k}`) ?? T.labels[list][k];
const rowLabel = (step, i) => (step.rowLabels === null ? String(i) : word(step.rowLabels, i));
const isColumn = (step) => step.axes.at(-1) === "1"; /* one number for each row */
const columnLabel = (step, j) =>
  step.columnLabels !== null ? word(step.columnLabels, j) : isColumn(step) ? "" : String(j);

function labels(step, i, j) {
  if (step.shape.length === 0) return [];
  if (step.shape.length === 1) return [step.columnLabels === null ? j : columnLabel(step, j)];
  if (step.axes.at(-2) === "1") return [columnLabel(step, j)];
  return isColumn(step) ? [rowLabel(step, i)] : [rowLabel(step, i), columnLabel(step, j)];
}

function nameOf(step, i, j) {
  const found = labels(step, i, j);
  return step.symbol + (found.length ? `[${found.join(",")}]` : "");
}

/* Cell (i, j) of step n written out, and the cells that it is made from: [step, i, j, role]. */
function written(n, i, j) {
  const step = T.steps[n], value = said(matrix(n), i, j), name = nameOf(step, i, j);
  if (step.blank) return { text: `${name} is yours to find`, used: [] };
  if (!step.made) return { text: `${name} = ${value}, ${step.how}`, used: [] };
  const operation = OPERATIONS[step.made.operation], hidden = hiddenIn(step, true);
  const { text, fate, used } = operation.write(i, j, operandsOf(step, true), constantOf(step, true), hidden);
  const isScaled = step.scales === "product" && changes.factor !== 1;
  const right = isScaled ? `(${text}) · ${factor(changes.factor)}` : text;
  const cells = used.map(([operand, ...rest]) => [step.made.from[operand], ...rest]);
  return { text: fate ? `${name} = ${value}, ${fate}` : `${name} = ${right} = ${value}`, used: cells };
}
