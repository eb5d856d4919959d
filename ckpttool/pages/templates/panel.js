// What stands below a tensor's row when it is open.
function panelOf(index) {
  const row = rows[index], panel = make("div", "panel");
  panel.setAttribute("role", "treeitem"); panel.setAttribute("aria-level", row.level + 2);
  panel.style.setProperty("--level", row.level);
  panel.append(make("p", "path", row.path));
  for (const sign of row.signs ?? []) panel.append(make("p", "sign", sign));
  if (row.change !== undefined) panel.append(changed(row));
  const plates = make("div", "plates");
  // What changed has been shown with the other's beside it.
  if (row.picture && !changes[row.change]?.pictures?.length) plates.append(heat(row.picture, "Heat map", row.path));
  const change = changes[row.change];
  if (change?.bins) plates.append(histogramOfBoth(row, change));
  else if (row.histogram) plates.append(histogram(row));
  plates.append(change?.sides ? numbersOfBoth(change) : numbersOf(row), factsOf(row));
  panel.append(plates);
  if (row.slots) panel.append(...optimizerState(row));
  return panel;
}

function numbersOf(row) {
  const box = make("div", ""), stats = row.stats ?? {};
  const pairs = ["min", "max", "mean", "std", "norm"].filter((name) => name in stats).map((name) => [name, short(stats[name])]);
  for (const [name, word] of [["zeros", "zeros"], ["nans", "NaN"], ["infs", "infinite"]]) {
    if (stats[name]) pairs.push([word, `${number(stats[name])} (${short(100 * stats[name] / stats.elements)} %)`]);
  }
  box.append(make("h3", "", "Numbers"), pairs.length ? facts(pairs, "facts n") : make("p", "muted", "none"));
  return box;
}

// The numbers of both sides beside each other.
function numbersOfBoth(change) {
  const box = make("div", "slots"), table = make("table", ""), body = make("tbody");
  table.append(headOf(["", "A", "B"], 1), body);
  const counts = [["zeros", "zeros"], ["nans", "NaN"], ["infs", "infinite"]].filter(([name]) => change.sides.some((side) => side[name]));
  const always = ["min", "max", "mean", "std", "norm"].map((name) => [name, name]);
  for (const [name, word] of [...always, ...counts]) {
    const line = make("tr"), title = make("th", "", word);
    title.scope = "row";
    line.append(title, ...change.sides.map((side) => make("td", "n", short(side[name] === undefined ? 0 : side[name]))));
    body.append(line);
  }
  box.append(make("h3", "", "Numbers"), table);
  return box;
}

// The head of a table; columns from the given one on are numbers.
function headOf(words, numbers) {
  const top = make("thead"), line = make("tr");
  words.forEach((word, at) => {
    const cell = make(word ? "th" : "td", at >= numbers ? "n" : "", word);
    if (word) cell.scope = "col";
    line.append(cell);
  });
  top.append(line);
  return top;
}

function factsOf(row) {
  const box = make("div", ""), pairs = [["type", row.dtype], ["shape", shapeOf(row)], ["role", row.role ?? "parameter"]];
  if (row.frozen) pairs.push(["trained", "no (frozen)"]);
  if (row.slot) pairs.push(["slot", row.slot]);
  if (row.of !== undefined) pairs.push(["of", jump(byId.get(row.of))]);
  if (row.key) pairs.push(["key", row.key]);
  for (const alias of row.aliases ?? []) pairs.push(["also", alias]);
  if (row.more) pairs.push(["also", `${number(row.more)} more`]);
  box.append(make("h3", "", "In the file"), facts(pairs, "facts"));
  return box;
}

function optimizerState(row) {
  const table = make("table", ""), body = make("tbody"), compared = row.slots.some((id) => changes[rows[byId.get(id)].change]?.sides);
  const columns = ["Slot", ...(compared ? ["Side"] : []), "Distribution", "Min", "Max", "Mean", "Std", ...(compared ? ["Norm", "Largest difference"] : [])];
  for (const id of row.slots) {
    const index = byId.get(id), slot = rows[index], change = changes[slot.change], sides = change?.sides;
    const lines = sides ? sides.map((stats, at) => [stats, change.bins?.[at], "AB"[at]]) : [[slot.stats ?? {}, slot.histogram, compared ? "A = B" : ""]];
    lines.forEach(([stats, counts, side], at) => {
      const line = make("tr"), drawn = make("td", "");
      if (at === 0) {
        const name = make("th", "");
        name.scope = "row"; name.rowSpan = lines.length; name.append(jump(index, slot.slot || slot.name));
        line.append(name);
      }
      if (counts) drawn.append(bars(counts, side === "B"));
      line.append(...(compared ? [make("td", "", side)] : []), drawn, ...["min", "max", "mean", "std"].map((key) => make("td", "n", short(stats[key]))));
      if (compared) line.append(make("td", "n", short(stats.norm)), make("td", "n", at === 0 ? change?.max_abs ?? "0" : ""));
      body.append(line);
    });
  }
  table.append(headOf(columns, compared ? 3 : 2), body);
  const box = make("div", "slots"); box.append(table);
  return [make("h3", "", "Optimizer state"), box];
}

function changed(row) {
  const box = make("div", "");
  if (row.change < 0) { box.append(make("p", "sign", onlyIn(row))); return box; }
  const change = changes[row.change], plates = make("div", "plates");
  box.append(make("h3", "", "From A to B"));
  if (change.share === null) { box.append(make("p", "sign", `${change.what}: ${change.sentence}`)); return box; }
  if (change.note) box.append(make("p", "sign", change.note));
  const pairs = [["differ", change.different], ["largest", change.max_abs], ["relative", change.max_rel]];
  if (change.cosine) pairs.push(["cosine", change.cosine]);
  if (change.at) pairs.push(["index", change.at]);
  pairs.push(["Value in A", change.left], ["Value in B", change.right]);
  if (change.path !== row.path) pairs.push(["as", change.path]);
  const names = ["A", "B", "B − A"];
  change.pictures?.forEach((picture, at) => plates.append(heat(picture, names[at], `${names[at]} of ${row.path}`)));
  plates.append(facts(pairs, "facts n"));
  box.append(plates);
  return box;
}

function jump(index, text) {
  const link = make("button", "jump", text ?? rows[index]?.path ?? "not shown");
  link.type = "button";
  if (index === undefined) link.disabled = true;
  else link.addEventListener("click", () => reveal(index));
  return link;
}
