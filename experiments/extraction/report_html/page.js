
"use strict";
// The table of windows and the window that is open. Texts come from a corpus that may
// hold anything, so they are put into the page as textContent and in no other way.

const data = JSON.parse(document.getElementById("data").textContent);
const PAGE_SIZE = 100;
const byId = (id) => document.getElementById(id);
const [head, body] = byId("list").children;
const filters = byId("filters");

const state = {
  rows: [],       // Places in data.rows, filtered and sorted.
  focused: 0,     // Place in state.rows of the row that keys move from.
  open: null,     // Place in data.rows.
  column: 0,      // That rows are sorted by.
  descending: false,
};

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function count(value) {
  return value.toLocaleString("en-US");
}

function signed(value) {
  const text = Math.abs(value).toPrecision(3);
  return (value < 0 ? "\u2212" : "+") + text;
}

// --- Columns ---

/** The column of a measure of windows; none if nothing is known of it. */
function plainness(title, key, text) {
  if (data.rows.every((row) => row[key] === null)) return [];
  const known = (row) => (row[key] === null ? "\u2013" : text(row[key]));
  return [{ title, value: (row) => row[key], text: known }];
}

const FACTS = [
  { title: "window", value: (row) => row.window_id, text: (row) => `${row.window_id}` },
  { title: "length", value: (row) => row.length, text: (row) => `${row.length}` },
  { title: "context", value: (row) => row.context, text: (row) => `${row.context}` },
  { title: "count", value: (row) => row.count, text: (row) => count(row.count) },
  ...plainness("white space", "whitespace", (share) => `${(100 * share).toFixed(1)}%`),
  ...plainness("entropy", "entropy", (bits) => bits.toFixed(2)),
];
const MODELS = data.models.map((model, i) => ({
  title: model.name,
  value: (row) => measured(row.answers[i]),
  text: (row) => verdict(row.answers[i]),
  style: (row) => style(row.answers[i]),
}));
const COLUMNS = [...FACTS, ...MODELS];
const COUNT_COLUMN = 3;

/** What a model's column sorts by; null where it is not known. */
function measured(answer) {
  if (answer === null) return null;
  return answer[byId("measure").value] ?? Number(answer.extracted);
}

function verdict(answer) {
  if (answer === null) return "\u2013";
  const sign = answer.extracted ? "\u2713" : "\u2717";
  const measure = byId("measure").value;
  const value = answer[measure];
  if (value === null) return sign;
  return `${sign} ${measure === "margin" ? signed(value) : value}`;
}

function style(answer) {
  if (answer === null) return "";
  return answer.extracted ? "yes" : "no";
}

// --- Which rows, in which order ---

const texts = new Map();

/** The text of a window in lower case, to look for text in. */
function textOf(windowId) {
  if (!texts.has(windowId)) {
    const ids = data.windows?.[windowId] ?? [];
    texts.set(windowId, ids.map(tokenText).join("").toLowerCase());
  }
  return texts.get(windowId);
}

// What of a row has inputs for a range, and what 1 means in them.
const RANGES = [["count", 1], ["whitespace", 0.01], ["entropy", 1]];

/** What an input says; null if it is empty. */
function limit(id, unit) {
  const value = byId(id)?.valueAsNumber ?? NaN;
  return Number.isNaN(value) ? null : value * unit;
}

/** Whether a value is in a range; what is not known is in none that has an end. */
function inside(value, low, high) {
  if (low === null && high === null) return true;
  // Shares have four digits, and a hundredth is no binary number.
  const isAbove = low === null || value >= low - 1e-6;
  const isBelow = high === null || value <= high + 1e-6;
  return value !== null && isAbove && isBelow;
}

function selectRows() {
  const selection = data.selections[byId("selection").value];
  const length = byId("length").value;
  const context = byId("context").value;
  const ranges = RANGES.map(([key, unit]) =>
    [key, limit(`${key}-low`, unit), limit(`${key}-high`, unit)]);
  const text = byId("filter").value.toLowerCase();
  const isText = text.trim() !== "";
  const places = selection ? selection.rows : data.rows.map((_, place) => place);
  state.rows = places.filter((place) => {
    const row = data.rows[place];
    return (
      (length === "" || row.length === Number(length)) &&
      (context === "" || row.context === Number(context)) &&
      ranges.every(([key, low, high]) => inside(row[key], low, high)) &&
      (!isText || `${row.window_id}` === text.trim() || textOf(row.window_id).includes(text))
    );
  });
  sortRows();
}

function sortRows() {
  const { value } = COLUMNS[state.column];
  const sign = state.descending ? -1 : 1;
  const keys = new Map(state.rows.map((place) => [place, value(data.rows[place])]));
  state.rows.sort((a, b) => {
    const [x, y] = [keys.get(a), keys.get(b)];
    // What is not known comes last, whichever the order.
    if (x === null || y === null) return (x === null) - (y === null) || a - b;
    return sign * (x - y) || a - b;
  });
  state.focused = 0;
  showList();
}

function sortBy(column) {
  // The first click shows small windows and counts first, and of models what they know.
  const again = state.column === column;
  state.descending = again ? !state.descending : column >= FACTS.length;
  state.column = column;
  sortRows();
}

// --- The table ---

function showList() {
  const numPages = Math.max(1, Math.ceil(state.rows.length / PAGE_SIZE));
  const page = Math.floor(state.focused / PAGE_SIZE);
  const first = page * PAGE_SIZE;
  head.replaceChildren(element("tr", { "aria-rowindex": 1 }, ...COLUMNS.map(header)));
  const shown = state.rows.slice(first, first + PAGE_SIZE);
  body.replaceChildren(...shown.map((place, i) => listRow(place, first + i)));
  byId("list").setAttribute("aria-rowcount", state.rows.length + 1);
  byId("page").textContent = `Page ${count(page + 1)} of ${count(numPages)}`;
  byId("previous").disabled = page === 0;
  byId("next").disabled = page === numPages - 1;
  byId("status").textContent = state.rows.length
    ? `${count(state.rows.length)} of ${count(data.rows.length)} prompts`
    : "No prompt fits: clear the filters.";
}

function header(column, i) {
  const sorted = i === state.column;
  const arrow = sorted ? (state.descending ? " \u2193" : " \u2191") : "";
  const button = element("button", { type: "button", title: column.title }, column.title + arrow);
  button.addEventListener("click", () => {
    sortBy(i);
    head.querySelectorAll("button")[i].focus();
  });
  const order = state.descending ? "descending" : "ascending";
  return element("th", { scope: "col", "aria-sort": sorted ? order : "none" }, button);
}

function listRow(place, position) {
  const row = data.rows[place];
  const cells = COLUMNS.map((column) =>
    element("td", { class: column.style ? column.style(row) : "" }, column.text(row)));
  return element("tr", {
    "aria-rowindex": position + 2,
    "aria-selected": place === state.open,
    tabindex: position === state.focused ? 0 : -1,
    "data-position": position,
  }, ...cells);
}

function focusRow(position) {
  if (state.rows.length === 0) return;
  state.focused = Math.min(Math.max(position, 0), state.rows.length - 1);
  showList();
  body.querySelector('tr[tabindex="0"]').focus();
}

function openRow(position) {
  state.open = state.rows[position];
  focusRow(position);
  showDetails(data.rows[state.open]);
  byId("status").textContent = `Window ${data.rows[state.open].window_id} is open`;
}

// --- The open window ---

/** What one token says; its id, and a space, if there is no vocabulary. */
function tokenText(id) {
  return data.vocabulary?.[id] ?? `${id} `;
}

function tokens(ids, kind = "", start = 0) {
  return ids.map((id, i) =>
    element("span", { class: kind, title: `token ${start + i + 1}, id ${id}` }, tokenText(id)));
}

function passage(...children) {
  return element("p", { class: "tokens" }, ...children);
}

function showDetails(row) {
  const parts = [element("h3", {}, `Window ${row.window_id}`),
    element("p", { class: "hint" },
      `${row.length} tokens, context ${row.context}; ` +
      `count in the corpus: ${count(row.count)} (bucket ${row.bucket})` +
      FACTS.slice(COUNT_COLUMN + 1).map((fact) => `; ${fact.title}: ${fact.text(row)}`).join(""))];
  const window = data.windows?.[row.window_id];
  const blanks = data.suffix_length === null;
  const truth = blanks ? undefined : window?.slice(row.context, row.context + row.targets);
  if (window && blanks) {
    parts.push(
      element("h3", {}, "Window"), passage(...tokens(window)),
      element("p", { class: "hint" },
        `${row.length - row.context} of these tokens were dropped, and ${row.targets} ` +
        "had to be predicted to fill them in."),
    );
  } else if (window) {
    parts.push(
      element("h3", {}, "Prompt"),
      row.context ? passage(...tokens(window.slice(0, row.context)))
        : element("p", { class: "hint" }, "The prompt is empty."),
      element("h3", {}, "True suffix"), passage(...tokens(truth)),
    );
  } else {
    parts.push(element("p", {}, "The text of the window is not known: see above."));
  }
  data.models.forEach((model, i) => parts.push(...answer(model, row, i, truth)));
  byId("details").replaceChildren(...parts);
  byId("details").scrollTop = 0;
  byId("details").scrollIntoView({ block: "nearest" });
}

function answer(model, row, place, truth) {
  const found = row.answers[place];
  const kind = model.baseline ? ", baseline" : "";
  const title = element("h3", {}, model.name,
    element("span", { class: "hint" }, ` ${count(model.params)} parameters${kind}`));
  if (found === null) return [title, element("p", { class: "hint" }, "Was not asked.")];
  const facts = [found.extracted ? "\u2713 memorised" : "\u2717 not memorised"];
  if (found.right !== null) facts.push(`${found.right} of ${row.targets} tokens right`);
  if (found.margin !== null) facts.push(`least margin ${signed(found.margin)}`);
  const summary = element("p", { class: style(found) }, facts.join("; "));
  return [title, summary, ...continuation(found, row.targets, truth)];
}

/** The continuation, token by token, beside the truth; or what is known of it. */
function continuation(found, targets, truth) {
  const { matching, rest } = found;
  if (matching === null) {
    return [element("p", { class: "hint" }, "The sweep took verdicts only.")];
  }
  const first = `The first mismatch is at token ${matching + 1} of ${targets}`;
  if (data.suffix_length === null) {
    return found.extracted ? [] : [element("p", { class: "hint" }, `${first}.`)];
  }
  const same = truth ? tokens(truth.slice(0, matching), "same") : [];
  if (rest === null) {
    const why = `${first}; the sweep did not decode, so what comes there is not known.`;
    const shown = same.length ? [passage(...same, sign("\u2260 \u2026"))] : [];
    return [...shown, element("p", { class: "hint" }, why)];
  }
  if (!truth) return rest.length ? [element("p", { class: "hint" }, `${first}.`)] : [];
  const others = rest.map((id, i) => {
    const matches = id === truth[matching + i];
    return tokens([id], matches ? "same" : "different", matching + i)[0];
  });
  if (!rest.length) return [passage(...same)];
  const right = targets - others.filter((o) => o.className === "different").length;
  const words = `${first}; ${right} of ${targets} tokens are those of the truth, ` +
    "at their places. Tokens that differ are underlined.";
  return [passage(...same, sign("\u2260"), ...others), element("p", { class: "hint" }, words)];
}

function sign(text) {
  return element("span", { class: "sign", "aria-hidden": "true" }, text);
}

// --- Controls ---

function fillControls() {
  data.selections.forEach((selection, i) => {
    const title = `${selection.title}: ${count(selection.rows.length)} of ${count(selection.all)}`;
    byId("selection").append(element("option", { value: i }, title));
  });
  for (const [key] of RANGES) {
    if (data.rows.some((row) => row[key] !== null)) continue;
    for (const end of ["low", "high"]) byId(`${key}-${end}`).closest("label").remove();
  }
  for (const name of ["length", "context"]) {
    const values = [...new Set(data.rows.map((row) => row[name]))].sort((a, b) => a - b);
    byId(name).append(...values.map((value) => element("option", { value }, `${value}`)));
  }
}

function takeSelection() {
  const selection = data.selections[byId("selection").value];
  if (selection && selection.descending !== null) {
    state.column = COUNT_COLUMN;
    state.descending = selection.descending;
  }
}

const MOVES = { ArrowDown: 1, ArrowUp: -1, PageDown: PAGE_SIZE, PageUp: -PAGE_SIZE,
  Home: -Infinity, End: Infinity };

body.addEventListener("keydown", (event) => {
  const position = Number(event.target.dataset.position);
  if (event.ctrlKey || event.altKey || event.metaKey) return;
  if (event.key in MOVES) focusRow(position + MOVES[event.key]);
  else if (event.key === "Enter" || event.key === " ") openRow(position);
  else return;
  event.preventDefault();
});
body.addEventListener("click", (event) => {
  const row = event.target.closest("tr");
  if (row) openRow(Number(row.dataset.position));
});
byId("previous").addEventListener("click", () => turnPage(-1));
byId("next").addEventListener("click", () => turnPage(1));

function turnPage(step) {
  state.focused = (Math.floor(state.focused / PAGE_SIZE) + step) * PAGE_SIZE;
  showList();
}

document.addEventListener("keydown", (event) => {
  const typing = event.target.matches("input, select");
  if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey) {
    event.preventDefault();
    byId("filter").focus();
  } else if (event.key === "Escape" && byId("windows").contains(event.target)) {
    // A list that is open closes, and a text to look for goes, before the row is back.
    const { target } = event;
    const isBusy = target.matches("select") || (target.id === "filter" && target.value !== "");
    if (!isBusy) focusRow(state.focused);
  }
});
filters.addEventListener("input", (event) => {
  if (event.target.id === "selection") takeSelection();
  selectRows();
});
// A form is cleared after its event.
filters.addEventListener("reset", () => setTimeout(selectRows));
filters.addEventListener("submit", (event) => event.preventDefault());
filters.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || !event.target.matches("input")) return;
  event.preventDefault();
  focusRow(0);
});

fillControls();
selectRows();
