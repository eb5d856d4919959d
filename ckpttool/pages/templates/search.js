// Search by words in paths and keys, and by kind of row.
const field = document.getElementById("search"), filter = document.getElementById("filter"), counted = document.getElementById("count");
let haystack = null;
const total = rows.filter((row) => !row.module).length;

const chosen = {
  "": () => true,
  parameter: (row) => row.id !== undefined && !row.role,
  slot: (row) => row.role === "slot",
  value: (row) => kindOf(row) === "value",
  changed: (row) => row.change !== undefined,
  signs: (row) => Boolean(row.signs),
};

function search() {
  terms = field.value.toLowerCase().split(/\s+/).filter(Boolean);
  const fits = chosen[filter.value];
  closedInSearch.clear(); limit = AT_ONCE;
  let found = total;
  if (!terms.length && !filter.value) kept = null;
  else {
    haystack ??= rows.map((row) => `${row.path}\n${row.key ?? ""}`.toLowerCase());
    kept = new Uint8Array(rows.length); found = 0;
    rows.forEach((row, index) => {
      if (row.module || !fits(row) || !terms.every((term) => haystack[index].includes(term))) return;
      found++;
      for (let above = index; above >= 0 && !kept[above]; above = parent[above]) kept[above] = 1;
    });
  }
  counted.textContent = kept ? `${number(found)} of ${number(total)}` : counting(total, "entry", "entries");
  show();
}

function clearSearch() { field.value = ""; filter.value = ""; search(); }

let waiting = 0;
field.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(search, 60); });
filter.addEventListener("change", search);
field.addEventListener("keydown", (event) => {
  if (event.key === "Escape") { clearSearch(); if (visible.length) focus(current); }
  if (event.key === "Enter" || event.key === "ArrowDown") {
    event.preventDefault(); clearTimeout(waiting); search();
    const first = visible.find((index) => !rows[index].module) ?? visible[0];
    if (first !== undefined) focus(first);
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "/" || event.ctrlKey || event.altKey || event.metaKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
  event.preventDefault(); field.focus(); field.select();
});
