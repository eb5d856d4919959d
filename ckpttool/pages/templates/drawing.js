// The shape of a distribution in a row: sixteen bars.
function bars(histogram, other = false) {
  const most = Math.max(...histogram), wide = 96 / histogram.length;
  const path = histogram.map((count, at) => {
    const high = count ? Math.max(1, 18 * count / most) : 0;
    return high ? `M${at * wide} 18v${-high}h${wide - 1}v${high}z` : "";
  }).join("");
  return draw("svg", { class: other ? "bars of-b" : "bars", viewBox: "0 0 96 18", preserveAspectRatio: "none", "aria-hidden": "true" }, draw("path", { d: path }));
}

// The axis of a histogram from min to max, with a line at zero.
function drawAxis(picture, min, max) {
  picture.append(draw("line", { class: "base", x1: 0, x2: 320, y1: 112.5, y2: 112.5 }));
  if (min < 0 && max > 0) {
    const zero = -min / (max - min) * 320;
    picture.append(draw("line", { class: "zero", x1: zero, x2: zero, y1: 2, y2: 116 }));
    if (zero > 48 && zero < 272) picture.append(draw("text", { x: zero, y: 127, "text-anchor": "middle" }, "0"));
  }
  picture.append(draw("text", { x: 0, y: 127 }, short(min)), draw("text", { x: 320, y: 127, "text-anchor": "end" }, short(max)));
}

function histogram(row) {
  const figure = make("figure", "histogram"), { min, max } = row.stats, counts = row.histogram;
  const most = Math.max(...counts), wide = 320 / counts.length;
  const label = `Histogram of ${row.name}: ${counts.length} bins from ${short(min)} to ${short(max)}`;
  const picture = draw("svg", { viewBox: "0 0 320 132", role: "img", "aria-label": label });
  counts.forEach((count, at) => {
    const high = count ? Math.max(1, 108 * count / most) : 0;
    const low = min + (max - min) * at / counts.length, top = min + (max - min) * (at + 1) / counts.length;
    const bin = draw("rect", { class: "bin", x: at * wide + .5, y: 112 - high, width: wide - 1, height: high });
    bin.append(draw("title", {}, `${number(count)} from ${short(low)} to ${short(top)}`));
    picture.append(bin);
  });
  drawAxis(picture, min, max);
  figure.append(make("h3", "", "Distribution"), picture, make("figcaption", "", `highest bar: ${number(most)} of ${number(row.stats.elements)}`));
  return figure;
}

// The histograms of A, filled, and of B, outlined, in the same bins; heights are shares of the highest bar of both.
function histogramOfBoth(row, change) {
  const figure = make("figure", "histogram"), [min, max] = change.range, [ours, theirs] = change.bins;
  const most = Math.max(...ours, ...theirs), wide = 320 / ours.length;
  const label = `Histograms of ${row.name} in A and B: ${ours.length} bins from ${short(min)} to ${short(max)}`;
  const picture = draw("svg", { viewBox: "0 0 320 132", role: "img", "aria-label": label });
  const high = (count) => count ? Math.max(1, 108 * count / most) : 0;
  ours.forEach((count, at) => picture.append(draw("rect", { class: "bin", x: at * wide + .5, y: 112 - high(count), width: wide - 1, height: high(count) })));
  picture.append(draw("path", { class: "outline", d: "M0 112" + theirs.map((count) => `V${112 - high(count)}h${wide}`).join("") + "V112" }));
  ours.forEach((count, at) => {
    const low = min + (max - min) * at / ours.length, top = min + (max - min) * (at + 1) / ours.length;
    const bin = draw("rect", { class: "hit", x: at * wide, y: 0, width: wide, height: 112 });
    bin.append(draw("title", {}, `A ${number(count)}, B ${number(theirs[at])} from ${short(low)} to ${short(top)}`));
    picture.append(bin);
  });
  drawAxis(picture, min, max);
  const legend = make("figcaption", "both");
  legend.append(make("span", "key-a"), "A", make("span", "key-b"), `B; highest bar: ${number(most)} of ${number(change.sides[0].elements)}`);
  figure.append(make("h3", "", "Distribution of A and B"), picture, legend);
  return figure;
}

function heat(picture, title, label) {
  const [, rows, columns, height, width, scale] = picture, figure = make("figure", "heat");
  const cells = cellsOf(picture), canvas = canvasOf(rows, columns, cells, `Heat map of ${label}`);
  // Cells are squares of whole pixels; where a matrix has few rows or columns they are drawn out, to be seen.
  const fitting = (cells) => Math.max(1, Math.min(18, Math.floor(288 / cells)));
  const square = Math.min(fitting(rows), fitting(columns)), drawnOut = Math.min(rows, columns) < 12;
  const wide = columns * (drawnOut ? fitting(columns) : square), high = rows * (drawnOut ? fitting(rows) : square);
  canvas.style.width = `min(100%, ${wide}px)`;
  canvas.style.aspectRatio = `${wide} / ${high}`;
  const block = [Math.ceil(height / rows), Math.ceil(width / columns)];
  const said = `${number(height)} × ${number(width)}` + (block[0] * block[1] > 1 ? `, a cell is the mean of ${block[0]} × ${block[1]}` : "");
  const legend = make("div", "scale");
  const strip = canvasOf(1, 127, Uint8Array.from({ length: 127 }, (_, at) => 1 + at * 2), "Colors from lowest to highest");
  legend.append(make("span", "", short(-scale)), strip, make("span", "", short(scale)));
  figure.append(make("h3", "", title), canvas, legend, make("figcaption", "", said));
  if (cells.includes(0)) {
    const none = make("p", "nothing", "NaN, or a cell that contains NaN");
    none.prepend(canvasOf(1, 1, new Uint8Array(1), "Color of NaN"));
    figure.append(none);
  }
  return figure;
}
