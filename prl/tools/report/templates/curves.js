"use strict";
// All text of a run gets onto the page by textContent; nothing here makes markup from data.
const $ = id => document.getElementById(id);
const data = JSON.parse($("data").textContent);

function el(tag, cls, text) {
  const made = document.createElement(tag);
  if (cls) made.className = cls;
  if (text !== undefined) made.textContent = text;
  return made;
}

function number(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  const text = size >= 1e6 || size < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(digits)));
  return text.replace("-", "−");
}

// --- which panels there are: `data.kinds` says it, from metrics that are {name: [steps, values]} ------------------------

const patterns = new Map(data.kinds.map(kind => [kind, typeof kind.curves === "string" ? new RegExp(`^(?:${kind.curves})$`) : null]));
const placed = new Map();  // metric -> the kinds that show it, each with the name of the curve

function placesOf(key) {
  if (!placed.has(key)) {
    placed.set(key, data.kinds.flatMap(kind => {
      const pattern = patterns.get(kind), match = pattern && key.match(pattern);
      if (pattern) return match ? [{ kind, name: match.slice(1).join(" ") }] : [];
      return Object.entries(kind.curves).filter(([, metric]) => metric === key).map(([name]) => ({ kind, name }));
    }));
  }
  return placed.get(key);
}

function curvesOf(kind, keys) {
  const found = [...keys].flatMap(key => placesOf(key).filter(place => place.kind === kind).map(({ name }) => ({ name, key })));
  if (!patterns.get(kind)) return Object.keys(kind.curves).flatMap(name => found.filter(curve => curve.name === name));
  const others = found.filter(curve => curve.name !== "all");  // what all envs have together, where there are several
  return others.length === 1 ? others : [...others, ...found.filter(curve => curve.name === "all")];
}

function isZero(values) { return values.every(value => !value); }

// The panels of one run. Most have nothing to show where their curves are zero throughout. `before`: its source's metrics.
// `compared`: the steps before and after its reward fell.
function panelsOf(metrics, before = {}, compared = []) {
  return data.kinds.flatMap(kind => {
    const named = curvesOf(kind, Object.keys(metrics)), nonzero = named.filter(({ key }) => !isZero(metrics[key][1]));
    if (!nonzero.length && !(named.length && kind.shows_zeros)) return [];
    const curves = (kind.only_nonzero && nonzero.length ? nonzero : named).map(({ name, key }) => ({
      name, ...signed(kind, metrics[key]), before: before[key] && signed(kind, before[key]),
    }));
    return [{ title: kind.title, unit: kind.unit, kind, curves: () => curves, fell: compared.at(-1), begins: curves.some(curve => curve.before) }];
  });
}

function signed(kind, [xs, ys]) { return { xs, ys: kind.sign === -1 ? ys.map(value => -value) : ys }; }

// --- drawing ----------------------------------------------------------------------------------------------------------

const WIDTH = 400, HIGH = 200, LEFT = 48, RIGHT = 394, TOP = 8, BOTTOM = 174;
const POINTS = 400;  // most points of a drawn curve
const SMOOTH_FROM = 30;  // curves of so many points are drawn faint, with a running mean over a 25th of them on top
const DASHES = ["", "8 2 2 2", "2 2"], UNFINISHED = "6 4";

function svg(tag, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function nearest(xs, x) {
  let low = 0, high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle; else high = middle;
  }
  return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
}

function thinned(count) {  // places of so many points that are drawn, the last among them
  const every = Math.floor(count / POINTS) + 1, places = [];
  for (let place = (count - 1) % every; place < count; place += every) places.push(place);
  return places;
}

function smoothed(values) {  // the values at the places that are drawn
  const places = thinned(values.length);
  if (values.length < SMOOTH_FROM) return places.map(place => values[place]);
  const window = Math.max(2, Math.floor(values.length / 25)), sums = new Float64Array(values.length + 1);
  values.forEach((value, place) => { sums[place + 1] = sums[place] + value; });
  return places.map(place => {
    const from = Math.max(0, place - (window >> 1)), to = Math.min(values.length, place - (window >> 1) + window);
    return (sums[to] - sums[from]) / (to - from);
  });
}

function stepsOf(low, high, most) {  // round numbers between low and high
  const rough = (high - low) / most, size = 10 ** Math.floor(Math.log10(rough));
  const step = size * [1, 2, 2.5, 5, 10].find(factor => size * factor >= rough * (1 - 1e-9));
  const found = [];
  for (let place = Math.ceil(low / step - 1e-9); place * step <= high + 1e-9 * step; place++) found.push(place * step);
  return found;
}

function extent(values, low = Infinity, high = -Infinity) {  // Math.min(...values) has a limit
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return [low, high];
}

function verticalOf(panel, values) {  // {low, high, log, ticks} of the y axis
  const { zero, options } = panel.kind;
  let [low, high] = values.length ? extent(values) : [0, 1];
  if (options?.log && low > 0) {
    [low, high] = [Math.log10(low), Math.log10(high)];
    const margin = 0.05 * (high - low) || 0.5, powers = [];
    [low, high] = [low - margin, high + margin];
    const every = Math.max(1, Math.ceil((Math.floor(high) - Math.ceil(low)) / 4));
    for (let power = Math.ceil(low); power <= high; power += every) powers.push(power);
    const ticks = powers.length > 1 ? powers : stepsOf(10 ** low, 10 ** high, 4).filter(value => value > 0).map(Math.log10);
    return { low, high, log: true, ticks };
  }
  if (zero) {
    const sorted = options?.peaks && values.length >= SMOOTH_FROM ? Float64Array.from(values).sort() : [];
    const most = sorted.length ? sorted[Math.floor(0.97 * (sorted.length - 1))] : 0;
    const cut = most > 0 && 4 * most < high;  // a few peaks, such as the first step's, would flatten all the rest
    [low, high] = [Math.min(0, low), cut ? 1.3 * most : high > 0 ? high * 1.05 : 1];
    return { low, high, cut, ticks: stepsOf(low, high, 4) };
  }
  const margin = 0.05 * (high - low) || 0.5 * Math.abs(high) || 0.5;
  return { low: low - margin, high: high + margin, ticks: stepsOf(low - margin, high + margin, 4) };
}

const sight = new IntersectionObserver(entries => {
  for (const { target, isIntersecting } of entries) target.chart.seen(isIntersecting);
}, { rootMargin: "400px" });

const waiting = new Set();  // charts in sight that are to be drawn: as many a frame as leave the page quick

function drawSome() {
  const began = performance.now();
  for (const chart of waiting) {
    if (performance.now() - began > 12) { requestAnimationFrame(drawSome); return; }
    waiting.delete(chart);
    if (chart.visible) chart.draw();
  }
}

// A panel: {title, unit, kind, fell, curves: () => [{name, place (of its colour), unfinished, xs, ys, band: {low, high}, thin: [{xs, ys}], before: {xs, ys}}]}.
class Chart {
  constructor() {
    this.figure = el("figure", "panel");
    this.caption = el("figcaption");
    this.box = el("div", "chart");
    this.legend = el("div", "legend");
    this.cursor = el("div", "cursor");
    this.at = -1;
    this.figure.chart = this;
    this.figure.append(this.caption, this.box, this.legend);
    this.box.tabIndex = 0;
    this.box.setAttribute("role", "img");
    this.cursor.hidden = true;
    this.box.addEventListener("pointermove", event => {
      const box = this.box.getBoundingClientRect(), x = (event.clientX - box.left) / box.width * WIDTH;
      this.show(nearest(this.steps, this.from + (this.to - this.from) * (x - LEFT) / (RIGHT - LEFT)));
    });
    const hide = () => this.show(this.steps.length - 1, false);  // the newest values, unless another step is pointed at
    this.box.addEventListener("pointerleave", hide);
    this.box.addEventListener("focus", () => this.draw());
    this.box.addEventListener("blur", hide);
    this.box.addEventListener("keydown", event => {
      const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (by) { this.show(this.at + by); event.preventDefault(); }
    });
    sight.observe(this.figure);
  }

  seen(visible) {
    this.visible = visible;
    if (!visible || !this.panel) return;
    if (!waiting.size) requestAnimationFrame(drawSome);
    waiting.add(this);
  }

  update(panel) {
    this.panel = panel;
    this.caption.replaceChildren(`${panel.title} `, el("span", "dim", panel.unit));
    this.seen(this.visible);
  }

  get curves() {
    if (this.known !== this.panel) this.take();
    return this.taken;
  }

  take() {  // compute the curves, which takes time where they are means of many
    const { panel } = this, curves = panel.curves();
    [this.known, this.taken] = [panel, curves];
    const names = curves.map(({ name, place }) => `${name} ${place}`).join("\n"), follows = this.cursor.hidden;
    if (names !== this.names) {
      this.names = names;
      this.legend.replaceChildren(el("span", "at"), ...curves.map(({ name, place }, at) => {
        const entry = el("span");
        const look = place ?? at;
        entry.append(el("i", `s${look % 8} d${Math.floor(look / 8) % 3}`), `${name} `, el("b"));
        return entry;
      }));
    }
    const ends = curves.slice(0, 8).filter(curve => curve.ys.length).map(({ name, ys }) => `${name} ${number(ys[0], 3)} to ${number(ys.at(-1), 3)}`);
    this.box.setAttribute("aria-label", `${panel.title}, ${panel.unit}: ${ends.join(", ")}`);
    this.steps = [...new Set(curves.flatMap(curve => curve.xs))].sort((a, b) => a - b);
    const [first, last] = extent(curves.flatMap(curve => curve.before ? [curve.before.xs[0]] : []), ...extent(this.steps));
    const margin = 0.015 * (last - first) || 0.5;
    [this.from, this.to] = [first - margin, last + margin];
    this.show(follows ? this.steps.length - 1 : this.at, !follows);
  }

  show(place, pointed = true) {
    const { curves } = this;
    this.at = Math.max(0, Math.min(this.steps.length - 1, place));
    const x = this.steps[this.at], share = (this.x(x) / WIDTH * 100).toFixed(3);
    this.cursor.hidden = !pointed;
    this.cursor.style.left = `${share}%`;
    this.legend.querySelector(".at").textContent = `step ${number(x, 7)}`;
    const outputs = this.legend.querySelectorAll("b");
    curves.forEach(({ xs, ys, band }, index) => {
      const found = !xs.length ? -1 : pointed ? nearest(xs, x) : xs.length - 1;
      const close = found >= 0 && (!pointed || Math.abs(xs[found] - x) <= (this.to - this.from) / 100 + 0.5);
      const earlier = close && !pointed && xs[found] < x ? ` (step ${number(xs[found], 7)})` : "";
      const range = close && band && band.low[found] !== band.high[found] ? ` (${number(band.low[found], 3)} to ${number(band.high[found], 3)})` : "";
      outputs[index].textContent = close ? number(ys[found], 3) + range + earlier : "–";
    });
  }

  x(step) { return LEFT + (RIGHT - LEFT) * (step - this.from) / (this.to - this.from); }

  draw() {
    const { panel, curves } = this, drawn = svg("svg", { viewBox: `0 0 ${WIDTH} ${HIGH}`, "aria-hidden": "true" });
    const axis = verticalOf(panel, curves.flatMap(({ ys, before, band }) => [before?.ys || [], ...(band ? [ys, band.low, band.high].map(smoothed) : [ys])]).flat());
    const y = value => BOTTOM - (BOTTOM - TOP) * ((axis.log ? Math.log10(value) : value) - axis.low) / (axis.high - axis.low);
    const point = (step, value) => `${this.x(step).toFixed(1)} ${Math.max(-900, Math.min(900, y(value))).toFixed(1)}`;
    const path = (xs, ys) => thinned(xs.length).map(place => point(xs[place], ys[place]));
    const smooth = (xs, ys) => { const means = smoothed(ys); return thinned(xs.length).map((place, at) => point(xs[place], means[at])); };
    const inside = svg("svg", { x: LEFT, y: 0, width: WIDTH - LEFT, height: BOTTOM + 1, viewBox: `${LEFT} 0 ${WIDTH - LEFT} ${BOTTOM + 1}` });  // it cuts peaks off
    for (const tick of axis.ticks) {
      const at = (BOTTOM - (BOTTOM - TOP) * (tick - axis.low) / (axis.high - axis.low)).toFixed(1);
      const text = axis.log ? tick : Math.abs(tick) < 1e-12 ? 0 : tick;
      drawn.append(svg("path", { d: `M${LEFT} ${at}H${RIGHT}`, class: "grid" }), svg("text", { x: LEFT - 6, y: Number(at) + 4, "text-anchor": "end" }, number(axis.log ? 10 ** text : text, 3).replace(".00e", "e")));
    }
    for (const tick of stepsOf(this.from, this.to, 5).filter(Number.isInteger)) {
      drawn.append(svg("text", { x: this.x(tick).toFixed(1), y: BOTTOM + 17, "text-anchor": "middle" }, number(tick, 7)));
    }
    drawn.append(svg("path", { d: `M${LEFT} ${BOTTOM}H${RIGHT}`, class: "grid" }), inside);
    if (panel.fell !== undefined) inside.append(svg("path", { d: `M${this.x(panel.fell)} ${TOP}V${BOTTOM}`, class: "fell" }));
    curves.forEach((curve, at) => {
      const place = curve.place ?? at;
      const dash = curve.unfinished ? UNFINISHED : DASHES[Math.floor(place / 8) % 3];
      const line = (points, look, dashes = "") => inside.append(svg("path", { d: `M${points.join("L")}`, class: `line s${place % 8} ${look}`, "stroke-dasharray": dashes }));
      if (curve.band) {
        const { low, high } = curve.band, points = [...smooth(curve.xs, high), ...smooth(curve.xs, low).reverse()];
        inside.append(svg("path", { d: `M${points.join("L")}Z`, class: `band s${place % 8}` }));
      } else if (curve.ys.length >= SMOOTH_FROM && curves.length <= 8) {  // of more, nobody sees what lies below what
        line(path(curve.xs, curve.ys), "faint");
      }
      for (const { xs, ys } of curve.thin || []) line(smooth(xs, ys), "thin", dash);
      if (curve.before) line(smooth(curve.before.xs, curve.before.ys), "before");
      const points = smooth(curve.xs, curve.ys);
      line(points, "", dash);
      if (points.length <= 12) for (const point of points) line([point, point], "dot");
    });
    this.box.replaceChildren(drawn, this.cursor);
    this.caption.lastChild.textContent = panel.unit + (axis.cut ? ", peaks cut off" : "");
  }
}

const charts = new Map();

function showPanels(panels) {
  const titles = panels.map(panel => panel.title);
  for (const title of charts.keys()) if (!titles.includes(title)) charts.delete(title);
  for (const panel of panels) {
    if (!charts.has(panel.title)) charts.set(panel.title, new Chart());
    charts.get(panel.title).update(panel);
  }
  const figures = titles.map(title => charts.get(title).figure), box = $("panels");
  if (figures.length !== box.children.length || figures.some((figure, place) => figure !== box.children[place])) box.replaceChildren(...figures);
  $("curves").hidden = !panels.length;
  if ($("of-source")) $("of-source").hidden = !panels.some(panel => panel.begins);
  if ($("at-fall")) $("at-fall").hidden = !panels.some(panel => panel.fell !== undefined);
}
