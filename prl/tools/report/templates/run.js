// --- tokens -----------------------------------------------------------------------------------------------------------

const USE = "use", SIGNED = ["advantage", "log-ratio", "teacher divergence"];
const scales = new Map();  // of a mode: the size that gets the full colour, that of 98 of 100 tokens at least
const views = new Set();
let uses = [], mode = "";

function showModes(rows) {
  const sequences = rows.flatMap(row => row.sequences || []);
  uses = [...new Set(sequences.flatMap(sequence => sequence.uses))].filter(use => !["context", "weight 0"].includes(use));
  scales.clear();
  for (const name of [...SIGNED, ...new Set(sequences.flatMap(s => Object.keys(s.values).filter(n => n.endsWith(" weight"))))]) {
    const sizes = sequences.flatMap(s => s.values[name] || []).filter(value => value !== null && value !== 0).map(Math.abs);
    if (sizes.length) scales.set(name, sizes.sort((a, b) => a - b)[Math.floor(0.98 * (sizes.length - 1))]);
  }
  $("tokenbar").hidden = !sequences.length;
  $("no-tokens").hidden = !!sequences.length;
  $("modes").replaceChildren(el("span", "dim small", "Tokens coloured by"));
  for (const name of [...scales.keys(), USE]) {
    const button = el("button", "", name);
    button.addEventListener("click", () => setMode(name));
    $("modes").append(button);
  }
  setMode(scales.has(mode) || mode === USE ? mode : [...scales.keys(), USE][0]);
}

function colour(sequence, place) {
  if (mode === USE) {
    const index = uses.indexOf(sequence.uses[sequence.use[place]]);
    return index < 0 ? "" : `color-mix(in srgb, var(--s${index % 8}) 34%, transparent)`;
  }
  const value = (sequence.values[mode] || [])[place];
  if (!value) return "";
  const strength = (0.14 + 0.56 * Math.min(1, Math.abs(value) / scales.get(mode))).toFixed(3);
  return `rgba(var(--${!SIGNED.includes(mode) ? "weight" : value > 0 ? "pos" : "neg"}), ${strength})`;
}

function paint(view) {
  for (const span of view.spans) span.style.backgroundColor = colour(view.sequence, Number(span.dataset.place));
}

function shown(token) {
  return token.replaceAll("\n", "↵\n").replaceAll("\t", "⇥\t");
}

function read(sequence, place) {
  const out = $("readout");
  out.textContent = "";
  const add = (name, value, cls) => {
    const field = el("span", cls);
    field.append(el("span", "dim", `${name} `), el("b", "", value));
    out.append(field);
  };
  add("token", JSON.stringify(sequence.text[place]), "token");
  add("place", `${place}`);
  add("id", `${sequence.ids[place]}`);
  add("use", sequence.uses[sequence.use[place]]);
  for (const [name, values] of Object.entries(sequence.values)) {
    if (values[place] !== null) add(name, number(values[place]));
  }
}

function tokenView(sequence) {
  const box = el("div", "tokens");
  box.tabIndex = 0;
  box.setAttribute("aria-label", "tokens");
  const view = { sequence, spans: [] }, pictures = new Map(sequence.pictures.map(([start, ...about]) => [start, about]));
  let active = -1;
  for (let place = 0; place < sequence.text.length; place++) {
    const [length, name] = pictures.get(place) || [1], text = name ? `${name}, ${length} tokens` : shown(sequence.text[place]) || "∅";
    const span = el("span", `t${sequence.sampled[place] ? "" : " context"}${name ? " picture" : ""}`, text);
    span.dataset.place = place;
    view.spans.push(span);
    box.append(span);
    place += Math.max(0, length - 1);  // a picture's placeholder tokens are one span
  }
  if (sequence.more) box.append(el("div", "dim small", `${sequence.more} more tokens are left out.`));
  const point = index => {
    if (index < 0 || index >= view.spans.length) return;
    if (active >= 0) view.spans[active].classList.remove("active");
    active = index;
    view.spans[index].classList.add("active");
    read(sequence, Number(view.spans[index].dataset.place));
  };
  box.addEventListener("pointerover", event => {
    if (event.target.dataset.place !== undefined) point(view.spans.indexOf(event.target));
  });
  box.addEventListener("focus", () => { if (active < 0) point(Math.max(0, view.spans.findIndex(span => sequence.sampled[span.dataset.place]))); });
  box.addEventListener("keydown", event => {
    const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -10, ArrowDown: 10 }[event.key];
    if (by) { point(Math.max(0, Math.min(view.spans.length - 1, active + by))); event.preventDefault(); }
  });
  paint(view);
  views.add(view);
  return box;
}

function legend() {
  const box = el("span", "scale small dim");
  if (mode === USE) {
    uses.forEach((use, index) => {
      const swatch = el("i");
      swatch.style.backgroundColor = `color-mix(in srgb, var(--s${index % 8}) 34%, transparent)`;
      box.append(swatch, el("span", "", `${use} `));
    });
  } else {
    const scale = scales.get(mode), signed = SIGNED.includes(mode), ramp = el("i", "ramp");
    ramp.style.backgroundImage = signed
      ? "linear-gradient(90deg, rgba(var(--neg), .7), transparent, rgba(var(--pos), .7))"
      : "linear-gradient(90deg, transparent, rgba(var(--weight), .7))";
    box.append(el("span", "", signed ? `−${number(scale, 2)} ` : "0 "), ramp, el("span", "", ` ${signed ? "+" : ""}${number(scale, 2)}`));
  }
  return box;
}

function setMode(name) {
  mode = name;
  for (const button of $("modes").querySelectorAll("button")) button.setAttribute("aria-pressed", button.textContent === name);
  $("modes").querySelector(".scale")?.remove();
  $("modes").append(legend());
  for (const view of views) {
    if (view.spans[0]?.isConnected) paint(view); else views.delete(view);
  }
}

// --- a rollout --------------------------------------------------------------------------------------------------------

function named(values) {
  return Object.entries(values || {}).map(([name, value]) => `${name} ${number(value)}`).join(", ");
}

function line(row) {
  const versions = row.versions && (row.versions[0] === row.versions[1] ? `version ${row.versions[0]}` : `versions ${row.versions[0]} to ${row.versions[1]}`);
  return [
    `reward ${number(row.reward)}${row.parts ? ` (${named(row.parts)})` : ""}`,
    row.advantage === undefined ? "no advantage" : `advantage ${number(row.advantage)}`,
    named(row.metrics), versions || "frozen model", row.agent && `agent ${row.agent}`, row.pool && `pool ${row.pool}`,
    row.turns !== undefined && `${row.turns} turns`,
    `${row.tokens} tokens sampled`, row.stop && `stop ${row.stop}`,
    ...Object.entries(row.matched || {}).map(([slot, name]) => `matched by ${name} (${slot})`),
    row.outcome + (row.reason ? `: ${row.reason}` : ""),
  ].filter(Boolean).join(" · ");
}

const SMALL = 128;  // pixels: a smaller picture is drawn a whole number of times as large

function picturesOf(message) {
  const box = el("div", "pictures");
  for (const [digest, name] of message.pictures || []) {
    const image = new Image();
    Object.assign(image, { loading: "lazy", alt: name, title: digest });
    image.addEventListener("load", () => {
      const times = Math.max(1, Math.floor(SMALL / Math.max(image.naturalWidth, image.naturalHeight)));
      image.width = times * image.naturalWidth;
      if (times > 1) image.className = "crisp";
    });
    image.addEventListener("error", () => image.replaceWith(el("span", "dim small", `${name}: its file is not there`)));
    image.src = data.live ? `picture?${new URLSearchParams({ run: chosen[0], digest })}` : `pictures/${digest}.png`;
    box.append(image);
  }
  return box;
}

function detail(row) {
  const box = el("div", "detail");
  box.append(el("p", "dim small", `step ${row.step} · ${row.env} · task ${row.task} · group ${row.group}, rollout ${row.rollout || 0}`));
  box.append(el("p", "small", line(row)));
  if (!row.messages) box.append(el("p", "dim small", "Its messages are left out; prl rollouts has them."));
  for (const message of row.messages || []) {
    const said = el("div", "message");
    const label = message.role + (message.name ? ` ${message.name}` : "") + (message.shown ? " (shown, not sampled)" : "");
    said.append(el("div", `role ${["system", "user", "assistant", "tool"].includes(message.role) ? message.role : ""}`, label));
    if (message.after !== undefined) said.append(el("p", "dim small", message.after ? `another branch, after message ${message.after}` : "another branch"));
    if (message.reasoning) said.append(el("pre", "reasoning", message.reasoning));
    if (message.text || !(message.calls || message.reasoning)) said.append(el("pre", message.text ? "" : "dim", message.text || "(empty)"));
    if (message.pictures) said.append(picturesOf(message));
    for (const call of message.calls || []) said.append(el("pre", "call", call));
    box.append(said);
  }
  for (const sequence of row.sequences || []) box.append(tokenView(sequence));
  return box;
}

function lastText(row) {
  const last = (row.messages || []).at(-1);
  return last ? (last.text || (last.calls || [])[0] || last.reasoning || "(empty)").replace(/\s+/g, " ") : "";
}

// --- example groups ---------------------------------------------------------------------------------------------------

function groupCard(group, all) {
  const card = el("details", "group"), title = el("summary", "", group.title);
  const rows = group.rollouts.map(place => all[place]), first = rows.find(row => row.messages);
  const rewards = [...new Set(rows.map(row => number(row.reward, 3)))];
  const about = [`${rows.length + group.more} rollout${rows.length + group.more > 1 ? "s" : ""}`,
    rewards.length > 1 ? `rewards ${rewards.slice(0, 4).join(", ")}` : `reward ${rewards[0]}`];
  title.append(el("span", "dim", ` · ${about.join(" · ")}`));
  card.append(title);
  const asked = first && first.messages.find(message => message.role === "user");
  if (asked) card.append(el("pre", "prompt dim", asked.text.length > 400 ? `${asked.text.slice(0, 400)} …` : asked.text), picturesOf(asked));
  const list = el("div", "members");
  rows.forEach(row => {
    const item = el("details");
    const head = el("summary");
    head.append(
      el("span", "num", number(row.reward, 3)), el("span", "num dim", row.advantage === undefined ? "" : (row.advantage > 0 ? "+" : "") + number(row.advantage, 3)),
      el("span", `outcome ${row.outcome === "trained" ? "good" : row.outcome.startsWith("failed") ? "bad" : "dim"}`, row.outcome),
      el("span", "text", lastText(row).slice(0, 300)),
    );
    item.append(head);
    item.addEventListener("toggle", () => { if (item.open && item.children.length === 1) item.append(detail(row)); });
    list.append(item);
  });
  card.append(list);
  if (group.more) card.append(el("p", "dim small", `${group.more} more of this group are in the table below.`));
  return card;
}

function showGroups(groups, all) {
  const cards = groups.map(group => groupCard(group, all));
  $("groups").replaceChildren(...cards);
  cards.forEach((card, place) => { card.open = place < 2; });
  // One rollout is open to begin with: one that has tokens, of those one that trained.
  const items = [...$("groups").querySelectorAll(".members details")], rows = groups.flatMap(group => group.rollouts).map(place => all[place]);
  const merit = row => ((row.sequences || []).length ? 2 : 0) + (row.outcome === "trained");
  const open = rows.reduce((best, row, place) => merit(row) > merit(rows[best]) ? place : best, 0);
  if (items[open]) { items[open].open = true; items[open].closest(".group").open = true; }
}

function showExamples(examples, rows) {
  const showStep = index => {
    [...$("steps").querySelectorAll("button")].forEach((button, place) => button.setAttribute("aria-selected", place === index));
    showGroups(examples[index].groups, rows);
  };
  examples.forEach(({ step }, index) => {
    const button = el("button", "", `step ${step}`);
    button.setAttribute("role", "tab");
    button.addEventListener("click", () => showStep(index));
    $("steps").append(button);
  });
  showModes(rows);
  showStep(examples.length - 1);
  $("examples").hidden = false;
}

// --- the table of rollouts: only the rows in sight are in the document --------------------------------------------------

const COLUMNS = [["step", "num"], ["env", ""], ["task", ""], ["group", "num"], ["reward", "num"], ["advantage", "num"], ["tokens", "num"], ["outcome", ""], ["reply", "text"]];
const HEIGHT = 28;

const SELECTS = { "by-step": ["all steps", "step"], "by-env": ["all envs", "env"], "by-outcome": ["all outcomes", "outcome"], "by-filter": ["all filters", "filter"] };

function textOf(row) {
  const said = (row.messages || []).flatMap(m => [m.text || "", m.reasoning || "", ...(m.calls || [])]);
  return [row.env, row.task, row.group, row.outcome, row.reason || "", ...said].join("\n").toLowerCase();
}

function filtersOf(row) { return Object.values(row.matched || {}); }

// What the controls ask for; empty ones are left out.
function asked() {
  const found = { text: $("filter").value, least: $("least").value, most: $("most").value, turns: $("turns").value };
  for (const [id, [, name]] of Object.entries(SELECTS)) found[name] = $(id).value;
  return Object.fromEntries(Object.entries(found).filter(([, value]) => value !== ""));
}

function admits(row, wanted) {
  return (wanted.step === undefined || String(row.step) === wanted.step) && (wanted.env === undefined || row.env === wanted.env)
    && (wanted.outcome === undefined || row.outcome === wanted.outcome)
    && (wanted.filter === undefined || filtersOf(row).includes(wanted.filter))
    && (wanted.least === undefined || row.reward >= Number(wanted.least)) && (wanted.most === undefined || row.reward <= Number(wanted.most))
    && (wanted.turns === undefined || (row.turns ?? 1) >= Number(wanted.turns))
    && (wanted.text === undefined || textOf(row).includes(wanted.text.toLowerCase()));
}

// The table over `rows`. `ask`, of a live page, is called where the controls have changed: it gets the rows from the server.
function makeTable(ask) {
  const scroll = $("scroll");
  let rows = [], order = [], found = [], sorting = ["step", ask ? -1 : 1];
  const value = (row, key) => key === "reply" ? lastText(row) : row[key];
  function options(id, values) {
    const [label] = SELECTS[id], chosen = $(id).value;
    const wanted = [...new Set(values)].filter(v => v !== undefined), signature = wanted.join("\n");
    if ($(id).dataset.values === signature) return;
    $(id).dataset.values = signature;
    $(id).replaceChildren(new Option(label, ""), ...wanted.map(v => new Option(`${id === "by-step" ? "step " : ""}${v}`, v)));
    $(id).value = chosen;
    $(id).hidden = wanted.length < 2 && !chosen;
  }
  function draw() {
    if (!scroll.isConnected) return;  // another run is shown
    const first = Math.max(0, Math.floor(scroll.scrollTop / HEIGHT) - 4);
    const count = Math.ceil(scroll.clientHeight / HEIGHT) + 8;
    $("window").style.transform = `translateY(${first * HEIGHT}px)`;
    $("window").replaceChildren(...found.slice(first, first + count).map(place => {
      const row = rows[place], item = el("div", "row");
      item.setAttribute("role", "row");
      item.tabIndex = 0;
      for (const [key, cls] of COLUMNS) {
        const here = value(row, key);
        item.append(el("span", cls, key === "reply" ? here.slice(0, 200) : typeof here === "number" ? number(here) : here ?? "–"));
      }
      const choose = () => { $("chosen").replaceChildren(detail(row)); $("chosen").scrollIntoView({ block: "nearest" }); };
      item.addEventListener("click", choose);
      item.addEventListener("keydown", event => { if (event.key === "Enter") choose(); });
      return item;
    }));
  }
  function filter() {
    const wanted = asked();
    found = ask ? order : order.filter(place => admits(rows[place], wanted));  // the server has seen all of long messages
    $("count").textContent = ask ? `${found.length.toLocaleString("en")} rollouts` : `${found.length.toLocaleString("en")} of ${rows.length.toLocaleString("en")}`;
    $("space").style.height = `${found.length * HEIGHT}px`;
    draw();
  }
  function sort() {
    const [key, sign] = sorting, keys = rows.map(row => value(row, key));
    order = rows.map((_, place) => place).sort((a, b) => {
      const [x, y] = [keys[a], keys[b]];
      if (x === undefined || y === undefined) return (x === undefined) - (y === undefined) || a - b;
      return sign * (x < y ? -1 : x > y ? 1 : 0) || a - b;
    });
    filter();
  }
  const changed = () => { scroll.scrollTop = 0; if (ask) ask(); else filter(); };
  const head = $("table").querySelector(".head");
  for (const [key, cls] of COLUMNS) {
    const cell = el("span", cls), button = el("button", "", key);
    button.addEventListener("click", () => { sorting = [key, sorting[0] === key ? -sorting[1] : 1]; scroll.scrollTop = 0; sort(); });
    cell.append(button);
    head.append(cell);
  }
  let due = 0;
  for (const id of ["filter", "least", "most", "turns"]) $(id).addEventListener("input", () => { clearTimeout(due); due = setTimeout(changed, ask ? 250 : 60); });
  for (const id of Object.keys(SELECTS)) $(id).addEventListener("change", changed);
  scroll.addEventListener("scroll", () => requestAnimationFrame(draw));
  new ResizeObserver(draw).observe(scroll);
  return {
    show(given, offered = {}) {  // `offered`: further values for the controls
      rows = given;
      const distinct = key => [...new Set(rows.map(row => row[key]))];
      options("by-step", offered.steps || distinct("step").sort((a, b) => a - b));
      options("by-env", [...(offered.envs || []), ...distinct("env").sort()]);
      options("by-outcome", [...(offered.outcomes || []), ...distinct("outcome").sort()]);
      options("by-filter", [...(offered.filters || []), ...rows.flatMap(filtersOf).sort()]);
      $("rollouts").hidden = false;
      sort();
    },
  };
}

if (!data.live) {
  showPanels(panelsOf(data.metrics, data.before, data.compared));
  if (data.examples.length) showExamples(data.examples, data.rows);
  if (data.rows.length) makeTable().show(data.rows);
}
