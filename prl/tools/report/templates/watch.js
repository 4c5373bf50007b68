// --- the live page: the server sends what runs write, the page keeps it ---------------------------------------------------

const stored = new Map();  // run -> {at, metrics: {name: [steps, values]}, before: its source's} as far as the page has read
let entries = [], chosen = new URLSearchParams(location.hash.slice(1)).getAll("run");
const NONE = "No run yet: the page shows the first one that begins here.";
let source = null, heard = Date.now(), variants = null, table = null;
let bySeed = true, several = false;  // means over seeds are wanted; a variant has several

async function asks(name, query) {
  const answer = await fetch(`${name}?${new URLSearchParams(query)}`);
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}

// --- the connection ----------------------------------------------------------------------------------------------------

function connect() {
  source?.close();
  const query = new URLSearchParams();
  for (const run of chosen) { query.append("run", run); query.append("at", stored.get(run)?.at || ""); }
  source = new EventSource(`news?${query}`);
  const on = (name, act) => source.addEventListener(name, event => { listening(); act(JSON.parse(event.data)); });
  on("tick", () => {});
  on("runs", showRuns);
  on("lines", takeLines);
  on("state", takeState);
  source.onerror = () => source.close();  // the clock below connects again
}

function listening() {
  heard = Date.now();
  $("connection").textContent = "live";
  $("connection").className = "good";
}

// A browser has six connections to an address for all its tabs: one that nobody sees gives its own back.
document.addEventListener("visibilitychange", () => document.hidden ? source.close() : connect());

setInterval(() => {
  if (document.hidden) return;
  if (source.readyState !== EventSource.CLOSED && Date.now() - heard < 6000) return;
  $("connection").textContent = "disconnected, trying again";
  $("connection").className = "bad";
  heard = Date.now() - 4000;  // a server that sleeps holds the connection and is silent
  connect();
}, 1000);

// The server has escaped every text in what gets into the page as markup, and the page's policy runs no script of it.

function takeLines({ run, at, anew, metrics, before }) {
  if (anew || !stored.has(run)) stored.set(run, { metrics: {}, before: {} });
  const kept = stored.get(run);
  kept.at = at;
  if (before) kept.before = before;
  for (const [key, [steps, values]] of Object.entries(metrics)) {
    const [xs, ys] = kept.metrics[key] ||= [[], []];
    steps.forEach((step, place) => {
      let end = xs.length;
      while (end && xs[end - 1] >= step) end--;
      const replaced = xs[end] === step ? 1 : 0;  // of a step's lines the last counts
      xs.splice(end, replaced, step);
      ys.splice(end, replaced, values[place]);
    });
  }
  if (chosen.includes(run)) { redraw(); newRollouts(); }
}

let state = {};
function takeState(given) {
  state = given;
  if (state.run !== chosen[0] || chosen.length > 1) return;
  for (const [id, html] of Object.entries(state.parts)) if ($(id)) $(id).innerHTML = html;
  redraw();
}

let due = 0;
function redraw() {
  due ||= setTimeout(() => {
    due = 0;
    if (!$("panels")) return;
    const { compared } = state.run === chosen[0] ? state : {};
    const { metrics = {}, before } = stored.get(chosen[0]) || {};
    if (chosen.length === 1) showPanels(panelsOf(metrics, before, compared));
    else if (variants) showPanels(comparedPanels());
  }, chosen.length > 1 ? 250 : 50);
}

// --- the list ------------------------------------------------------------------------------------------------------------

const STATUS = { completed: "good", failed: "bad", crashed: "bad", refused: "bad", stopped: "warn", running: "running" };

function showRuns(given) {
  entries = given;
  const items = entries.map(entry => {
    const item = el("li"), label = el("label"), box = el("input"), name = el("button", "name", entry.name);
    box.type = "checkbox";
    box.checked = chosen.includes(entry.name);
    box.setAttribute("aria-label", `compare ${entry.name}`);
    box.addEventListener("change", () => choose(entries.map(e => e.name).filter(n => n === entry.name ? box.checked : chosen.includes(n))));
    name.addEventListener("click", () => choose([entry.name]));
    label.append(box);
    const of = entry.max_steps === null ? "" : `/${entry.max_steps}`;
    const about = el("div", "dim small", `${entry.step}${of}${entry.reward === null ? "" : ` · reward ${number(entry.reward, 3)}`}`);
    about.prepend(el("span", STATUS[entry.status] || "dim", entry.status), " · ");
    const text = el("div");
    text.append(name, about, ...entry.remarks.map(remark => el("div", "dim small remark", remark)));
    item.append(label, text);
    item.dataset.name = entry.name.toLowerCase();
    if (chosen.includes(entry.name)) item.className = "chosen";
    return item;
  });
  const focused = [...$("runs").querySelectorAll("input, button")].indexOf(document.activeElement);
  $("runs").replaceChildren(...items);
  $("runs").querySelectorAll("input, button")[focused]?.focus();
  $("find").hidden = entries.length < 8;
  filterRuns();
  const there = chosen.filter(run => entries.some(entry => entry.name === run));
  if (!entries.length) chosen = [];
  const came = gone && there.length;
  gone = entries.length && chosen.length && !there.length;
  if (!entries.length) $("content").replaceChildren(el("p", "dim", NONE));
  else if (!chosen.length) choose([entries[0].name]);
  else if (gone) $("content").replaceChildren(el("p", "bad", `There is no run ${chosen.join(", ")} any more.`));
  else if (came) openThem();
  if (chosen.length > 1) redraw();  // an end dashes a curve
}

function filterRuns() {
  for (const item of $("runs").children) item.hidden = !item.dataset.name.includes($("find").value.toLowerCase());
}

$("find").addEventListener("input", filterRuns);

let opening = 0, gone = false;  // all that is chosen has been removed
function choose(runs) {
  if (!runs.length) { showRuns(entries); return; }  // the last box stays ticked
  chosen = runs;
  clearTimeout(opening);
  if (runs.length > 1) { opening = setTimeout(openThem, 100); return; }  // boxes ticked at once are asked for once
  stored.clear();  // of several that are long, not every step was read
  openThem();
}

function openThem() {
  history.replaceState(null, "", `#${new URLSearchParams(chosen.map(run => ["run", run]))}`);
  connect();
  openChosen();
}

async function openChosen() {
  const runs = chosen;
  charts.clear();
  variants = table = null;
  document.title = runs.length === 1 ? `${runs[0]} · prl` : `${runs.length} runs · prl`;
  if (runs.length > 1) openCompared({}, "");  // its curves need not wait for the configs
  try {
    const query = runs.map(run => ["run", run]), answer = await asks(runs.length === 1 ? "run" : "compare", query);
    if (runs !== chosen) return;
    if (runs.length === 1) openRun(runs[0], answer); else openCompared(answer.runs, answer.html);
  } catch (error) {
    if (runs === chosen) $("content").replaceChildren(el("p", entries.length ? "bad" : "dim", entries.length ? error.message : NONE));
  }
  redraw();
}

// --- one run: its rollouts are searched by the server ------------------------------------------------------------------------

let rows = [], before = null, steps = [], asking = 0;

function openRun(run, answer) {
  $("content").innerHTML = answer.html;
  if (state.run === run) takeState(state);
  [rows, before, steps] = [[], null, []];
  table = makeTable(() => searchRollouts(run));
  $("older").addEventListener("click", () => searchRollouts(run, before));
  $("scroll").addEventListener("scroll", () => {
    if (before !== null && !asking && $("scroll").scrollTop + 2 * $("scroll").clientHeight > $("scroll").scrollHeight) searchRollouts(run, before);
  });
  searchRollouts(run);
}

async function searchRollouts(run, from = null) {
  const turn = ++asking, query = { run, ...asked(), ...(from === null ? {} : { before: from }) };
  $("count").textContent = "searching …";
  try {
    const found = await asks("rollouts", query);
    if (turn !== asking || run !== chosen[0] || chosen.length > 1) return;
    rows = from === null ? found.rows : [...rows, ...found.rows];
    before = found.before;
    if (found.steps.length) {
      const envs = Object.keys(stored.get(run)?.metrics || {}).map(key => key.match(/^reward\/(.+)\/mean$/)?.[1]).filter(env => env && env !== "all");
      table.show(rows, { steps: found.steps.toReversed(), envs });
      $("count").textContent = `${rows.length.toLocaleString("en")} rollouts${before === null ? "" : `, back to step ${before}`}`;
      $("older").hidden = before === null;
      offerSteps(run, found.steps, new Set(found.exported));
    }
  } catch (error) {
    $("count").textContent = error.message;
  } finally {
    if (turn === asking) asking = 0;
  }
}

// Rollouts of a new step appear where the reader looks at the newest anyway: to read them takes the server some time.
let searched = 0;
function newRollouts() {
  if (chosen.length > 1 || !table || asking || Date.now() - searched < 5000) return;
  const box = $("rollouts").getBoundingClientRect(), seen = box.top < innerHeight && box.bottom > 0;
  if (steps.length && (!seen || $("scroll").scrollTop > 0 || $("chosen").children.length)) return;
  searched = Date.now();
  searchRollouts(chosen[0]);
}

function offerSteps(run, all, exported) {
  const first = !steps.length;
  steps = all;
  const select = $("steps").querySelector("select") || el("select");
  const kept = select.value;
  select.setAttribute("aria-label", "step of the example groups");
  select.replaceChildren(...steps.toReversed().map(step => new Option(`step ${step}${exported.has(step) ? ", with tokens" : ""}`, step)));
  if (!first) { select.value = kept; return; }
  select.addEventListener("change", () => openExamples(run, select.value));
  $("steps").replaceChildren(select);
  openExamples(run, select.value);
}

async function openExamples(run, step) {
  const { rows, examples } = await asks("examples", { run, step });
  if (run !== chosen[0] || chosen.length > 1) return;
  showModes(rows);
  showGroups(examples.flatMap(({ groups }) => groups), rows);
  $("examples").hidden = false;
}

// --- several runs: a panel a metric ----------------------------------------------------------------------------------------

function openCompared(runs, html) {
  variants = runs;
  $("content").innerHTML = html;
  const seeds = new Map();
  for (const { label, seed } of Object.values(runs)) seeds.set(label, new Set([...(seeds.get(label) || []), seed]));
  several = [...seeds.values()].some(those => those.size > 1);
  const head = el("header"), panels = el("div", "panels"), curves = el("div"), bar = el("div", "bar");
  head.append(el("h1", "", `${chosen.length} runs`));
  for (const [text, value] of several ? [["mean over seeds", true], ["each run", false]] : []) {
    const button = el("button", "", text);
    button.setAttribute("aria-pressed", bySeed === value);
    button.addEventListener("click", () => {
      bySeed = value;
      for (const other of bar.children) other.setAttribute("aria-pressed", other === button);
      redraw();
    });
    bar.append(button);
  }
  panels.id = "panels";
  curves.id = "curves";
  curves.append(bar, panels);
  const source = el("p", "dim small", "Dotted: the run that one forked.");
  source.id = "of-source";
  source.hidden = true;
  curves.append(source);
  if (several) curves.append(el("p", "dim small", `A thick line is the mean over the seeds of a variant. Below ${data.few} seeds the band is their range; from ${data.few} on it is the 95 % t interval. Running and failed runs count as far as they came.`));
  $("content").prepend(head, curves);
}

function comparedPanels() {
  const metricsOf = run => stored.get(run)?.metrics || {};
  const sourceOf = (run, key) => stored.get(run)?.before[key];
  const keys = [...new Set(chosen.flatMap(run => Object.keys(metricsOf(run))))];
  const groups = new Map();
  for (const run of chosen) {
    const { label = run } = variants[run] || {}, name = bySeed && several ? label : run;
    groups.set(name, [...(groups.get(name) || []), run]);
  }
  return data.kinds.flatMap(kind => {
    const named = curvesOf(kind, keys);
    return named.flatMap(({ name, key }) => {
      const shown = [...groups].map(([label, runs], place) => ({ label, place, having: runs.filter(run => metricsOf(run)[key]) }));
      const curves = () => shown.filter(({ having }) => having.length).map(({ label, place, having }) => {
        if (having.length > 1) {  // a seed begins with what it forked
          const whole = having.map(run => joined(signed(kind, sourceOf(run, key) || [[], []]), signed(kind, metricsOf(run)[key])));
          return { name: label, place, ...banded(whole, having.map(run => variants[run]?.seed ?? run)) };
        }
        const [run] = having, source = sourceOf(run, key);
        const { status } = entries.find(entry => entry.name === run) || {};
        const unfinished = !["completed", "running", undefined].includes(status);
        const name = unfinished ? `${label} (${status})` : label;
        return { name, place, unfinished, before: source && signed(kind, source), ...signed(kind, metricsOf(run)[key]) };
      });
      const begins = shown.some(({ having }) => having.length === 1 && sourceOf(having[0], key));
      if (!kind.shows_zeros && chosen.every(run => isZero(metricsOf(run)[key]?.[1] || []))) return [];
      return [{ title: named.length > 1 ? `${kind.title} · ${name}` : kind.title, unit: kind.unit, kind, curves, begins }];
    });
  });
}

function joined(first, then) { return { xs: [...first.xs, ...then.xs], ys: [...first.ys, ...then.ys] }; }

// The mean over seeds, and its interval. Runs of one seed are no further evidence: they count as one, their mean.
function banded(curves, seeds) {
  const bySteps = new Map();
  curves.forEach(({ xs, ys }, place) => xs.forEach((step, at) => {
    if (!bySteps.has(step)) bySteps.set(step, new Map());
    const of = bySteps.get(step);
    of.set(seeds[place], [...(of.get(seeds[place]) || []), ys[at]]);
  }));
  const mean = values => values.reduce((sum, value) => sum + value, 0) / values.length;
  const xs = [...bySteps.keys()].sort((a, b) => a - b), ys = [], low = [], high = [];
  for (const step of xs) {
    const values = [...bySteps.get(step).values()].map(mean), middle = mean(values), count = values.length;
    ys.push(middle);
    if (count < data.few) {
      const [least, most] = extent(values);
      low.push(least);
      high.push(most);
    } else {
      const deviation = Math.sqrt(values.reduce((sum, value) => sum + (value - middle) ** 2, 0) / (count - 1));
      const half = data.quantiles[Math.min(count, data.quantiles.length + 1) - 2] * deviation / Math.sqrt(count);
      low.push(middle - half);
      high.push(middle + half);
    }
  }
  return { xs, ys, band: { low, high }, thin: curves.length < data.few ? curves : [] };
}

connect();
if (chosen.length) openChosen();
