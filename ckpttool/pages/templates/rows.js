// Objects are stored as lists of values, after the number of their keys; `stats.min` is a key of the object `stats`.
function unpacked({ keys, items }) {
  const split = keys.map((names) => names.map((name) => name.split(".")));
  return items.map((values) => {
    const made = {};
    split[values[0]].forEach(([outer, inner], at) => {
      if (inner === undefined) made[outer] = values[at + 1];
      else (made[outer] ??= {})[inner] = values[at + 1];
    });
    return made;
  });
}
// The rows in the order of the tree: a module, then all that is in it. Empty values are not in the data.
const packed = JSON.parse(document.getElementById("data").textContent), rows = unpacked(packed.rows), changes = unpacked(packed.changes);
const parent = new Int32Array(rows.length), end = new Int32Array(rows.length).fill(rows.length);
const place = new Int32Array(rows.length), siblings = new Map(), byId = new Map();
// How many rows below a module are changed, and how many signs they have.
const changedBelow = new Int32Array(rows.length), signsBelow = new Int32Array(rows.length);
{
  const open = [];
  rows.forEach((row, index) => {
    while (open.length > row.level) end[open.pop()] = index;
    parent[index] = open.length ? open[open.length - 1] : -1;
    row.path ??= open.length ? `${rows[parent[index]].path}/${row.name}` : row.name;
    if (row.shape) row.size = row.shape.reduce((size, extent) => size * extent, 1);
    if (row.stats) row.stats.elements ??= row.size;
    siblings.set(parent[index], (siblings.get(parent[index]) ?? 0) + 1);
    place[index] = siblings.get(parent[index]);
    if (row.id !== undefined) byId.set(row.id, index);
    if (row.change !== undefined) for (const above of open) changedBelow[above]++;
    if (row.change >= 0) changes[row.change].path ??= row.path;
    if (row.signs) for (const above of open) signsBelow[above] += row.signs.length;
    open.push(index);
  });
}
const kindOf = (row) => row.module ? "module" : row.id !== undefined ? "tensor" : "value";
const shapeOf = (row) => `[${row.shape.join(", ")}]`;

const made = new Map(), states = new Map(), opened = new Set(), expanded = new Set();
let terms = [];

function elementOf(index) {
  if (made.has(index)) return made.get(index);
  const row = rows[index], kind = kindOf(row), item = make("div", `item ${kind}`), line = make("div", "row");
  // The row is the tree's item, named by what it shows; an open panel is an item of its own below it.
  item.setAttribute("role", "none"); line.setAttribute("role", "treeitem"); line.setAttribute("aria-level", row.level + 1);
  line.setAttribute("aria-setsize", siblings.get(parent[index])); line.setAttribute("aria-posinset", place[index]);
  line.tabIndex = -1; line.dataset.index = index; line.style.setProperty("--level", row.level);
  const name = make("span", "name"), text = make("span", "text");
  text.title = row.path;
  name.append(make("span", "caret"), text);
  const type = make("span", "type"), mark = markOf(index);
  line.append(name, type);
  if (kind === "value") {
    type.textContent = `${row.type} `; type.append(make("i", "", row.value)); type.title = row.value;
  } else {
    const spark = make("span", "spark"), stats = row.stats ?? {}, many = row.size > 1;
    if (kind === "module") type.title = type.textContent = row.kind ?? (row.tensors ? counting(row.tensors, "tensor", "tensors") : "plain values");
    else { type.textContent = `${row.dtype} `; type.append(make("i", "", shapeOf(row))); if (row.histogram) spark.append(bars(row.histogram)); else if (row.size === 1 && "mean" in stats) { spark.classList.add("lone"); spark.textContent = `= ${short(stats.mean)}`; } }
    const tag = kind === "tensor" ? tagOf(row) : "";
    if (tag) { const owner = make("span", "tag", tag); owner.title = tag; name.append(owner); }
    if (row.also) { const also = make("span", "tag", `also ${row.also}`); also.title = row.aliases.join("\n"); name.append(also); }
    const count = kind === "module" ? row.parameters : row.size;
    line.append(make("span", "size", count ? number(count) : ""), make("span", "nbytes", row.nbytes ? bytes(row.nbytes) : ""), spark,
      make("span", "mean", many && "mean" in stats ? short(stats.mean) : ""), make("span", "std", many && "std" in stats ? short(stats.std) : ""), mark);
    if (mark.textContent) item.classList.add("marked");
  }
  item.append(line);
  made.set(index, item);
  return item;
}

const lineOf = (index) => elementOf(index).firstElementChild;

// What a tensor is besides a trained one; a slot names its parameter, since its own path may only count.
function tagOf(row) {
  if (row.of === undefined || !byId.has(row.of)) return row.slot || (row.frozen ? "frozen" : row.role);
  return `${row.slot === row.name ? "" : `${row.slot} `}of ${rows[byId.get(row.of)].path}`;
}

// Marks of entries that one side lacks: -1 and -2.
const onlyIn = (row) => `only in ${row.change === -1 ? "A" : "B"}`;

function markOf(index) {
  const row = rows[index], mark = make("span", "mark");
  if (row.module) {
    if (changedBelow[index]) mark.append(make("span", "dot"), `${number(changedBelow[index])}`);
    else if (signsBelow[index]) { mark.classList.add("sign"); mark.textContent = counting(signsBelow[index], "sign", "signs"); }
    return mark;
  }
  if (row.change >= 0) mark.append(make("span", "dot"), changes[row.change].max_abs ?? changes[row.change].what ?? "values");
  else if (row.change < 0) mark.textContent = onlyIn(row);
  else if (row.signs) { mark.classList.add("sign"); mark.textContent = counting(row.signs.length, "sign", "signs"); }
  return mark;
}

// Bring an element to what is known now: is it open, and which letters were searched for.
function refresh(index, isOpen) {
  const item = elementOf(index), row = rows[index], kind = kindOf(row), state = `${isOpen} ${terms.join(" ")}`;
  if (states.get(index) === state) return item;
  states.set(index, state);
  if (kind !== "value") lineOf(index).setAttribute("aria-expanded", String(isOpen));
  const text = item.querySelector(".text");
  text.replaceChildren(...highlighted(row.name));
  const panel = item.querySelector(".panel");
  if (kind === "tensor" && isOpen && !panel) item.append(panelOf(index));
  if (kind === "tensor" && !isOpen && panel) panel.remove();
  return item;
}

function highlighted(name) {
  const low = name.toLowerCase(), found = terms.map((term) => [low.indexOf(term), term.length]).filter(([at]) => at >= 0).sort((a, b) => a[0] - b[0]);
  const parts = [];
  let at = 0;
  // A letter whose lower case is longer would shift all places: such names are shown plain.
  if (low.length !== name.length) return [name];
  for (const [start, length] of found) {
    if (start < at) continue;
    parts.push(name.slice(at, start), make("mark", "", name.slice(start, start + length)));
    at = start + length;
  }
  return [...parts, name.slice(at)];
}
