// Which rows are seen, and going through them by keyboard. Rows become elements as they are scrolled to.
const tree = document.getElementById("tree"), more = document.getElementById("more"), rest = more.parentElement;
const AT_ONCE = 120, FIRST = 48;
let visible = [], limit = AT_ONCE, current = 0;
// While something is searched for: by row, 1 for what is shown.
let kept = null;

const isOpen = (index) => rows[index].module ? (kept ? !closedInSearch.has(index) : expanded.has(index)) : opened.has(index);
const closedInSearch = new Set();

function walked() {
  const found = [];
  for (let index = 0; index < rows.length;) {
    if (kept && !kept[index]) { index = rows[index].module ? end[index] : index + 1; continue; }
    found.push(index);
    index = rows[index].module && !isOpen(index) ? end[index] : index + 1;
  }
  return found;
}

function show() {
  visible = walked();
  tree.replaceChildren(...elements(0));
  if (!visible.length) tree.append(make("p", "none", rows.length ? "No tensor matches." : "Empty."));
  showRest();
  if (made.has(current)) lineOf(current).tabIndex = -1;
  if (!visible.includes(current) && visible.length) current = visible[0];
  if (made.has(current)) lineOf(current).tabIndex = 0;
}

const elements = (from) => visible.slice(from, limit).map((index) => refresh(index, isOpen(index)));
function showRest() {
  rest.hidden = visible.length <= limit;
  more.textContent = `Show more: ${counting(Math.max(0, visible.length - limit), "row", "rows")} below`;
}
function extend(to = limit + AT_ONCE * 2) {
  const from = limit;
  limit = to;
  tree.append(...elements(from));
  showRest();
}

function focus(index) {
  const at = visible.indexOf(index);
  if (at < 0) return;
  if (at >= limit) extend(at + AT_ONCE);
  if (made.has(current)) lineOf(current).tabIndex = -1;
  current = index;
  const line = lineOf(index);
  line.tabIndex = 0; line.focus({ preventScroll: true });
  line.scrollIntoView({ block: "nearest", behavior: "instant" });
}

function toggle(index) {
  const row = rows[index];
  if (kindOf(row) === "value") return;
  const set = row.module ? (kept ? closedInSearch : expanded) : opened;
  if (set.has(index)) set.delete(index); else set.add(index);
  show();
}

// Open everything above a tensor and the tensor itself, and go there.
function reveal(index) {
  if (kept && !kept[index]) clearSearch();
  for (let above = parent[index]; above >= 0; above = parent[above]) { expanded.add(above); closedInSearch.delete(above); }
  if (!rows[index].module) opened.add(index);
  show();
  focus(index);
  elementOf(index).scrollIntoView({ block: "start", behavior: "instant" });
}

tree.addEventListener("click", (event) => {
  const line = event.target.closest(".row");
  if (!line) return;
  const index = Number(line.dataset.index);
  toggle(index); focus(index);
});

tree.addEventListener("keydown", (event) => {
  // What stands in a panel has its own keys.
  if (event.target.getAttribute("role") !== "treeitem" || event.ctrlKey || event.altKey || event.metaKey) return;
  const at = visible.indexOf(current), row = rows[current];
  const step = (to) => { if (to >= 0 && to < visible.length) focus(visible[to]); };
  const doing = {
    ArrowDown: () => step(at + 1),
    ArrowUp: () => step(at - 1),
    Home: () => step(0),
    End: () => step(visible.length - 1),
    PageDown: () => step(Math.min(visible.length - 1, at + 12)),
    PageUp: () => step(Math.max(0, at - 12)),
    ArrowRight: () => { if (kindOf(row) === "value") return; if (!isOpen(current)) { toggle(current); focus(current); } else if (row.module) step(at + 1); },
    ArrowLeft: () => { if (kindOf(row) !== "value" && isOpen(current)) { toggle(current); focus(current); } else if (parent[current] >= 0) focus(parent[current]); },
    Enter: () => { toggle(current); focus(current); },
    " ": () => { toggle(current); focus(current); },
  }[event.key];
  if (doing) { event.preventDefault(); doing(); }
});

more.addEventListener("click", () => extend());
new IntersectionObserver((seen) => { if (seen.some((each) => each.isIntersecting) && !rest.hidden) extend(); }, { rootMargin: "800px" }).observe(rest);

// At first as many levels are open as leave the whole in sight; what only holds the rest is opened in any case.
function unfoldFirst() {
  for (let level = 0; level < 12; level++) {
    const few = walked().length <= 3;
    const modules = rows.flatMap((row, index) => row.module && row.level === level ? [index] : []);
    modules.forEach((index) => expanded.add(index));
    if (!few && walked().length > FIRST) { modules.forEach((index) => expanded.delete(index)); return; }
  }
}
document.getElementById("unfold").addEventListener("click", () => { closedInSearch.clear(); rows.forEach((row, index) => row.module && expanded.add(index)); show(); });
document.getElementById("fold").addEventListener("click", () => {
  expanded.clear(); opened.clear(); limit = AT_ONCE;
  if (kept) rows.forEach((row, index) => row.module && closedInSearch.add(index));
  show();
});
