const SVG = "http://www.w3.org/2000/svg";
// Make an element; what comes from the file only ever becomes text.
function make(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}
function draw(tag, attributes, ...inside) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...inside);
  return made;
}
const grouped = new Intl.NumberFormat("en-US");
const number = (value) => grouped.format(value);
const counting = (value, one, many) => `${number(value)} ${value === 1 ? one : many}`;
function bytes(value) {
  let unit = 0;
  while (value >= 1000 && unit < 4) { value /= 1000; unit++; }
  const text = unit && value < 1000 ? String(Number(value.toPrecision(3))) : String(value);
  return `${text} ${["B", "kB", "MB", "GB", "TB"][unit]}`;
}
// A number with three digits or without decimals, a whole number (a counter, a number of elements) with all; words stand for what is none.
function short(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "string") return value;
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e10) return number(value).replace("-", "−");
  if (size >= 1e3 && size < 1e5) return number(Math.round(value)).replace("-", "−");
  if (size && (size < 1e-3 || size >= 1e5)) return value.toExponential(2).replaceAll("-", "−").replace("e+", "e");
  return String(Number(value.toPrecision(3))).replace("-", "−");
}

// A list of names and values; a value may be an element.
function facts(pairs, className) {
  const list = make("dl", className);
  for (const [name, value] of pairs) {
    const cell = make("dd", "");
    cell.append(value instanceof Node ? value : String(value));
    list.append(make("dt", "", name), cell);
  }
  return list;
}
