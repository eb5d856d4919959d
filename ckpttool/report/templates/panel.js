// What stands below a tensor's row when it is open.
function panelOf(index) {
  const row = rows[index], panel = make("div", "panel");
  panel.style.setProperty("--level", row.level);
  panel.append(make("p", "path", row.path));
  for (const sign of row.signs ?? []) panel.append(make("p", "sign", sign));
  if (row.change !== undefined) panel.append(changed(row));
  const plates = make("div", "plates");
  // What changed has been shown with the other's beside it.
  if (row.picture && !changes[row.change]?.pictures?.length) plates.append(heat(row.picture, "Heat map", row.path));
  if (row.histogram) plates.append(histogram(row));
  plates.append(numbersOf(row), factsOf(row));
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
  box.append(make("h4", "", "Numbers"), pairs.length ? facts(pairs, "facts n") : make("p", "muted", "none"));
  return box;
}

function factsOf(row) {
  const box = make("div", ""), pairs = [["type", row.dtype], ["shape", shapeOf(row)], ["role", row.role ?? "parameter"]];
  if (row.frozen) pairs.push(["trained", "no (frozen)"]);
  if (row.slot) pairs.push(["slot", row.slot]);
  if (row.of !== undefined) pairs.push(["of", jump(byId.get(row.of))]);
  if (row.key) pairs.push(["key", row.key]);
  for (const alias of row.aliases ?? []) pairs.push(["also", alias]);
  if (row.more) pairs.push(["also", `${number(row.more)} more`]);
  box.append(make("h4", "", "In the file"), facts(pairs, "facts"));
  return box;
}

function optimizerState(row) {
  const table = make("table", ""), body = make("tbody"), head = make("tr");
  for (const word of ["Slot", "Distribution", "Min", "Max", "Mean", "Std"]) {
    const cell = make("th", word === "Slot" || word === "Distribution" ? "" : "n", word);
    cell.scope = "col"; head.append(cell);
  }
  for (const id of row.slots) {
    const index = byId.get(id), slot = rows[index], line = make("tr"), stats = slot.stats ?? {};
    const name = make("th", ""), drawn = make("td", "");
    name.scope = "row"; name.append(jump(index, slot.slot || slot.name));
    if (slot.histogram) drawn.append(bars(slot.histogram));
    line.append(name, drawn, ...["min", "max", "mean", "std"].map((key) => make("td", "n", short(stats[key]))));
    body.append(line);
  }
  const top = make("thead"); top.append(head); table.append(top, body);
  const box = make("div", "slots"); box.append(table);
  return [make("h4", "", "Optimizer state"), box];
}

function changed(row) {
  const box = make("div", "");
  if (row.change < 0) { box.append(make("p", "sign", "Only in A")); return box; }
  const change = changes[row.change], plates = make("div", "plates");
  box.append(make("h4", "", "From A to B"));
  if (change.share === null) { box.append(make("p", "sign", `${change.what}: ${change.sentence}`)); return box; }
  const pairs = [["differ", change.different], ["largest", change.max_abs], ["relative", change.max_rel]];
  if (change.cosine) pairs.push(["cosine", change.cosine]);
  if (change.at) pairs.push(["at", change.at]);
  pairs.push(["Value in A", change.left], ["Value in B", change.right]);
  if (change.path !== row.path) pairs.push(["as", change.path]);
  const names = ["A", "B", "B − A"];
  change.pictures.forEach((picture, at) => plates.append(heat(picture, names[at], `${names[at]} of ${row.path}`)));
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
