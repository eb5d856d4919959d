// Tables: the first rows at first, all on request; a click on a title sorts by its column.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0], rest = body.querySelector(":scope > template"), few = body.rows.length;
  const button = rest && table.closest(".scroll").nextElementSibling.querySelector(".all");
  let whole = !rest;
  const load = () => { if (rest?.isConnected) { const rows = rest.content; rest.remove(); body.append(rows); } };
  const limit = () => [...body.rows].forEach((row, at) => { row.hidden = !whole && at >= few; });
  if (button) {
    button.hidden = false;
    button.addEventListener("click", () => {
      load(); whole = !whole; limit();
      button.textContent = whole ? `Show the first ${few}` : `Show all ${button.dataset.count}`;
    });
  }
  const heads = [...table.tHead.rows[0].cells];
  const textOf = (row, column) => row.cells[column]?.dataset.value ?? row.cells[column]?.textContent.trim() ?? "";
  const numberOf = (text) => { const plain = text.replaceAll(",", "").replaceAll("−", "-"); return /^[-+]?[0-9.]/.test(plain) ? parseFloat(plain) : NaN; };
  function sort(column, head) {
    load();
    const down = head.getAttribute("aria-sort") ? head.getAttribute("aria-sort") === "ascending" : head.classList.contains("n");
    const keyed = [...body.rows].map((row) => { const text = textOf(row, column); return { row, text, number: numberOf(text) }; });
    const numbers = keyed.every(({ text, number }) => !text || text === "–" || !Number.isNaN(number));
    const empty = ({ text, number }) => !text || (numbers && Number.isNaN(number));
    const compare = (a, b) => numbers ? a.number - b.number : a.text.localeCompare(b.text, "en", { numeric: true });
    // Rows without a value are last in both directions.
    keyed.sort((a, b) => empty(a) - empty(b) || (empty(a) ? 0 : (down ? -1 : 1) * compare(a, b)));
    body.append(...keyed.map(({ row }) => row));
    heads.forEach((each) => each.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    limit();
  }
  heads.forEach((head, column) => {
    if (head.localName !== "th" || head.classList.contains("fixed")) return;
    const press = document.createElement("button");
    press.type = "button"; press.className = "sort"; press.append(...head.childNodes);
    press.addEventListener("click", () => sort(column, head));
    head.append(press);
  });
}
// What is long and rarely read becomes part of the page when it is opened.
for (const each of document.querySelectorAll("details.later")) {
  each.addEventListener("toggle", () => { const later = each.querySelector(":scope > template"); if (later) later.replaceWith(later.content); });
}
// A strip of cells has one tooltip, that of the cell below the pointer.
document.addEventListener("pointermove", ({ target, clientX }) => {
  const strip = target.closest?.(".cells[data-titles]");
  if (!strip) return;
  const titles = strip.dataset.titles.split("\n"), { left, width } = strip.getBoundingClientRect();
  strip.querySelector("title").textContent = titles[Math.max(0, Math.min(titles.length - 1, Math.floor((clientX - left) / width * titles.length)))];
});
