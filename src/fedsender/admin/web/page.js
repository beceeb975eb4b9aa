// The page of the admin endpoint.
//
// The daemon gives words and tables, and the page lays them out. All of them may come from hostile
// servers. They become text nodes and attributes, and nothing on this page makes HTML from text.
// The address has the view behind `#`, which no browser sends.

const OURS = "_fedsender/admin/v1/";
const KEY = "fedsender-key";
const OVERVIEW_MS = 2000;
const SERVER_MS = 5000;
const ROWS = 100;
const PART = 20;

const main = document.getElementById("main");
const said = document.getElementById("said");

// --- asking the daemon ---------------------------------------------------------------------------

class Refused extends Error {}
class LoggedOut extends Error {}

async function ask(path, body, signal) {
  const request = { cache: "no-store", headers: {}, signal };
  const key = localStorage.getItem(KEY);
  if (key) request.headers["X-Fedsender-Key"] = key;
  if (body !== undefined) {
    request.method = "POST";
    request.headers["Content-Type"] = "application/json";
    request.body = JSON.stringify(body);
  }
  let response, answer;
  try {
    response = await fetch(path, request);
    answer = await response.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused("no answer from the daemon");
  }
  if (response.status === 401 && path !== "login") {
    // Another tab may have logged in meanwhile.
    if (localStorage.getItem(KEY) === key) localStorage.removeItem(KEY);
    throw new LoggedOut();
  }
  if (!response.ok) throw new Refused(answer.error ?? `refused (${response.status})`);
  return answer;
}

const tell = (path, body) => ask(OURS + path, body);

// Only what is new is read out.
const say = (text) => fillText(said, text);

// Holds a server, or ends that; gives what was done, in words.
async function hold(verb, server, more = {}) {
  await tell(verb, { servers: [server], ...more });
  return `${verb}: ${server}`;
}

// --- building ------------------------------------------------------------------------------------

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

function draw(tag, attributes, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

const button = (text, onclick, attributes = {}) =>
  make("button", { type: "button", onclick, ...attributes }, text);
const linkTo = (kind, name, text = name) =>
  make("a", { href: `#/${kind}/${encodeURIComponent(name)}` }, text);

// --- marks: each word has a colour and a shape ---------------------------------------------------

const WORDS = {
  failing: ["bad", "down"], refusing: ["bad", "square"], rejecting: ["bad", "bar"],
  lying: ["bad", "up"], not_there: ["bad", "diamond"], unreachable: ["bad", "cross"],
  refused: ["bad", "cross"], quarantined: ["bad", "square"], "given up": ["bad", "down"],
  gone: ["held", "circle"],
  busy: ["wait", "up"], waiting: ["wait", "up"], pending: ["wait", "diamond"],
  sending: ["go", "circle"], "catching up": ["go", "up"],
  paused: ["held", "bar"], parked: ["held", "square"], "not allowed": ["held", "cross"],
  "another sender's": ["held", "diamond"], unknown: ["held", "up"], discarded: ["held", "down"],
  level: ["good", "circle"], delivered: ["good", "circle"], superseded: ["good", "diamond"],
  settled: ["good", "square"],
};
const ORDER = Object.keys(WORDS);
const SHAPES = {
  circle: (x, y, r) => `M${x - r} ${y}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0z`,
  square: (x, y, r) => `M${x - r} ${y - r}h${2 * r}v${2 * r}h${-2 * r}z`,
  diamond: (x, y, r) => `M${x} ${y - r}l${r} ${r}l${-r} ${r}l${-r} ${-r}z`,
  up: (x, y, r) => `M${x} ${y - r}l${r} ${2 * r}h${-2 * r}z`,
  down: (x, y, r) => `M${x} ${y + r}l${r} ${-2 * r}h${-2 * r}z`,
  bar: (x, y, r) => `M${x - r} ${y - r / 2}h${2 * r}v${r}h${-2 * r}z`,
  cross: (x, y, r) => {
    const t = r / 3, arm = r - t;
    const [a, b] = [`v${arm}h${arm}v${2 * t}h${-arm}v${arm}`, `v${-arm}h${-arm}v${-2 * t}h${arm}`];
    return `M${x - t} ${y - r}h${2 * t}${a}h${-2 * t}${b}z`;
  },
};

const wordOf = (text) =>
  ORDER.find((word) => text === word || [" ", ","].includes(text.startsWith(word) && text[word.length])) ?? text;
const [toneOf, shapeOf] = [0, 1].map((at) => (word) => (WORDS[word] ?? ["held", "bar"])[at]);

function icon(word) {
  const path = draw("path", { d: SHAPES[shapeOf(word)](6, 6, 5) });
  return draw("svg", { class: `icon ${toneOf(word)}`, viewBox: "0 0 12 12", "aria-hidden": "true" }, path);
}

// --- facts and tables ----------------------------------------------------------------------------

function fillFacts(list, facts) {
  const grouped = [];
  for (const [name, text] of facts) {
    if (name || !grouped.length) grouped.push([name, text]);
    else grouped.at(-1)[1] += `\n${text}`;
  }
  const names = grouped.map(([name]) => name).join("\n");
  if (list.names !== names) {
    list.names = names;
    list.replaceChildren(...grouped.flatMap(([name]) => [make("dt", {}, name), make("dd")]));
  }
  grouped.forEach(([, text], at) => fillText(list.children[2 * at + 1], text));
}

function fillText(node, text) {
  // A text that stays the same keeps what the reader has marked in it.
  if (node.textContent !== text) node.textContent = text;
}

const MARKED = ["STATE", "OUTCOME", "ERROR"];

function fillCell(cell, title, text, key) {
  if (cell.shown === text) return;
  cell.shown = text;
  cell.classList.toggle("none", text === null);
  cell.replaceChildren(text === null ? "-" : partOf(title, text, key));
}

function partOf(title, text, key) {
  if (title === "SERVER" && text !== "every server") return linkTo("server", key ?? text, text);
  if (title === "EVENT") return linkTo("event", text);
  if (MARKED.includes(title)) return make("span", {}, icon(wordOf(text)), text);
  // A number stays with its type.
  return make("span", {}, title === "EDUS" ? text.replaceAll(/(\d) /g, "$1\u00a0") : text);
}

// Roles are named, because some browsers forget them when a table is laid out in another way.
function newRow(key, columns, first) {
  const cells = columns.map((title) => make("td", { role: "cell", "data-title": title }));
  const row = make("tr", { role: "row" }, ...(first ? [first(key)] : []), ...cells);
  row.key = key;
  row.cellsOfData = cells;
  return row;
}

// `heads`: by title the child of a column's head; `first`: makes a cell before those of the data;
// `named`: the keys are the names of servers.
function fillTable(table, { columns, rows }, keys, { heads = {}, first = null, named = true } = {}) {
  if (!table.tBodies.length) {
    const cells = columns.map((title) =>
      make("th", { role: "columnheader", scope: "col", "data-title": title }, heads[title] ?? title));
    if (first) cells.unshift(make("th", { role: "columnheader", scope: "col" }, "CHOOSE"));
    table.setAttribute("role", "table");
    table.append(make("thead", { role: "rowgroup" }, make("tr", { role: "row" }, ...cells)));
    table.append(make("tbody", { role: "rowgroup" }));
  }
  const body = table.tBodies[0];
  const before = new Map([...body.rows].map((row) => [row.key, row]));
  const focused = document.activeElement;
  rows.forEach((texts, at) => {
    const key = keys ? keys[at] : at;
    const row = before.get(key) ?? newRow(key, columns, first);
    before.delete(key);
    texts.forEach((text, column) =>
      fillCell(row.cellsOfData[column], columns[column], text, keys && named ? key : null));
    if (body.rows[at] !== row) body.insertBefore(row, body.rows[at] ?? null);
  });
  for (const row of before.values()) row.remove();
  table.hidden = !rows.length;
  // A row that moved has lost the focus.
  if (document.activeElement !== focused && focused.isConnected) focused.focus({ preventScroll: true });
}

// The first rows of a long table, and a button for more; `at.most` says how many.
function fillPart(table, pager, { columns, rows }, keys, at, again) {
  fillTable(table, { columns, rows: rows.slice(0, at.most) }, keys?.slice(0, at.most));
  const text = rows.length > at.most ? `${at.most} of ${rows.length.toLocaleString("en")} are shown.` : "";
  if (pager.shown === text) return;
  pager.shown = text;
  pager.replaceChildren(text);
  if (text) pager.append(button("Show more", () => {
    at.most += 5 * PART;
    again();
  }));
}

// The rows of one word, or all, with the key of colours that chooses the word.
function fillParts(view, table, answer, title) {
  const { columns, rows } = answer.table;
  const at = columns.indexOf(title);
  const words = rows.map((row) => wordOf(row[at]));
  const counts = new Map();
  for (const word of words) counts.set(word, (counts.get(word) ?? 0) + 1);
  const ordered = [...counts.keys()].sort((a, b) => ORDER.indexOf(a) - ORDER.indexOf(b));
  const key = view.querySelector(".key"), pager = table.nextElementSibling, part = { most: PART };
  let chosen = null;

  function fill() {
    const shown = [...rows.keys()].filter((row) => chosen === null || words[row] === chosen);
    const keys = answer.keys && shown.map((row) => answer.keys[row]);
    fillPart(table, pager, { columns, rows: shown.map((row) => rows[row]) }, keys, part, fill);
  }

  key.replaceChildren(...ordered.map((word) => button(
    "",
    (event) => {
      chosen = chosen === word ? null : word;
      part.most = PART;
      for (const each of key.children) each.setAttribute("aria-pressed", each === event.currentTarget && chosen !== null);
      fill();
    },
    { "aria-pressed": "false" },
  )));
  ordered.forEach((word, number) => key.children[number].append(icon(word), `${word} ${counts.get(word).toLocaleString("en")}`));
  fill();
  return { words, ordered };
}

// --- pictures ------------------------------------------------------------------------------------

const inShort = (words, ordered) =>
  ordered.map((word) => `${words.filter((each) => each === word).length} ${word}`).join(", ");

// Small pictures of the last hour, the latest minute at the right.
function drawHour(place, pictures) {
  const width = 180, height = 44, minutes = 60;
  const x = (at, count) => width - (count - at) * (width / minutes);
  place.replaceChildren(...pictures.map(({ title, now, lines }) => {
    const most = Math.max(1, ...lines.flat().filter((value) => value !== null));
    const said = `${title}: now ${now}; at most ${Math.round(most).toLocaleString("en")} in the last hour`;
    const picture = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": said });
    picture.append(draw("line", { x1: 0, x2: width, y1: height - 1, y2: height - 1 }));
    lines.forEach((values, number) => {
      // Where nothing was measured, the line has a gap.
      let d = "";
      values.forEach((value, at) => {
        if (value === null) return;
        const y = (height - 2) * (1 - value / most) + 1;
        const joined = at > 0 && values[at - 1] !== null;
        d += joined ? `L${x(at + 1, values.length)} ${y}` : `M${x(at, values.length)} ${y}H${x(at + 1, values.length)}`;
      });
      picture.append(draw("path", { class: `line${number}`, d }));
    });
    return make("figure", {}, make("figcaption", {}, make("b", {}, title), ` ${now}`), picture);
  }));
}

// Attempts by their time from left to right, and by how long they took from below.
function drawAttempts(place, answer, words, ordered) {
  const width = place.clientWidth, height = 190, left = 52, right = 12, top = 10, bottom = 28;
  const times = answer.points.map(([at]) => at);
  const first = Math.min(...times), last = Math.max(...times);
  const most = Math.max(1000, ...answer.points.map(([, ms]) => ms));
  const x = (at) => left + 6 + (last === first ? 0.5 : (at - first) / (last - first)) * (width - left - right - 12);
  const y = (ms) => height - bottom - (Math.log10(Math.max(1, ms)) / Math.log10(most)) * (height - top - bottom);
  const picture = draw("svg", {
    viewBox: `0 0 ${width} ${height}`, width, height, role: "img",
    "aria-label": `Attempts by time and by how long they took: ${answer.said}; ${inShort(words, ordered)}.`,
  });
  for (let ms = 1; ms <= most; ms *= 10) {
    const text = ms < 1000 ? `${ms} ms` : `${ms / 1000} s`;
    picture.append(
      draw("line", { x1: left, x2: width - right, y1: y(ms), y2: y(ms) }),
      draw("text", { x: left - 6, y: y(ms) + 4, "text-anchor": "end" }, text),
    );
  }
  for (const word of ordered) {
    const points = answer.points.filter((_, row) => words[row] === word);
    const d = points.map(([at, ms]) => SHAPES[shapeOf(word)](x(at), y(ms), 4)).join("");
    picture.append(draw("path", { class: toneOf(word), d }));
  }
  // Without the seconds, two times have room on a phone.
  const when = answer.table.rows.map((row) => row[0].slice(0, 16));
  picture.append(draw("text", { x: left, y: height - 8 }, when.at(-1)));
  if (when.length > 1) {
    picture.append(draw("text", { x: width - right, y: height - 8, "text-anchor": "end" }, when[0]));
  }
  place.replaceChildren(picture);
}

// One sign for each server, those of one outcome together.
function drawMap(place, answer, words, ordered, pointed) {
  const order = [...words.keys()].sort((a, b) => ordered.indexOf(words[a]) - ordered.indexOf(words[b]));
  const width = place.clientWidth;
  const size = Math.max(5, Math.min(18, Math.floor(Math.sqrt((width * 320) / order.length))));
  const inRow = Math.max(1, Math.floor(width / size)), height = Math.ceil(order.length / inRow) * size;
  const paths = new Map(ordered.map((word) => [word, []]));
  order.forEach((row, at) => {
    const x = (at % inRow + 0.5) * size, y = (Math.floor(at / inRow) + 0.5) * size;
    paths.get(words[row]).push(SHAPES[shapeOf(words[row])](x, y, size * 0.4));
  });
  const picture = draw("svg", {
    viewBox: `0 0 ${width} ${height}`, width, height, role: "img", class: "map",
    "aria-label": `Servers by outcome: ${inShort(words, ordered)}.`,
  }, ...ordered.map((word) => draw("path", { class: toneOf(word), d: paths.get(word).join("") })));
  const under = (event) => {
    const box = picture.getBoundingClientRect();
    const [column, line] = [(event.clientX - box.left) / size, (event.clientY - box.top) / size].map(Math.floor);
    return column < inRow ? order[line * inRow + column] : undefined;
  };
  picture.addEventListener("pointermove", (event) => {
    const row = under(event);
    fillText(pointed, row === undefined ? "" : `${answer.keys[row]}: ${answer.table.rows[row][1]}`);
  });
  picture.addEventListener("click", (event) => {
    const row = under(event);
    if (row !== undefined) location.hash = `#/server/${encodeURIComponent(answer.keys[row])}`;
  });
  place.replaceChildren(picture);
}

// --- actions, each with a confirmation -----------------------------------------------------------

const sure = document.getElementById("sure");
const DAY = 86_400_000;
const REASON = { name: "reason", label: "Reason", value: "by an operator", required: true, maxlength: 500 };
const PAUSES = [
  ["30 minutes", DAY / 48], ["2 hours", DAY / 12], ["8 hours", DAY / 3], ["1 day", DAY], ["7 days", 7 * DAY],
  ["until it is resumed", ""],
];

// `run` is called with the fields and gives what was done, in words.
function confirmed({ title, text, fields = [], does, danger = false, run, then }) {
  const form = sure.querySelector("form"), wrong = sure.querySelector(".wrong");
  const button = sure.querySelector(".do");
  fillText(sure.querySelector("h2"), title);
  fillText(document.getElementById("sure-text"), text);
  fillText(button, does);
  button.classList.toggle("danger", danger);
  wrong.textContent = "";
  button.disabled = false;
  sure.querySelector(".fields").replaceChildren(...fields.map(({ label, options, type, ...attributes }) => {
    if (type === "checkbox") return make("label", { class: "check" }, make("input", { type, ...attributes }), label);
    if (!options) return make("label", {}, label, make("input", { autocomplete: "off", spellcheck: "false", ...attributes }));
    const choices = options.map(([said, value]) => make("option", { value }, said));
    return make("label", {}, label, make("select", attributes, ...choices));
  }));
  const submit = async (event) => {
    event.preventDefault();
    button.disabled = true;
    // It may have been closed meanwhile, and ask another question.
    const asksThis = () => sure.open && form.onsubmit === submit;
    try {
      const done = await run(Object.fromEntries(new FormData(form)));
      if (asksThis()) sure.close();
      say(done);
      then(done);
    } catch (error) {
      if (error instanceof LoggedOut) go();
      else if (asksThis()) wrong.textContent = error.message;
      else say(error.message);
    } finally {
      if (asksThis()) button.disabled = false;
    }
  };
  form.onsubmit = submit;
  sure.showModal();
  if (danger && !fields.length) sure.querySelector(".no").focus();
}

sure.querySelector(".no").addEventListener("click", () => sure.close());
sure.addEventListener("close", () => {
  // The button that opened it has the focus again, unless it is gone.
  if (document.activeElement === document.body) main.querySelector("h1").focus();
});

function redelivered(answer, event, server) {
  const refused = answer.refused.map(({ reason }) => reason);
  if (refused.length) throw new Refused(refused.join("; "));
  return `${event} goes to ${server} again`;
}

const ACTIONS = {
  Wake: (server) => ({
    title: `Try ${server} now?`,
    text: "It is attempted at once, however long it would still wait.",
    does: "Wake",
    run: async () => {
      const left = (await tell("notify_remote_server_up", { servers: [server] })).left_alone[server];
      return left === undefined ? `woken: ${server}` : `left alone: ${server}: ${left}`;
    },
  }),
  Pause: (server) => ({
    title: `Pause ${server}?`,
    text: "Nothing is sent to it until the pause ends. What it is owed is kept.",
    fields: [
      { name: "for_ms", label: "For", options: PAUSES },
      REASON,
      { name: "by", label: "Your name", maxlength: 100 },
    ],
    does: "Pause",
    run: ({ for_ms, reason, by }) =>
      hold("pause", server, { reason, for_ms: for_ms ? Number(for_ms) : null, by: by.trim() || null }),
  }),
  Resume: (server) => ({
    title: `Resume ${server}?`,
    text: "Its pause or park ends, and what it is owed is sent.",
    does: "Resume",
    run: () => hold("resume", server),
  }),
  Park: (server) => ({
    title: `Park ${server}?`,
    text: "For a server that is believed to be gone: nothing is sent to it until it is resumed."
      + " What it is owed is kept.",
    fields: [REASON],
    does: "Park",
    run: ({ reason }) => hold("park", server, { reason }),
  }),
  Redeliver: (server) => ({
    title: `Send an event to ${server} again?`,
    text: "It goes if the server may see it, in the order of its room.",
    fields: [{ name: "event", label: "Event ID", required: true, pattern: "\\$.+" }],
    does: "Redeliver",
    run: async ({ event }) => redelivered(await tell("redeliver", { pairs: [[server, event]] }), event, server),
  }),
  Purge: (server) => ({
    title: `Purge ${server}?`,
    text: "The server is forgotten with all that it is owed. This cannot be undone.",
    fields: [
      { name: "typed", label: `To confirm, type ${server}`, required: true },
      {
        name: "force", type: "checkbox",
        label: "Also while rooms are shared with it, whose events it then misses",
      },
    ],
    does: "Purge",
    danger: true,
    run: async ({ typed, force }) => {
      if (typed.trim() !== server) throw new Refused("this is not the name of the server");
      await tell("purge", { server, force: force !== undefined });
      return `purged: ${server}`;
    },
    then: (done) => {
      parting = done;
      location.hash = "#/";
    },
  }),
};

// --- the views -----------------------------------------------------------------------------------

const asked = { behind: true, state: "", sort: "age", pattern: "", from: "" };
const SORTS = { SERVER: "name", OWED: "owed", OLDEST: "age", FAILING: "fails" };

function showServers(view, again) {
  // What the daemon refuses is forgotten with the view.
  const wanted = { ...asked };
  const form = view.querySelector(".filter"), list = view.querySelector(".list");
  for (const [name, value] of Object.entries(wanted)) {
    const field = form.elements[name];
    if (field?.type === "checkbox") field.checked = value;
    else if (field) field.value = value;
  }

  function change() {
    const { behind, state, sort, pattern } = form.elements;
    Object.assign(wanted, {
      behind: behind.checked, state: state.value, sort: sort.value, pattern: pattern.value.trim(), from: "",
    });
    again();
  }
  form.addEventListener("change", change);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    change();
  });
  const heads = Object.fromEntries(Object.entries(SORTS).map(([title, sort]) => [title, button(title, () => {
    form.elements.sort.value = sort;
    change();
  })]));

  return async (signal) => {
    const { state, pattern, ...rest } = wanted;
    const query = new URLSearchParams({ ...rest, pattern: pattern || "*", limit: ROWS });
    if (state) query.set("state", state);
    const answer = await ask(`page/overview?${query}`, undefined, signal);
    Object.assign(asked, wanted);
    fillText(view.querySelector(".title"), answer.title);
    const readiness = view.querySelector(".readiness");
    readiness.classList.toggle("not", !answer.ready);
    while (readiness.children.length > answer.readiness.length) readiness.lastChild.remove();
    answer.readiness.forEach((text, at) =>
      fillText(readiness.children[at] ?? readiness.appendChild(make("li")), text));
    fillFacts(view.querySelector(".facts"), answer.facts);
    drawHour(view.querySelector(".hour"), answer.hour);
    const classes = view.querySelector("details");
    classes.hidden = !answer.by_error.rows.length;
    fillTable(classes.querySelector("table"), answer.by_error);
    fillTable(list, answer.table, answer.keys, { heads });
    for (const [title, sort] of Object.entries(SORTS)) {
      const head = list.querySelector(`th[data-title="${title}"]`);
      if (sort !== wanted.sort) head.removeAttribute("aria-sort");
      else head.setAttribute("aria-sort", sort === "name" ? "ascending" : "descending");
    }
    const many = (number) => number.toLocaleString("en");
    const none = answer.table.rows.length ? "" : "No server is on this list. ";
    fillText(view.querySelector(".foot"), `${none}${answer.footer}; ${many(answer.total)} on this list`);
    fillPager(view.querySelector(".pager"), answer.next_from, wanted, again);
  };
}

function fillPager(pager, next, at, again) {
  const state = `${at.from} ${next}`;
  if (pager.state === state) return;
  pager.state = state;
  const turn = (from) => () => {
    at.from = from;
    again();
    main.querySelector("h1").focus();
  };
  pager.replaceChildren();
  if (at.from) pager.append(button("First page", turn("")));
  if (next !== null) pager.append(button("Next page", turn(next)));
}

function showServer(view, again, server) {
  fillText(view.querySelector("h1"), server);
  document.title = `${server} · fedsender`;
  const actions = view.querySelector(".actions"), picture = view.querySelector(".picture");
  const rooms = { most: PART };
  let attempts = null;
  const then = () => {
    attempts = null;
    again();
  };
  const askFirst = (name) => () => confirmed({ then, ...ACTIONS[name](server) });
  const buttons = Object.fromEntries(Object.keys(ACTIONS).map((name) => [name, button(`${name}…`, askFirst(name))]));
  buttons.Purge.classList.add("danger");
  actions.append(...Object.values(buttons), button("Look again", then));

  return async (signal) => {
    const name = encodeURIComponent(server);
    const answer = await ask(`page/why/${name}`, undefined, signal);
    if (!answer.held && document.activeElement === buttons.Resume) view.querySelector("h1").focus();
    buttons.Resume.hidden = !answer.held;
    fillFacts(view.querySelector(".facts"), answer.facts.slice(1));
    fillText(view.querySelector(".rooms-said"), answer.said);
    const table = view.querySelector(".rooms");
    const pager = table.nextElementSibling;
    const fillRooms = () => fillPart(table, pager, answer.table, null, rooms, fillRooms);
    fillRooms();
    if (attempts !== null) return;
    attempts = await ask(`page/attempts/${name}`, undefined, signal);
    const cut = attempts.cut === null ? "" : `; ${attempts.cut}`;
    const none = "The ledger has no attempt.";
    fillText(view.querySelector(".attempts-said"), attempts.points.length ? attempts.said + cut : none);
    if (!attempts.points.length) return;
    const { words, ordered } = fillParts(view, view.querySelector(".attempts"), attempts, "OUTCOME");
    redraw = () => drawAttempts(picture, attempts, words, ordered);
    redraw();
  };
}

function showEvent(view, again, event) {
  fillText(view.querySelector("h1"), event);
  document.title = `${event} · fedsender`;
  const redeliver = {
    title: "Send this event again?",
    text: "It goes if the server may see it, in the order of its room.",
    fields: [{ name: "server", label: "To the server", required: true }],
    does: "Redeliver",
    run: async ({ server }) => redelivered(await tell("redeliver", { pairs: [[server.trim(), event]] }), event, server.trim()),
    then: again,
  };
  view.querySelector(".actions").append(button("Redeliver…", () => confirmed(redeliver)), button("Look again", again));

  return async (signal) => {
    const answer = await ask(`page/trace/${encodeURIComponent(event)}`, undefined, signal);
    view.querySelector(".facts").replaceChildren(...answer.facts.map((text) => make("li", {}, text)));
    view.querySelector("section").hidden = !answer.keys.length;
    if (!answer.keys.length) return;
    const { words, ordered } = fillParts(view, view.querySelector(".fates"), answer, "OUTCOME");
    const [picture, pointed] = [view.querySelector(".picture"), view.querySelector(".pointed")];
    redraw = () => drawMap(picture, answer, words, ordered, pointed);
    redraw();
  };
}

const RELEASE = "Each event goes to its server after all, in the order of its room. EDUs cannot be released.";

function showQuarantine(view, again) {
  const at = { from: "", server: "" };
  const form = view.querySelector(".filter"), table = view.querySelector(".items");
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("change", () => {
    Object.assign(at, { from: "", server: form.elements.server.value.trim() });
    again();
  });
  const boxes = () => [...table.querySelectorAll("tbody input")];
  const chosen = () => boxes().filter((box) => box.checked).map((box) => Number(box.value));
  const all = make("input", { type: "checkbox" });
  all.addEventListener("change", () => boxes().forEach((box) => (box.checked = all.checked)));
  const choose = (id) => make(
    "td", { role: "cell", class: "choose" },
    make("input", { type: "checkbox", value: id, "aria-label": `Choose item ${id}` }),
  );
  const items = (ids) => `${ids.length} ${ids.length === 1 ? "item" : "items"}`;
  const mark = () => (all.checked = boxes().length > 0 && boxes().every((box) => box.checked));
  table.addEventListener("change", mark);
  const act = (name, text, danger, run) => button(`${name} the chosen…`, () => {
    const ids = chosen();
    if (!ids.length) say("Choose an item first.");
    else confirmed({ title: `${name} ${items(ids)}?`, text, does: name, danger, then: again, run: () => run(ids) });
  }, danger ? { class: "danger" } : {});
  view.querySelector(".actions").append(
    make("label", { class: "check" }, all, "All on this page"),
    act("Release", RELEASE, false, async (ids) => {
      const { released, kept, refused } = await tell("quarantine/release", { ids });
      const said = [`released: ${released.join(", ") || "none"}`];
      if (kept.length) said.push(`kept: ${kept.join(", ")}`);
      return [...said, ...refused.map(({ event_id, reason }) => `${event_id}: ${reason}`)].join("; ");
    }),
    act("Drop", "The items are given up for good. This cannot be undone.", true, async (ids) => {
      const { dropped } = await tell("quarantine/drop", { ids });
      return `dropped: ${dropped.join(", ")}`;
    }),
  );

  return async (signal) => {
    const query = new URLSearchParams({ from: at.from || 0 });
    if (at.server) query.set("destination", at.server);
    const answer = await ask(`page/quarantine?${query}`, undefined, signal);
    view.querySelector(".actions").hidden = !answer.keys.length;
    const number = answer.keys.length;
    const where = at.from || answer.next_from !== null ? " on this page" : "";
    fillText(view.querySelector(".foot"), number ? `${items(answer.keys)}${where}, the oldest first` : "Nothing is in quarantine.");
    fillTable(table, answer.table, answer.keys, { first: choose, named: false });
    mark();
    fillPager(view.querySelector(".pager"), answer.next_from, at, again);
  };
}

// --- where we are --------------------------------------------------------------------------------

// How each is shown, its template, and after how many ms it is asked for again.
const VIEWS = {
  __proto__: null,
  "": [showServers, "servers", OVERVIEW_MS],
  server: [showServer, "server", SERVER_MS],
  event: [showEvent, "event", null],
  quarantine: [showQuarantine, "quarantine", null],
};
let leaving = new AbortController();
let parting = "";
let redraw = () => {};

function place(name) {
  leaving.abort();
  leaving = new AbortController();
  redraw = () => {};
  if (sure.open) sure.close();
  main.classList.toggle("filling", name !== "login");
  main.replaceChildren(document.getElementById(`view-${name}`).content.cloneNode(true));
  return leaving.signal;
}

function enter() {
  place("login");
  say("");
  document.title = "fedsender";
  document.getElementById("top").hidden = true;
  const form = main.querySelector("form"), token = form.querySelector("#token");
  token.focus();
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const wrong = form.querySelector(".wrong");
    wrong.textContent = "";
    try {
      const { key } = await ask("login", { token: token.value.trim() });
      localStorage.setItem(KEY, key);
      go();
    } catch (error) {
      wrong.textContent = error.message;
      token.select();
    }
  });
}

function go() {
  if (!localStorage.getItem(KEY)) return enter();
  const [, kind = "", name = ""] = location.hash.match(/^#\/([a-z]*)(?:\/(.*))?$/) ?? [];
  const [show, template, every] = VIEWS[kind] ?? VIEWS[""];
  document.getElementById("top").hidden = false;
  const signal = place(template);
  say(parting);
  parting = "";
  document.title = `${main.querySelector("h1").textContent} · fedsender`;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#/${kind}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  let due = Promise.withResolvers();
  const again = () => due.resolve();
  signal.addEventListener("abort", again);
  let wanted = name;
  try {
    wanted = decodeURIComponent(name);
  } catch {
    // An address that was typed may have any % in it.
  }
  const fill = show(main, again, wanted);
  main.querySelector("h1").focus({ preventScroll: true });
  scrollTo(0, 0);
  keepFilled(fill, signal, async () => {
    const timer = every && setInterval(() => canLook() && again(), every);
    await due.promise;
    clearInterval(timer);
    due = Promise.withResolvers();
  });
}

const live = document.getElementById("live");
const canLook = () => live.checked && !document.hidden && !sure.open;

// Fills the view now and each time that it is due, until another view is shown.
async function keepFilled(fill, signal, due) {
  let failed = false;
  while (!signal.aborted) {
    try {
      await fill(signal);
      main.classList.remove("filling");
      if (failed) say("");
      failed = false;
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof LoggedOut) return go();
      const text = error instanceof Refused ? error.message : String(error);
      if (!failed) say(`${text} (${new Date().toLocaleTimeString()})`);
      failed = true;
    }
    await due();
  }
}

document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.querySelector("h1")?.focus();
});
document.getElementById("find").addEventListener("submit", (event) => {
  event.preventDefault();
  const wanted = document.getElementById("wanted").value.trim();
  const kind = wanted.startsWith("$") ? "event" : "server";
  const there = `#/${kind}/${encodeURIComponent(wanted)}`;
  if (location.hash === there) go();
  else location.hash = there;
});
document.getElementById("leave").addEventListener("click", async () => {
  try {
    await ask("logout", {});
  } catch {
    // The key is forgotten in any case.
  }
  localStorage.removeItem(KEY);
  enter();
});
addEventListener("hashchange", go);
addEventListener("resize", () => redraw());
go();
