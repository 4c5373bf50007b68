"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const $ = id => document.getElementById(id);
const canvas = $("lanes"), LEFT = 112, TOP = 26, LANE = 34, BAR = 22, BOTTOM = 24;
const [LANE_OF, WHAT, START, STOP, STEP] = [0, 1, 2, 3, 4];
const WAITING = data.kinds.findIndex(([kind]) => kind === "waiting");
const byLane = data.lanes.map((_, lane) => data.spans.filter(span => span[LANE_OF] === lane));
const end = Math.max(1e-3, data.spans.reduce((last, span) => Math.max(last, span[STOP]), 0));
let [from, to] = [0, end], chosen = null;

const kindOf = span => data.whats[span[WHAT]][1];
const colour = name => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const x = time => LEFT + (time - from) / (to - from) * (canvas.clientWidth - LEFT - 8);
const timeAt = place => from + (place - LEFT) / (canvas.clientWidth - LEFT - 8) * (to - from);
const seconds = value => value < 1 ? `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)} ms` : `${value.toFixed(value < 10 ? 2 : 1)} s`;

function show(a, b) {
  const width = Math.min(end * 1.02, Math.max(1e-3, b - a));
  from = Math.max(-0.01 * width, Math.min(a, end * 1.01 - width));
  to = from + width;
  requestAnimationFrame(draw);
}

function zoom(factor, at = (from + to) / 2) {
  show(at - (at - from) * factor, at + (to - at) * factor);
}

// A tick every 1, 2 or 5 tenfold of a second, at most so many.
function tickStep(width, most) {
  const raw = width / most, size = 10 ** Math.floor(Math.log10(raw));
  return size * [1, 2, 5, 10].find(by => by * size >= raw);
}

function draw() {
  const width = canvas.clientWidth, height = TOP + LANE * data.lanes.length + BOTTOM, scale = devicePixelRatio || 1;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d"), colours = data.kinds.map(([, name]) => colour(name));
  const [ink, dim, line] = ["ink", "dim", "line"].map(colour);
  pen.scale(scale, scale);
  pen.font = "12px system-ui, sans-serif";
  pen.textBaseline = "middle";
  drawAxis(pen, height, dim, line);
  pen.save();
  pen.beginPath();
  pen.rect(LEFT, 0, width - LEFT, height);
  pen.clip();
  drawSteps(pen, height, dim, line);
  byLane.forEach((spans, lane) => drawLane(pen, spans, TOP + lane * LANE + (LANE - BAR) / 2, colours, ink));
  for (const [at, text] of data.gaps) {
    pen.setLineDash([3, 3]);
    pen.strokeStyle = pen.fillStyle = dim;
    stroke(pen, x(at), TOP, height - BOTTOM);
    pen.setLineDash([]);
    pen.textAlign = "left";
    pen.fillText(`${text} left out`, x(at) + 4, height - BOTTOM - 6);
  }
  pen.restore();
  pen.textAlign = "right";
  data.lanes.forEach((name, lane) => {
    pen.fillStyle = ink;
    pen.fillText(name.length > 15 ? `${name.slice(0, 14)}…` : name, LEFT - 12, TOP + lane * LANE + LANE / 2);
  });
}

function stroke(pen, place, top, bottom) {
  pen.beginPath();
  pen.moveTo(place, top);
  pen.lineTo(place, bottom);
  pen.stroke();
}

function drawAxis(pen, height, dim, line) {
  const step = tickStep(to - from, (canvas.clientWidth - LEFT) / 90), digits = Math.max(0, -Math.floor(Math.log10(step)));
  pen.textAlign = "center";
  pen.lineWidth = 1;
  for (let tick = Math.ceil(Math.max(0, from) / step) * step; tick <= Math.min(to, end); tick += step) {
    pen.strokeStyle = line;
    stroke(pen, x(tick), height - BOTTOM, height - BOTTOM + 5);
    pen.fillStyle = dim;
    pen.fillText(`${tick.toFixed(digits)} s`, x(tick), height - 9);
  }
  data.lanes.forEach((_, lane) => {
    pen.strokeStyle = line;
    pen.beginPath();
    pen.moveTo(LEFT, TOP + lane * LANE + LANE - 0.5);
    pen.lineTo(canvas.clientWidth - 8, TOP + lane * LANE + LANE - 0.5);
    pen.stroke();
  });
}

function drawSteps(pen, height, dim, line) {
  pen.textAlign = "center";
  let last = -Infinity;
  for (const [step, at] of data.steps) {
    const place = x(at);
    if (place < LEFT || place > canvas.clientWidth || place - last < 30) continue;
    last = place;
    pen.strokeStyle = line;
    stroke(pen, place, TOP - 8, height - BOTTOM);
    pen.fillStyle = dim;
    pen.fillText(step, place, TOP - 15);
  }
}

function drawLane(pen, spans, top, colours, ink) {
  const ends = new Map();  // of a kind: where its last bar ended, so that bars of one pixel column are drawn once
  for (const span of spans) {
    if (span[STOP] < from || span[START] > to) continue;
    const kind = kindOf(span), left = x(span[START]), right = Math.max(x(span[STOP]), left + 0.6);
    if (right - left < 2 && right - (ends.get(kind) ?? -Infinity) < 0.3) continue;
    ends.set(kind, right);
    const thin = kind === WAITING;
    pen.fillStyle = colours[kind];
    pen.fillRect(left, thin ? top + BAR / 2 - 1.5 : top, right - left, thin ? 3 : BAR);
    if (span === chosen) {
      pen.strokeStyle = ink;
      pen.lineWidth = 2;
      pen.strokeRect(left, top, right - left, BAR);
    }
    label(pen, span, Math.max(left, LEFT), Math.min(right, canvas.clientWidth - 8), top, thin, ink);
  }
}

// The name of what was done where it fits, on the page's own ground where the bar is thin.
function label(pen, span, left, right, top, thin, ink) {
  const text = data.whats[span[WHAT]][0], room = right - left - 10;
  if (room < 24) return;
  const width = pen.measureText(text).width;
  if (width > room) return;
  const middle = (left + right) / 2;
  pen.textAlign = "center";
  if (thin) {
    pen.fillStyle = colour("bg");
    pen.fillRect(middle - width / 2 - 4, top, width + 8, BAR);
  }
  pen.fillStyle = thin ? colour("dim") : colour("bg");
  pen.fillText(text, middle, top + BAR / 2 + 0.5);
}

function at(event) {
  const box = canvas.getBoundingClientRect(), lane = byLane[Math.floor((event.clientY - box.top - TOP) / LANE)];
  const time = timeAt(event.clientX - box.left), slack = (to - from) / canvas.clientWidth;
  if (!lane || event.clientX - box.left < LEFT) return null;
  return lane.findLast(span => span[START] - slack <= time && time <= span[STOP] + slack) || null;
}

function read(span) {
  chosen = span;
  $("span").textContent = span
    ? `${data.lanes[span[LANE_OF]]} · ${data.whats[span[WHAT]][0]} · step ${span[STEP]} · ${seconds(span[STOP] - span[START])} · from ${span[START].toFixed(3)} s on`
    : "Point at a bar to read it.";
  requestAnimationFrame(draw);
}

let dragged = null;
canvas.addEventListener("wheel", event => {
  event.preventDefault();
  const place = event.clientX - canvas.getBoundingClientRect().left;
  if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) show(timeAt(LEFT + event.deltaX), timeAt(LEFT + event.deltaX) + to - from);
  else zoom(1.0015 ** event.deltaY, timeAt(Math.max(LEFT, place)));
}, { passive: false });
canvas.addEventListener("pointerdown", event => {
  dragged = { x: event.clientX, from, to };
  canvas.setPointerCapture(event.pointerId);
});
canvas.addEventListener("pointerup", () => { dragged = null; });
canvas.addEventListener("pointermove", event => {
  if (!dragged) return read(at(event));
  const by = (event.clientX - dragged.x) / (canvas.clientWidth - LEFT - 8) * (dragged.to - dragged.from);
  show(dragged.from - by, dragged.to - by);
});
canvas.addEventListener("pointerleave", () => read(null));
canvas.addEventListener("keydown", event => {
  const width = to - from;
  const act = {
    "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6), "0": () => show(0, end),
    ArrowLeft: () => show(from - width / 5, to - width / 5), ArrowRight: () => show(from + width / 5, to + width / 5),
  }[event.key];
  if (act) { act(); event.preventDefault(); }
});

// Parts of the run to look at: all of it, the start, the steps, a few of them in the middle.
const views = [["whole run", 0, end]];
if (data.steps.length > 1) {
  const ends = data.steps.map(([, time]) => time), middle = Math.floor(ends.length / 2);
  views.push(["start", 0, ends[0]], ["steps", ends[0], ends.at(-1)]);
  if (ends.length > 8) views.push([`steps ${data.steps[middle + 1][0]} to ${data.steps[middle + 4][0]}`, ends[middle], ends[middle + 4]]);
}
for (const [name, a, b] of views) {
  const button = document.createElement("button");
  button.textContent = name;
  button.addEventListener("click", () => show(a - 0.01 * (b - a), b + 0.01 * (b - a)));
  $("views").append(button);
}
for (const [place, [kind, name]] of data.kinds.entries()) {
  if (!data.spans.some(span => kindOf(span) === place)) continue;
  const entry = document.createElement("span"), swatch = document.createElement("i");
  swatch.style.backgroundColor = `var(--${name})`;
  if (place !== WAITING) swatch.style.height = "11px";
  swatch.style.verticalAlign = place === WAITING ? "3px" : "-1px";
  entry.append(swatch, kind);
  $("kinds").append(entry);
}
addEventListener("resize", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
read(null);
show(0, end);
