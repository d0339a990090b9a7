"use strict";
const DATA = JSON.parse(document.getElementById("data").textContent);
const WALK = DATA.walk, EXPLAINED = DATA.explanation;
const byId = (id) => document.getElementById(id);

// ---------------------------------------------------------------- inputs

const TENSORS = { q: 0, k: 1, v: 2, dout: 3 };

// The same integers as walk.draw: multiples of 1/64 in [-2, 2).
function draw(name, row, width) {
  const values = new Array(width);
  for (let c = 0; c < width; c++) {
    let x = (row * width + c + TENSORS[name] * 268435456) >>> 0;
    x = Math.imul(x ^ (x >>> 16), 0x45d9f3b) >>> 0;
    x = Math.imul(x ^ (x >>> 16), 0x45d9f3b) >>> 0;
    values[c] = (((x ^ (x >>> 16)) & 255) - 128) / 64;
  }
  return values;
}
const dot = (a, b) => a.reduce((sum, x, i) => sum + x * b[i], 0);
const SCALE = 1 / Math.sqrt(WALK.D);

function visibleKeys(row, low, high) {
  const keys = [];
  for (const [start, stop] of WALK.traced[row].runs)
    for (let n = Math.max(start, low); n < Math.min(stop, high); n++) keys.push(n);
  return keys;
}

// ---------------------------------------------------------------- words

const UNITS = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]];
function writeSize(count) {
  for (const [unit, size] of UNITS) if (count >= size) return `${digits(count / size)} ${unit}`;
  return `${Math.round(count)} B`;
}
const digits = (x) => (x >= 100 || Number.isInteger(x) ? x.toFixed(0) : x.toPrecision(3));
function number(x) {
  if (x === -Infinity) return "−∞";
  return x.toFixed(6).replace("-", "−");
}
const list = (values) => `[${values.map(number).join(", ")}]`;
const escapeText = (text) => text.replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);

// ---------------------------------------------------------------- the walk

// The state of one row: maximum, sum, numerator, and in the backward what dQ has so far.
function freshRow(row) {
  const found = WALK.traced[row];
  return {
    row, q: draw("q", row, WALK.D), dout: draw("dout", row, WALK.E),
    max: -Infinity, sum: 0, acc: new Array(WALK.E).fill(0), rescale: 1, seen: 0,
    lse: found.lse === null ? -Infinity : found.lse, delta: dot(draw("dout", row, WALK.E), found.out),
    dq: new Array(WALK.D).fill(0), weight: 0,
  };
}

function forwardStep(state, keys) {
  const scores = keys.map((n) => SCALE * dot(state.q, draw("k", n, WALK.D)));
  const top = scores.reduce((a, b) => Math.max(a, b), state.max);
  state.rescale = state.max === -Infinity ? 0 : Math.exp(state.max - top);
  state.sum *= state.rescale;
  state.acc = state.acc.map((x) => x * state.rescale);
  keys.forEach((n, i) => {
    const p = Math.exp(scores[i] - top), v = draw("v", n, WALK.E);
    state.sum += p;
    state.acc = state.acc.map((x, c) => x + p * v[c]);
  });
  state.max = top;
  state.seen += keys.length;
}

function backwardStep(state, keys) {
  for (const n of keys) {
    const k = draw("k", n, WALK.D);
    const p = Math.exp(SCALE * dot(state.q, k) - state.lse);
    const ds = p * (dot(state.dout, draw("v", n, WALK.E)) - state.delta);
    state.weight += p;
    state.dq = state.dq.map((x, c) => x + SCALE * ds * k[c]);
  }
  state.seen += keys.length;
}

function finished(state) {
  const out = state.acc.map((x) => (state.sum > 0 ? x / state.sum : 0));
  const lse = state.sum > 0 ? state.max + Math.log(state.sum) : -Infinity;
  return { out, lse };
}

const largest = (a, b) => a.reduce((most, x, i) => Math.max(most, Math.abs(x - b[i])), 0);

class Walk {
  constructor(pass) {
    this.pass = pass;
    this.isForward = pass.title.startsWith("Forward");
    this.ownsRows = pass.owner === "rows";
    this.steps = [];
    pass.visits.forEach(([owner, cells], index) => {
      if (!cells.length) this.steps.push({ index, owner, cell: null, isFirst: true, isLast: true });
      cells.forEach((cell, i) => this.steps.push({
        index, owner, cell, isFirst: i === 0, isLast: i === cells.length - 1,
      }));
    });
    this.restart();
  }
  restart() {
    this.at = 0;
    this.done = new Set();
    this.rows = {};
    this.state = null;
    this.current = null;
    this.bytes = { asked: 0, chip: 0, plain: 0 };
    this.checks = { count: 0, worst: 0, rows: {} };
    this.blocks = 0;
  }
  get isOver() { return this.at >= this.steps.length; }
  extent(edges, i) { return edges[i + 1] - edges[i]; }
  stateOf(x) {
    const row = this.pass.rows[x + 1] - 1;
    return (this.rows[row] ??= freshRow(row));
  }
  step() {
    const step = this.steps[this.at++], pass = this.pass;
    const item = WALK.itemsize, D = WALK.head_dim, E = WALK.value_dim;
    if (step.isFirst) this.begin(step);
    if (step.cell !== null) {
      const [x, y] = this.ownsRows ? [step.owner, step.cell] : [step.cell, step.owner];
      const state = this.stateOf(x);
      const keys = visibleKeys(state.row, pass.keys[y], pass.keys[y + 1]);
      if (keys.length) (this.isForward ? forwardStep : backwardStep)(state, keys);
      this.state = state;
      this.current = [x, y, keys.length];
      this.done.add(y * 4096 + x);
      const height = this.extent(pass.rows, x), width = this.extent(pass.keys, y);
      const again = this.ownsRows ? pass.row_tiles[x] : Math.ceil(width / pass.block_n);
      // dQ that is added up goes out with every tile, in fp32.
      const added = pass.adds_dq ? height * D * 4 : 0;
      const rowBytes = this.ownsRows ? width * (D + E) * item : height * ((D + E) * item + 16) + added;
      this.bytes.asked += again * rowBytes;
      this.bytes.chip += height * width * (4 + item);
    } else if (this.ownsRows) {
      this.state = this.stateOf(step.owner);
      this.current = null;
    }
    if (step.isLast) this.finish(step);
  }
  begin(step) {
    const item = WALK.itemsize, both = WALK.head_dim + WALK.value_dim;
    if (this.ownsRows) {
      const height = this.extent(this.pass.rows, step.owner);
      this.bytes.asked += height * (this.isForward ? WALK.head_dim * item : both * item + 16);
    } else this.bytes.asked += this.extent(this.pass.keys, step.owner) * both * item;
  }
  finish(step) {
    this.blocks++;
    const item = WALK.itemsize, pass = this.pass;
    const edges = this.ownsRows ? pass.rows : pass.keys;
    const size = this.extent(edges, step.owner);
    const E = WALK.value_dim, D = WALK.head_dim;
    const written = this.ownsRows ? (this.isForward ? E * item + 4 : D * item) : (D + E) * item;
    this.bytes.asked += size * written;
    // Every score of these rows or keys, written and read: S and P, or P, dP and dS.
    const other = this.ownsRows ? WALK.N : WALK.M;
    const times = this.isForward ? 4 : this.ownsRows ? 3 : 4;
    this.bytes.plain += times * size * other * item;
    if (this.ownsRows) this.check(this.stateOf(step.owner));
    // What is added up over all owners is whole at the end.
    else if (pass.adds_dq && this.isOver) pass.rows.slice(1).forEach((_, x) => this.check(this.stateOf(x)));
  }
  check(state) {
    const known = WALK.traced[state.row];
    let error, got;
    if (this.isForward) {
      got = finished(state);
      const lse = known.lse === null ? -Infinity : known.lse;
      error = Math.max(largest(got.out, known.out), got.lse === lse ? 0 : Math.abs(got.lse - lse));
    } else {
      got = { dq: state.dq };
      error = largest(state.dq, known.dq);
    }
    this.checks.count++;
    this.checks.worst = Math.max(this.checks.worst, error);
    this.checks.rows[state.row] = got;
  }
  // What a screen reader is told, and the words under the grid.
  words() {
    if (this.isOver) return `Done: ${this.done.size} cells in ${this.blocks} blocks.`;
    if (!this.at) return `${this.steps.length} steps, in the kernel's order.`;
    if (!this.current) return "A block that visits nothing.";
    const [x, y, seen] = this.current, p = this.pass;
    return `Queries ${p.rows[x]} to ${p.rows[x + 1] - 1}, keys ${p.keys[y]} to ${p.keys[y + 1] - 1}: `
      + `step ${this.at} of ${this.steps.length}; row ${this.state.row} sees ${seen} of these keys.`;
  }
}

// ---------------------------------------------------------------- what is shown

const passes = WALK.passes.map((pass) => new Walk(pass));
let walk = passes[0], timer = null;
const canvas = byId("grid"), context = canvas.getContext("2d");
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

function drawGrid() {
  const { rows, keys, kinds } = walk.pass;
  const size = Math.max(64, Math.round((canvas.clientWidth || 512) * (window.devicePixelRatio || 1)));
  canvas.width = canvas.height = size;
  const [x0, y0] = [size / WALK.N, size / WALK.M];
  const paint = { 0: colour("skip"), 1: colour("partial"), 2: colour("full") };
  const done = { 1: colour("done-partial"), 2: colour("done") };
  context.fillStyle = colour("panel");
  context.fillRect(0, 0, size, size);
  for (let x = 0; x < rows.length - 1; x++) for (let y = 0; y < keys.length - 1; y++) {
    const kind = +kinds[x][y];
    const isDone = walk.done.has(y * 4096 + x);
    context.fillStyle = isDone ? done[kind] : paint[kind];
    const left = Math.round(keys[y] * x0), top = Math.round(rows[x] * y0);
    const width = Math.max(1, Math.round(keys[y + 1] * x0) - left - 1);
    const height = Math.max(1, Math.round(rows[x + 1] * y0) - top - 1);
    context.fillRect(left, top, width, height);
  }
  if (walk.current && !walk.isOver) {
    const [x, y] = walk.current;
    context.strokeStyle = context.fillStyle = colour("now");
    context.lineWidth = 3;
    const left = keys[y] * x0, top = rows[x] * y0;
    context.fillRect(left, top, (keys[y + 1] - keys[y]) * x0, (rows[x + 1] - rows[x]) * y0);
    context.strokeRect(left - 2, top - 2, (keys[y + 1] - keys[y]) * x0 + 3, (rows[x + 1] - rows[x]) * y0 + 3);
  }
}

const FORMULAS = {
  forward: "m′ = max(m, max S) &nbsp; r = e<sup>m − m′</sup><br>ℓ′ = r ℓ + Σ e<sup>S − m′</sup>"
    + " &nbsp; O′ = r O + e<sup>S − m′</sup> V<br>at the end: out = O / ℓ, LSE = m + ln ℓ",
  rows: "P = e<sup>S − LSE</sup> &nbsp; dP = dO Vᵀ<br>dS = P (dP − δ) &nbsp; dQ′ = dQ + scale · dS K",
  keys: "P = e<sup>S − LSE</sup> &nbsp; dV′ = dV + Pᵀ dO<br>dS = P (dP − δ) &nbsp; dK′ = dK + scale · dSᵀ Q",
};

function showState() {
  const state = walk.state, rows = [];
  const kind = walk.isForward ? "forward" : walk.pass.owner;
  byId("formula").innerHTML = FORMULAS[kind];
  if (!state) rows.push(["row", "none yet"]);
  else if (walk.isForward) {
    rows.push(["query row", state.row], ["keys seen", state.seen], ["running max m", number(state.max)],
      ["rescale factor r", number(state.rescale)], ["running sum ℓ", number(state.sum)],
      ["numerator O", list(state.acc)]);
  } else {
    rows.push(["query row", state.row], ["keys seen", state.seen], ["LSE", number(state.lse)],
      ["δ", number(state.delta)], ["P so far adds up to", number(state.weight)]);
    if (walk.ownsRows || walk.pass.adds_dq) rows.push(["dQ so far", list(state.dq)]);
  }
  byId("numbers").innerHTML = rows
    .map(([name, value]) => `<dt>${name}</dt><dd>${value}</dd>`).join("");
  const { count, worst } = walk.checks, verdict = byId("library");
  const isWell = worst < 1e-9;
  verdict.classList.toggle("bad", !isWell);
  verdict.textContent = !count ? "" : isWell
    ? `${count} of ${walk.pass.rows.length - 1} rows done: all equal the library’s result (largest difference ${worst.toExponential(1)}).`
    : `A row differs from the library’s result by ${worst.toExponential(1)}.`;
}

function showBytes() {
  const { asked, chip, plain } = walk.bytes, most = Math.max(asked, chip, plain, 1);
  const meter = (kind, name, value) => `<div class="meter ${kind}">${name}<b>${writeSize(value)}</b>`
    + `<span aria-hidden="true"><i style="width:${(100 * value) / most}%"></i></span></div>`;
  byId("bytes").innerHTML = meter("", "asked of L2 and device memory, by tiles", asked)
    + meter("chip", "scores that stayed on chip", chip)
    + meter("plain", "scores that plain attention carries through device memory", plain);
}

function show() {
  drawGrid();
  showState();
  showBytes();
  const p = walk.pass, cell = p.is_merged ? "; each cell stands for several tiles" : "";
  byId("grid-caption").textContent = `${p.title}. Kernel ${p.kernel}, tiles of ${p.block_m} queries × `
    + `${p.block_n} keys, queries down, keys across${cell}.`;
  byId("grid-words").textContent = walk.words();
}

function pause() {
  clearTimeout(timer);
  timer = null;
  byId("play").textContent = "Play";
  byId("live").textContent = walk.words();
}
function tick() {
  const speed = +byId("speed").value;
  for (let i = 0; i < [1, 1, 1, 2, 6, 20, 80][speed] && !walk.isOver; i++) walk.step();
  show();
  if (walk.isOver) pause();
  else timer = setTimeout(tick, [700, 250, 90, 60, 40, 40, 40][speed]);
}
function play() {
  if (timer !== null) return pause();
  if (walk.isOver) walk.restart();
  byId("play").textContent = "Pause";
  tick();
}
function advance(isEnough) {
  pause();
  while (!walk.isOver) {
    walk.step();
    if (isEnough(walk.steps[walk.at - 1])) break;
  }
  show();
  byId("live").textContent = walk.words();
}
byId("play").onclick = play;
byId("step").onclick = () => advance(() => true);
byId("row").onclick = () => advance((step) => step.isLast);
// In slices, so that a page of a million keys can still be paused.
function toEnd() {
  pause();
  const until = performance.now() + 150;
  while (!walk.isOver && performance.now() < until) walk.step();
  show();
  if (!walk.isOver) timer = setTimeout(toEnd, 0);
  else byId("live").textContent = walk.words();
}
byId("end").onclick = toEnd;
byId("restart").onclick = () => { pause(); walk.restart(); show(); };
byId("pass").innerHTML = passes.map((w, i) => `<option value="${i}">${escapeText(w.pass.title)}</option>`).join("");
byId("pass").onchange = (event) => { pause(); walk = passes[+event.target.value]; show(); };
byId("panel-walk").addEventListener("keydown", (event) => {
  if (event.target.matches("button, select, input")) return;
  const actions = { " ": play, ArrowRight: byId("step").onclick, ArrowDown: byId("row").onclick,
    End: byId("end").onclick, Home: byId("restart").onclick };
  if (!actions[event.key]) return;
  event.preventDefault();
  actions[event.key]();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => show());
addEventListener("resize", drawGrid);

// ---------------------------------------------------------------- tabs

const tabs = [...document.querySelectorAll('[role="tab"]')];
function select(tab) {
  for (const other of tabs) {
    const isIt = other === tab;
    other.setAttribute("aria-selected", isIt);
    other.tabIndex = isIt ? 0 : -1;
    byId(other.getAttribute("aria-controls")).hidden = !isIt;
  }
}
tabs.forEach((tab, i) => {
  tab.onclick = () => { select(tab); history.replaceState(null, "", `#${tab.id.slice(4)}`); };
  tab.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!move) return;
    const next = tabs[(i + move + tabs.length) % tabs.length];
    select(next);
    next.focus();
  });
});
const asked = byId(`tab-${location.hash.slice(1)}`);
if (asked) select(asked);

// ---------------------------------------------------------------- roofline

// As wide as a phone, so that words stay as large as they are.
const plotWidth = () => Math.max(320, Math.min(760, document.documentElement.clientWidth - 60));

function drawRoofline() {
  const gpu = EXPLAINED.gpu, W = plotWidth(), H = 400, L = 52, B = 48, R = 28;
  const points = [];
  for (const direction of ["forward", "backward"]) for (const kind of ["plain", "tiled"]) {
    const x = EXPLAINED[direction][kind];
    if (!x) continue;
    points.push([x.flops_per_byte, x.flops / x.at_best_us / 1e6, `${kind} ${direction}`, kind, "at best"]);
    const measured = EXPLAINED[direction].measured_us;
    if (kind === "tiled" && measured)
      points.push([x.flops_per_byte, x.flops / measured / 1e6, `${direction} here`, "measured", "measured"]);
  }
  const low = Math.min(1, ...points.map((p) => p[0])) / 2, high = Math.max(10000, ...points.map((p) => p[0] * 3));
  const top = gpu.matrix_tflops * 5, bottom = top / 4000;
  const X = (v) => L + ((Math.log(v) - Math.log(low)) / (Math.log(high) - Math.log(low))) * (W - L - R);
  const Y = (v) => 12 + ((Math.log(top) - Math.log(Math.max(v, bottom))) / (Math.log(top) - Math.log(bottom))) * (H - B - 12);
  const ridge = gpu.ridge_flops_per_byte, parts = [];
  for (let p = Math.ceil(Math.log10(low)); p <= Math.log10(high); p++)
    parts.push(`<line x1="${X(10 ** p)}" y1="12" x2="${X(10 ** p)}" y2="${H - B}" stroke="var(--line)"/>`
      + `<text class="muted" font-size="12" text-anchor="middle" x="${X(10 ** p)}" y="${H - B + 16}">${10 ** p}</text>`);
  for (let p = Math.ceil(Math.log10(bottom)); p <= Math.log10(top); p++)
    parts.push(`<line x1="${L}" y1="${Y(10 ** p)}" x2="${W - R}" y2="${Y(10 ** p)}" stroke="var(--line)"/>`
      + `<text class="muted" font-size="12" text-anchor="end" x="${L - 8}" y="${Y(10 ** p) + 4}">${10 ** p}</text>`);
  parts.push(`<polyline fill="none" stroke="var(--ink)" stroke-width="2" points="${X(low)},${Y(low * gpu.memory_tbps)} ${X(ridge)},${Y(gpu.matrix_tflops)} ${X(high)},${Y(gpu.matrix_tflops)}"/>`);
  const step = EXPLAINED.forward.tiled?.steps[0];
  if (step) {
    const roof = (gpu.exps_t * step.flops) / step.exps;
    parts.push(`<line x1="${X(Math.max(low, roof / gpu.memory_tbps))}" y1="${Y(roof)}" x2="${W - R}" y2="${Y(roof)}" stroke="var(--softmax)" stroke-width="2" stroke-dasharray="6 4"/>`
      + `<text font-size="12" x="${L + 8}" y="${Y(roof) + 4}">exponentials allow ${digits(roof)} TFLOP/s (forward)</text>`);
  }
  parts.push(`<text font-size="12" text-anchor="end" x="${W - R}" y="${Y(gpu.matrix_tflops) - 10}">matrix units ${digits(gpu.matrix_tflops)} TFLOP/s</text>`);
  points.forEach(([x, y, name, kind]) => {
    const fill = { plain: "var(--softmax)", tiled: "var(--matrix)", measured: "var(--good)" }[kind];
    // The two of a kind lie close together: one name to each side, clear of the roof.
    const isSecond = name.includes("backward");
    const dy = kind === "plain" ? (isSecond ? 44 : 20) : kind === "tiled" ? (isSecond ? 42 : 24) : 60;
    const anchor = kind === "plain" ? "start" : "middle";
    parts.push(`<circle cx="${X(x)}" cy="${Y(y)}" r="6" fill="${fill}" stroke="var(--paper)" stroke-width="2"/>`
      + `<text font-size="13" x="${X(x) + (kind === "plain" ? 14 : 0)}" y="${Y(y) + dy}" text-anchor="${anchor}">${name}</text>`);
  });
  parts.push(`<text class="muted" font-size="12" text-anchor="middle" x="${(L + W) / 2}" y="${H - 8}">FLOP for each byte of device memory</text>`
    + `<text class="muted" font-size="12" x="4" y="10">TFLOP/s</text>`);
  const said = points.map(([x, y, name, , how]) => `${name}: ${digits(x)} FLOP per byte, ${digits(y)} TFLOP/s ${how}`).join("; ");
  byId("roofline-plot").innerHTML = `<svg viewBox="0 0 ${W} ${H}" role="img" aria-label="Roofline. ${said}">${parts.join("")}</svg>`
    + `<p class="notes">${said}.</p>`;
}

// ---------------------------------------------------------------- generations

function drawGenerations() {
  const units = ["memory", "matrix", "softmax"], W = plotWidth(), row = 26, L = 70;
  // The first is so much longer that the others would be specks at its scale.
  const [first, ...later] = DATA.generations.map((g) => g.microseconds);
  const most = Math.max(...later);
  byId("generations-plot").innerHTML = DATA.generations.map((g, number) => {
    const longest = number ? most : Math.max(first, most);
    const bars = g.bars.map(([unit, start, stop, what, owner]) => {
      const x = L + (start / longest) * (W - L - 4), width = Math.max(1, ((stop - start) / longest) * (W - L - 4) - 1);
      return `<rect x="${x}" y="${units.indexOf(unit) * row + 3}" width="${width}" height="${row - 7}" rx="2" fill="var(--${unit})" opacity="${owner % 2 ? 0.55 : 1}"><title>tile ${owner + 1}: ${what}</title></rect>`;
    });
    const names = units.map((u, i) => `<text class="muted" font-size="12" x="0" y="${i * row + 18}">${u}</text>`);
    const rows = [["loops", g.loop], ["work", g.work], ["rescales", g.rescales], ["overlaps", g.overlap],
      ["asked of memory", `${writeSize(g.asked_bytes_per_head)} a head`],
      ["these tiles", `${digits(g.microseconds)} µs on one multiprocessor, by this model`]];
    if (!number && first > most) rows.push(["scale", `drawn ${digits(first / most)} times smaller than the others`]);
    return `<div class="generation"><h3>${g.name} (${g.year})</h3><dl>`
      + rows.map(([name, value]) => `<dt>${name}</dt><dd>${escapeText(value)}</dd>`).join("")
      + `</dl><svg viewBox="0 0 ${W} ${units.length * row}" role="img" aria-label="Timeline of ${g.name}: ${digits(g.microseconds)} microseconds for ${g.bars.length} pieces of work">${names.join("")}${bars.join("")}</svg></div>`;
  }).join("");
}

drawRoofline();
drawGenerations();
show();
