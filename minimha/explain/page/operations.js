/* What each operation of the catalogue computes, and how one of its cells is written out: the
   counterpart of origins.py and written.py, so that a page can follow a change.

   A matrix is {rows, cols, data, name, place, stage}, where name(i, j) names a cell; get(M, i, j) repeats a
   row, a column or a number that is too small. compute(out, operands, constant, hidden) fills
   out.data, and hidden(i, j) says whether a mask hides a key from a query. write(i, j, operands,
   constant, hidden) returns {text, used}, or {fate, used} where a number stays as it is or is
   hidden; used lists [operand, i, j, role], and a role is "row", "column" or "other". */
"use strict";

const get = (M, i, j) => M.data[Math.min(i, M.rows - 1) * M.cols + Math.min(j, M.cols - 1)];
const range = (n) => Array.from({ length: n }, (_, k) => k);
const sum = (numbers) => numbers.reduce((total, x) => total + x, 0);

function fill(out, cell) {
  for (let i = 0; i < out.rows; i++)
    for (let j = 0; j < out.cols; j++) out.data[i * out.cols + j] = cell(i, j);
}

/* Which keys count in a product: NaN and ∞ of a hidden one do not. */
const counted = (A, B, i, j, hidden) =>
  range(A.cols).filter((d) => !hidden?.(i, d) || Number.isFinite(get(B, d, j)));

/* A B, or A Bᵀ, without a function call per number: the only loops that take time. */
function multiply(out, A, B, isTransposed, start, hidden) {
  const depth = A.cols;
  for (let i = 0; i < out.rows; i++)
    for (let j = 0; j < out.cols; j++) {
      let total = start(i, j), b = isTransposed ? j * B.cols : j;
      const stride = isTransposed ? 1 : B.cols;
      for (let d = 0; d < depth; d++, b += stride) total += A.data[i * depth + d] * B.data[b];
      if (Number.isNaN(total) && hidden) {
        total = start(i, j);
        for (const d of counted(A, B, i, j, hidden)) total += get(A, i, d) * get(B, d, j);
      }
      out.data[i * out.cols + j] = total;
    }
}

const rowOf = (M, i) => range(M.cols).map((d) => get(M, i, d));
const norm = (M, i) => Math.hypot(...rowOf(M, i));
const least = (m) => (m === -Infinity ? 0 : m);
const ratio = (a, b) => a / (b === 0 ? 1 : b);

/* The pair that column j belongs to: which pair, its two columns, and whether j is the first. */
function pairOf(j, numPairs, isInterleaved) {
  const n = isInterleaved ? Math.floor(j / 2) : j % numPairs;
  if (j >= 2 * numPairs) return null;
  const columns = isInterleaved ? [2 * n, 2 * n + 1] : [n, n + numPairs];
  return { n, columns, isFirst: columns[0] === j };
}

/* Numbers as the terminal shows them: half to even, as Python rounds. ``text`` is rounded, and
   ``exact`` has every digit: where those after the decimals are a half, the even neighbour. */
function even(text, exact, decimals) {
  const cut = exact.indexOf(".") + 1 + decimals;
  if (!/^50*(e|$)/.test(exact.slice(cut))) return text;
  const down = exact.slice(0, decimals ? cut : cut - 1);
  return "02468".includes(down.at(-1)) ? down + (/e.*/.exec(exact) ?? "") : text;
}

const fixed = (x, n) => even(x.toFixed(n), x.toFixed(Math.min(100, n + 60)), n);
const power = (x, n) => even(x.toExponential(n), x.toExponential(Math.min(100, n + 60)), n);

/* How all of these numbers are written; a whole one may be ``short``, without decimals. */
function form(numbers, decimals, short) {
  let largest = 0, isWhole = true;
  for (const x of numbers)
    if (Number.isFinite(x)) {
      largest = Math.max(largest, Math.abs(x));
      isWhole = isWhole && Number.isInteger(x);
    }
  if (largest >= 1e6 || (largest > 0 && largest < 0.5 * 10 ** -decimals))
    return (x) => power(x, decimals).replace(/e([+-])(\d)$/, "e$10$2");
  return (x) => fixed(x, isWhole || (short && Number.isInteger(x)) ? 0 : decimals);
}

function sayer(numbers, decimals, short = false) {
  const as = form(numbers, decimals, short);
  return (x) => {
    if (Number.isNaN(x)) return "NaN";
    if (!Number.isFinite(x)) return x > 0 ? "∞" : "-∞";
    const text = as(x);
    return Number(text) === 0 ? text.replace("-", "") : text;
  };
}

let decimals = 3; // of numbers that are not whole, set by the page
const say = (x) => sayer([x], decimals)(x);
const inParentheses = (text) => (text.startsWith("-") ? `(${text})` : text);
const factor = (x) => inParentheses(say(x));

/* A number of a matrix as that prints it, in a line, and as a factor or a term that is added. */
const said = (M, i, j) => (M.said ??= sayer(M.data, decimals, true))(get(M, i, j));
const term = (M, i, j) => inParentheses(said(M, i, j));
const terms = (M, i) => range(M.cols).map((d) => term(M, i, d));
const MOST = 16; // terms that are written out
const FEW = 3; // of a softmax with more

/* The terms; of too many the largest, in place with an ellipsis between, or only a few. */
function joined(terms, sizes, by = " + ", few = false) {
  if (terms.length <= MOST) return terms.join(by);
  const size = (n) => (Number.isNaN(sizes[n]) ? Infinity : sizes[n]);
  const order = range(terms.length).sort((a, b) => (size(b) > size(a)) - (size(b) < size(a)) || a - b);
  if (few) return [...order.slice(0, FEW).map((n) => terms[n]), `${terms.length - FEW} smaller ones`].join(by);
  const kept = new Set(order.slice(0, MOST)), texts = [];
  terms.forEach((term, n) => {
    if (kept.has(n) || texts.at(-1) !== "…") texts.push(kept.has(n) ? term : "…");
  });
  return texts.join(by);
}

/* The cells of a row, or of a column, of the operand n. */
const along = (n, M, i, role = "row") => range(M.cols).map((d) => [n, i, d, role]);
const down = (n, M, j, role = "column") => range(M.rows).map((d) => [n, d, j, role]);
const products = (keys, a, b) =>
  joined(
    keys.map((d) => `${term(...a(d))}·${term(...b(d))}`),
    keys.map((d) => Math.abs(get(...a(d)) * get(...b(d)))),
  );
const sizes = (M, i) => rowOf(M, i).map(Math.abs);
const at = (n, M, i, j, role) => (M ? [[n, Math.min(i, M.rows - 1), Math.min(j, M.cols - 1), role]] : []);

function writeProduct(i, j, [A, B, bias], c, hidden) {
  const added = bias ? ` + ${term(bias, i, j)}` : "";
  const sum = products(counted(A, B, i, j, hidden), (d) => [A, i, d], (d) => [B, d, j]);
  return {
    text: (sum || "0") + added,
    used: [...along(0, A, i), ...down(1, B, j), ...at(2, bias, i, j, "other")],
  };
}

const writeDot = (i, j, [Q, K]) => ({
  text: products(range(Q.cols), (d) => [Q, i, d], (d) => [K, j, d]),
  used: [...along(0, Q, i), ...along(1, K, j, "column")],
});

/* One number of each of two operands, in a form such as (a, b) => `${a} / ${b}`. */
const two = (text) => (i, j, [A, B]) => ({
  text: text(said(A, i, j), term(B, i, j)),
  used: [...at(0, A, i, j, "row"), ...at(1, B, i, j, "column")],
});

const NO_KEY = "no key is seen: 0 by convention";

/* The largest score of a whole row; where it has none, that is said. */
function writeRowMax(i, j, operands) {
  const { text, used } = writeMax(i, j, operands), [S, sink] = operands;
  const isEmpty = [...rowOf(S, i), ...(sink ? [get(sink, i, 0)] : [])].every((x) => x === -Infinity);
  return isEmpty ? { fate: NO_KEY, used } : { text, used };
}

/* A quotient, but where there is nothing to divide by. */
const shared = (written, total) => (total === 0 ? { fate: NO_KEY, used: written.used } : written);

function writeMax(i, j, [S, other]) {
  const cells = [...range(S.cols).map((d) => [S, i, d]), ...(other ? [[other, i, 0]] : [])];
  const numbers = joined(cells.map((c) => said(...c)), cells.map((c) => get(...c)), ", ");
  return {
    text: `max(${numbers})`,
    used: [...along(0, S, i), ...at(1, other, i, 0, "other")],
  };
}

/* The part of a combined projection that column j belongs to: its matrix, its bias, its column. */
function partOf([x, ...heads], j) {
  const isWide = heads.filter((M) => M.ndim === 2), biases = heads.filter((M) => M.ndim === 1);
  const n = Math.floor(j / isWide[0].cols);
  return { W: isWide[n], bias: biases[n], n, numHeads: isWide.length, j: j % isWide[0].cols };
}

/* The block of rows that row i belongs to: its operands and its row. */
function blockOf(operands, i) {
  let n = 0;
  while (i >= operands[n].rows) i -= operands[n].rows, (n += 2);
  return [n, i];
}

const squares = (M, i) => joined(terms(M, i).map((x) => `${x}²`), sizes(M, i));
const length = (M, i) => `√(${squares(M, i)})`;

/* 2/√π e^(-x²) Σ 2ⁿ x^(2n+1) / (2n+1)!!, whose terms all have one sign. */
function erf(x) {
  if (Math.abs(x) > 6) return Math.sign(x);
  let term = x, total = 0;
  for (let n = 1; Math.abs(term) > 1e-17 * Math.abs(total); n++) {
    total += term;
    term *= (2 * x * x) / (2 * n + 1);
  }
  return (2 / Math.sqrt(Math.PI)) * Math.exp(-x * x) * total;
}

/* By the constant of "activation": ReLU, GELU, its approximation by tanh, SiLU, quick GELU, ReLU². */
const ACTIVATIONS = [
  (x) => Math.max(x, 0),
  (x) => (x * (1 + erf(x / Math.SQRT2))) / 2,
  (x) => (x * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3)))) / 2,
  (x) => x / (1 + Math.exp(-x)),
  (x) => x / (1 + Math.exp(-1.702 * x)),
  (x) => Math.max(x, 0) ** 2,
];
const WRITTEN_ACTIVATIONS = [
  (x) => `max(${x}, 0)`,
  (x) => `${inParentheses(x)} · (1 + erf(${inParentheses(x)} / √2)) / 2`,
  (x) => `${inParentheses(x)} · (1 + tanh(√(2/π) · (${inParentheses(x)} + 0.044715 · ${inParentheses(x)}³))) / 2`,
  (x) => `${inParentheses(x)} / (1 + exp(-${inParentheses(x)}))`,
  (x) => `${inParentheses(x)} / (1 + exp(-1.702 · ${inParentheses(x)}))`,
  (x) => `max(${x}, 0)²`,
];

/* As Python writes a number such as 1e-05 with "g". */
function short(x) {
  const rounded = Number(x.toPrecision(6));
  if (rounded === 0 || rounded >= 1e-4) return String(rounded);
  return rounded.toExponential().replace(/e-(\d)$/, "e-0$1");
}

const OPERATIONS = {
  product: {
    compute: (out, [A, B, bias], c, hidden) =>
      multiply(out, A, B, false, (i, j) => (bias ? get(bias, i, j) : 0), hidden),
    write: writeProduct,
  },
  products: {
    compute: (out, operands) =>
      fill(out, (i, j) => {
        const part = partOf(operands, j), x = rowOf(operands[0], i);
        return sum(x.map((a, d) => a * get(part.W, d, part.j))) + (part.bias ? get(part.bias, 0, part.j) : 0);
      }),
    write(i, j, operands) {
      const part = partOf(operands, j);
      const { text, used } = writeProduct(i, part.j, [operands[0], part.W, part.bias]);
      const places = [0, 1 + part.n, 1 + part.numHeads + part.n];
      return { text, used: used.map(([n, ...rest]) => [places[n], ...rest]) };
    },
  },
  dot: { compute: (out, [Q, K]) => multiply(out, Q, K, true, () => 0), write: writeDot },
  cosine: {
    compute(out, [Q, K]) {
      multiply(out, Q, K, true, () => 0);
      const q = range(Q.rows).map((i) => norm(Q, i)), k = range(K.rows).map((j) => norm(K, j));
      fill(out, (i, j) => ratio(ratio(get(out, i, j), q[i]), k[j]));
    },
    write(i, j, [Q, K]) {
      const { text, used } = writeDot(i, j, [Q, K]);
      return { text: `(${text}) / (${length(Q, i)} · ${length(K, j)})`, used };
    },
  },
  scale: {
    compute: (out, [S], c) => fill(out, (i, j) => get(S, i, j) * c),
    write: (i, j, [S], c) => ({ text: `${term(S, i, j)} · ${factor(c)}`, used: at(0, S, i, j, "row") }),
  },
  cap: {
    compute: (out, [S, cap]) => fill(out, (i, j) => get(cap, 0, 0) * Math.tanh(get(S, i, j) / get(cap, 0, 0))),
    write: two((s, c) => `${c} · tanh(${inParentheses(s)} / ${c})`),
  },
  sum: {
    compute: (out, [A, B]) => fill(out, (i, j) => get(A, i, j) + get(B, i, j)),
    write: two((a, b) => `${a} + ${b}`),
  },
  times: {
    compute: (out, [A, B]) => fill(out, (i, j) => get(A, i, j) * get(B, i, j)),
    write: two((a, b) => `${a} · ${b}`),
  },
  alibi: {
    compute: (out, [slope, distances, given]) =>
      fill(out, (i, j) => (given ? get(given, i, j) : 0) - get(slope, 0, 0) * get(distances, i, j)),
    write: (i, j, [slope, distances, given]) => ({
      text: `${given ? `${term(given, i, j)} - ` : "-"}${term(slope, 0, 0)}·${term(distances, i, j)}`,
      used: [...at(0, slope, i, j, "row"), ...at(1, distances, i, j, "column"), ...at(2, given, i, j, "other")],
    }),
  },
  mask: {
    compute: (out, [S], c, hidden) => fill(out, (i, j) => (hidden(i, j) ? -Infinity : get(S, i, j))),
    write: (i, j, [S], c, hidden) => ({
      fate: hidden(i, j) ? "hidden by the mask" : "not hidden",
      used: at(0, S, i, j, "row"),
    }),
  },
  "row max": {
    compute: (out, [S, sink]) =>
      fill(out, (i) => least(rowOf(S, i).reduce((m, x) => (x > m || Number.isNaN(x) ? x : m), sink ? get(sink, i, 0) : -Infinity))),
    write: writeRowMax,
  },
  exp: {
    compute: (out, [S, m]) => fill(out, (i, j) => Math.exp(get(S, i, j) - least(get(m, i, j)))),
    write: two((s, m) => `exp(${s} - ${m})`),
  },
  total: {
    compute: (out, [P, sink, m]) =>
      fill(out, (i) => sum(rowOf(P, i)) + (sink ? Math.exp(get(sink, i, 0) - get(m, i, 0)) : 0)),
    write(i, j, [P, sink, m]) {
      const rest = sink ? [`exp(${said(sink, i, 0)} - ${term(m, i, 0)})`] : [];
      const used = sink ? [...at(1, sink, i, 0, "other"), ...at(2, m, i, 0, "other")] : [];
      return { text: [joined(terms(P, i), sizes(P, i)), ...rest].join(" + "), used: [...along(0, P, i), ...used] };
    },
  },
  share: {
    compute: (out, [P, total]) => fill(out, (i, j) => ratio(get(P, i, j), get(total, i, j))),
    write: (i, j, operands) =>
      shared(two((p, total) => `${p} / ${total}`)(i, j, operands), get(operands[1], i, j)),
  },
  softmax: {
    compute(out, [x]) {
      const top = range(x.rows).map((i) => Math.max(...rowOf(x, i)));
      fill(out, (i, j) => Math.exp(get(x, i, j) - top[i]));
      const totals = range(out.rows).map((i) => sum(rowOf(out, i)));
      fill(out, (i, j) => get(out, i, j) / totals[i]);
    },
    write(i, j, [x]) {
      const powers = range(x.cols).map((d) => `exp(${said(x, i, d)})`);
      return { text: `${powers[j]} / (${joined(powers, rowOf(x, i), " + ", true)})`, used: along(0, x, i) };
    },
  },
  concat: {
    compute: (out, heads) =>
      fill(out, (i, j) => get(heads[Math.floor(j / heads[0].cols)], i, j % heads[0].cols)),
    write(i, j, heads) {
      const n = Math.floor(j / heads[0].cols);
      const column = j % heads[0].cols, of = heads[n].place ? ` of ${heads[n].place}` : "";
      return { text: heads[n].name(i, column) + of, used: [[n, i, column, "row"]] };
    },
  },
  columns: {
    compute: (out, [W], first) => fill(out, (i, j) => get(W, i, first + j)),
    write: (i, j, [W], first) => ({ text: W.name(i, first + j), used: [[0, i, first + j, "row"]] }),
  },
  rows: {
    compute: (out, [x], first) => fill(out, (i, j) => get(x, first + i, j)),
    write: (i, j, [x], first) => ({ text: `${x.name(first + i, j)} of ${x.stage}`, used: at(0, x, first + i, j, "row") }),
  },
  lse: {
    compute: (out, operands) =>
      fill(out, (_, row) => {
        const [n, i] = blockOf(operands, row);
        return get(operands[n], i, 0) + Math.log(get(operands[n + 1], i, 0));
      }),
    write(_, row, operands) {
      const [n, i] = blockOf(operands, row), [m, total] = operands.slice(n);
      return {
        text: `${said(m, i, 0)} + log ${said(total, i, 0)}`,
        used: [[n, i, 0, "row"], [n + 1, i, 0, "column"]],
      };
    },
  },
  unit: {
    compute: (out, [x]) => fill(out, (i, j) => ratio(get(x, i, j), norm(x, i))),
    write: (i, j, [x]) => ({ text: `${term(x, i, j)} / ${length(x, i)}`, used: along(0, x, i) }),
  },
  rms: {
    compute: (out, [x, gain]) =>
      fill(out, (i, j) => (get(x, i, j) / (norm(x, i) / Math.sqrt(x.cols))) * get(gain, i, j)),
    write: (i, j, [x, gain]) => ({
      text: `${term(gain, i, j)} · ${term(x, i, j)} / √((${squares(x, i)}) / ${x.cols})`,
      used: [...along(0, x, i), ...at(1, gain, i, j, "column")],
    }),
  },
  mean: {
    compute: (out, [x]) => fill(out, (i) => sum(rowOf(x, i)) / x.cols),
    write: (i, j, [x]) => ({ text: `(${joined(terms(x, i), sizes(x, i))}) / ${x.cols}`, used: along(0, x, i) }),
  },
  "mean square": {
    compute: (out, [x, mean]) =>
      fill(out, (i) => sum(rowOf(x, i).map((a) => (a - (mean ? get(mean, i, 0) : 0)) ** 2)) / x.cols),
    write(i, j, [x, mean]) {
      const middle = mean ? get(mean, i, 0) : 0;
      const square = (d) => (mean ? `(${said(x, i, d)} - ${term(mean, i, 0)})²` : `${term(x, i, d)}²`);
      const sizes = rowOf(x, i).map((a) => Math.abs(a - middle));
      return {
        text: `(${joined(range(x.cols).map(square), sizes)}) / ${x.cols}`,
        used: [...along(0, x, i), ...at(1, mean, i, 0, "other")],
      };
    },
  },
  norm: {
    compute: (out, [x, square, gain, mean, bias], epsilon) =>
      fill(out, (i, j) => {
        const a = get(x, i, j) - (mean ? get(mean, i, 0) : 0);
        return (get(gain, i, j) * a) / Math.sqrt(get(square, i, 0) + epsilon) + (bias ? get(bias, i, j) : 0);
      }),
    write(i, j, [x, square, gain, mean, bias], epsilon) {
      const a = mean ? `(${said(x, i, j)} - ${term(mean, i, 0)})` : term(x, i, j);
      const root = `√(${term(square, i, 0)} + ${short(epsilon)})`;
      return {
        text: `${term(gain, i, j)} · ${a} / ${root}` + (bias ? ` + ${term(bias, i, j)}` : ""),
        used: [
          ...at(0, x, i, j, "row"), ...at(2, gain, i, j, "column"), ...at(1, square, i, 0, "other"),
          ...at(3, mean, i, 0, "other"), ...at(4, bias, i, j, "other"),
        ],
      };
    },
  },
  activation: {
    compute: (out, [x], kind) => fill(out, (i, j) => ACTIVATIONS[kind](get(x, i, j))),
    write: (i, j, [x], kind) => ({ text: WRITTEN_ACTIVATIONS[kind](said(x, i, j)), used: at(0, x, i, j, "row") }),
  },
  rotated: {
    compute: (out, [x, cos, sin], layout) =>
      fill(out, (i, j) => {
        const pair = pairOf(j, cos.cols, layout === 1);
        if (!pair) return get(x, i, j);
        const [a, b] = pair.columns.map((d) => get(x, i, d)), c = get(cos, i, pair.n), s = get(sin, i, pair.n);
        return pair.isFirst ? a * c - b * s : b * c + a * s;
      }),
    write(i, j, [x, cos, sin], layout) {
      const pair = pairOf(j, cos.cols, layout === 1);
      if (!pair) return { fate: "not rotated", used: [[0, i, j, "row"]] };
      const [a, b] = pair.columns.map((d) => term(x, i, d));
      const c = term(cos, i, pair.n), s = term(sin, i, pair.n);
      return {
        text: pair.isFirst ? `${a}·${c} - ${b}·${s}` : `${b}·${c} + ${a}·${s}`,
        used: [...pair.columns.map((d) => [0, i, d, "row"]), [1, i, pair.n, "column"], [2, i, pair.n, "column"]],
      };
    },
  },
  sigmoid: {
    compute: (out, [x, W, bias]) => {
      OPERATIONS.product.compute(out, [x, W, bias]);
      fill(out, (i, j) => 1 / (1 + Math.exp(-get(out, i, j))));
    },
    write(i, j, operands) {
      const { text, used } = writeProduct(i, j, operands);
      return { text: `1 / (1 + exp(-(${text})))`, used };
    },
  },
  tanh: {
    compute: (out, [Q, K, bias]) =>
      fill(out, (i, j) => Math.tanh(get(Q, Math.floor(i / K.rows), j) + get(K, i % K.rows, j) + (bias ? get(bias, 0, j) : 0))),
    write(i, j, [Q, K, bias]) {
      const query = Math.floor(i / K.rows), key = i % K.rows;
      const inside = [term(Q, query, j), term(K, key, j), ...(bias ? [term(bias, 0, j)] : [])];
      return {
        text: `tanh(${inside.join(" + ")})`,
        used: [[0, query, j, "row"], [1, key, j, "column"], ...at(2, bias, 0, j, "other")],
      };
    },
  },
  pairs: {
    compute: (out, [hidden, w, K]) =>
      fill(out, (i, j) => sum(rowOf(hidden, i * K.rows + j).map((x, d) => x * w.data[d]))),
    write: (i, j, [hidden, w, K]) => ({
      text: products(range(hidden.cols), (d) => [hidden, i * K.rows + j, d], (d) => [w, 0, d]),
      used: [...along(0, hidden, i * K.rows + j), ...along(1, w, 0, "column")],
    }),
  },
  block: {
    compute(out, [Q, K], c, hidden) {
      multiply(out, Q, K, true, () => 0);
      fill(out, (i, j) => (hidden(i, j) ? -Infinity : c * get(out, i, j)));
    },
    write(i, j, [Q, K], c, hidden) {
      const { text, used } = writeDot(i, j, [Q, K]);
      if (hidden(i, j)) return { fate: "hidden by the mask", used };
      return { text: `(${text}) · ${factor(c)}`, used };
    },
  },
  "running max": {
    compute: (out, [S, old]) =>
      fill(out, (i) => Math.max(...rowOf(S, i), old ? get(old, i, 0) : -Infinity)),
    write: writeMax,
  },
  decay: {
    compute: (out, [m, old]) =>
      fill(out, (i) => Math.exp((old ? get(old, i, 0) : -Infinity) - least(get(m, i, 0)))),
    write: (i, j, [m, old]) => ({
      text: `exp(${old ? said(old, i, 0) : "-∞"} - ${term(m, i, 0)})`,
      used: [...at(1, old, i, 0, "row"), [0, i, 0, "column"]],
    }),
  },
  "running sum": {
    compute: (out, [P, a, old]) =>
      fill(out, (i) => sum(rowOf(P, i)) + (old ? get(a, i, 0) * get(old, i, 0) : 0)),
    write: (i, j, [P, a, old]) => ({
      text: (old ? `${term(a, i, 0)}·${term(old, i, 0)} + ` : "") + joined(terms(P, i), sizes(P, i)),
      used: [...along(0, P, i), ...at(1, old && a, i, 0, "other"), ...at(2, old, i, 0, "other")],
    }),
  },
  "running product": {
    compute: (out, [P, V, a, old], c, hidden) =>
      multiply(out, P, V, false, (i, j) => (old ? get(a, i, 0) * get(old, i, j) : 0), hidden),
    write(i, j, [P, V, a, old], c, hidden) {
      const { text, used } = writeProduct(i, j, [P, V], c, hidden);
      const before = old ? `${term(a, i, 0)}·${term(old, i, j)} + ` : "";
      return { text: before + text, used: [...used, ...at(2, old && a, i, 0, "other"), ...at(3, old, i, j, "other")] };
    },
  },
  normalise: {
    compute: (out, operands) =>
      fill(out, (row, j) => {
        const [n, i] = blockOf(operands, row);
        return ratio(get(operands[n], i, j), get(operands[n + 1], i, 0));
      }),
    write(row, j, operands) {
      const [n, i] = blockOf(operands, row);
      const text = `${term(operands[n], i, j)} / ${term(operands[n + 1], i, 0)}`;
      return shared({ text, used: [[n, i, j, "row"], [n + 1, i, 0, "column"]] }, get(operands[n + 1], i, 0));
    },
  },
};
