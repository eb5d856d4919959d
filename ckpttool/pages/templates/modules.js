// The page of `inspect --graph FILE.html`: the drawing of the computation, and a tree whose modules fold.
const $ = (name) => document.getElementById(name);
const tree = $("tree"), count = $("count"), search = $("search");

// Rows of the tree, by keyboard.
const foldOf = (item) => item.firstElementChild.localName === "details" ? item.firstElementChild : null;
const rowOf = (item) => (foldOf(item) ?? item).firstElementChild;
const below = (item) => [...(foldOf(item)?.lastElementChild.children ?? [])].filter((each) => !each.hidden);
const itemOf = (node) => node.closest("li");
const above = (item) => item.parentElement.closest("li");
function beside(item, way) {
  do item = item[way]; while (item && item.hidden);
  return item;
}
function last(item) {
  while (foldOf(item)?.open && below(item).length) item = below(item).at(-1);
  return item;
}
function after(item) {
  if (foldOf(item)?.open && below(item).length) return below(item)[0];
  while (item && !beside(item, "nextElementSibling")) item = above(item);
  return item && beside(item, "nextElementSibling");
}
function before(item) {
  const other = beside(item, "previousElementSibling");
  return other ? last(other) : above(item);
}
const roots = () => [...tree.querySelectorAll(":scope > ul > li")].filter((each) => !each.hidden);
function focus(item) {
  if (!item) return;
  rowOf(item).tabIndex = 0; rowOf(item).focus({ preventScroll: true });
  rowOf(item).scrollIntoView({ block: "nearest" });
}
tree.addEventListener("keydown", (event) => {
  const item = itemOf(event.target);
  if (!item || event.ctrlKey || event.altKey || event.metaKey) return;
  const fold = foldOf(item), few = below(item);
  const doing = {
    ArrowDown: () => focus(after(item)),
    ArrowUp: () => focus(before(item)),
    ArrowRight: () => { if (fold && !fold.open) fold.open = true; else focus(few[0]); },
    ArrowLeft: () => { if (fold?.open) fold.open = false; else focus(above(item)); },
    Home: () => focus(roots()[0]),
    End: () => focus(roots().length ? last(roots().at(-1)) : null),
  }[event.key];
  if (doing) { event.preventDefault(); doing(); }
});
const folds = () => tree.querySelectorAll("details");
// Thousands of changes are fast only while nothing is laid out.
function change(doing) {
  const list = tree.querySelector("ul");
  list.hidden = true; list.offsetHeight;
  doing();
  list.hidden = false;
}
const foldAll = (open) => change(() => folds().forEach((each) => { each.open = open; }));
$("unfold").addEventListener("click", () => foldAll(true));
$("fold").addEventListener("click", () => foldAll(false));

// Search in paths: what matches, what is below it, and what leads to it.
let wait = 0, opened = null, paths = null;
function listPaths() {
  paths = new Map();
  for (const item of tree.querySelectorAll("li")) {
    const name = rowOf(item).firstElementChild.firstChild.data, holder = above(item);
    paths.set(item, (holder ? paths.get(holder) + "/" : "") + name.toLowerCase());
  }
}
function keep(item, word, all) {
  const own = all || paths.get(item).includes(word);
  let some = own;
  for (const each of foldOf(item)?.lastElementChild.children ?? []) some = keep(each, word, own) || some;
  item.hidden = !some;
  if (!own && some) foldOf(item).open = true;
  return some;
}
const filter = () => change(() => {
  const word = search.value.trim().toLowerCase();
  if (!paths) listPaths();
  opened ??= [...folds()].filter((each) => each.open);
  folds().forEach((each) => { each.open = false; });
  const found = [...tree.querySelectorAll(":scope > ul > li")].filter((each) => keep(each, word, !word));
  if (!word) { opened.forEach((each) => { each.open = true; }); opened = null; }
  const matches = [...paths].filter(([, path]) => path.includes(word)).length;
  count.textContent = !word ? "" : found.length ? `${matches} of ${paths.size} rows match` : "no row matches";
});
search.addEventListener("input", () => { clearTimeout(wait); wait = setTimeout(filter, 120); });
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && event.target !== search) { event.preventDefault(); choose("tree"); search.focus(); }
  if (event.key === "Escape" && event.target === search) { search.value = ""; filter(); }
});

// One of both at a time; the computation comes first where it is known.
const computation = $("computation") && drawComputation($("computation").querySelector(".drawing"), { zooms: true });
function choose(name) {
  for (const each of ["computation", "tree"]) {
    if (!$(each)) continue;
    $(each).hidden = each !== name;
    $(`${each}-tools`).hidden = each !== name;
    $(`show-${each}`).setAttribute("aria-pressed", String(each === name));
  }
  if (name === "computation") computation.show();
}
if (computation) {
  $("nearer").addEventListener("click", () => computation.zoom(0.8));
  $("farther").addEventListener("click", () => computation.zoom(1.25));
  $("all").addEventListener("click", () => computation.whole());
  $("show-tree").addEventListener("click", () => choose("tree"));
  $("show-computation").addEventListener("click", () => choose("computation"));
}
document.body.classList.add("scripted");
choose(computation ? "computation" : "tree");
performance.mark("ready");
