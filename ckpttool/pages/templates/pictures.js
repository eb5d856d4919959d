// Heat maps: cells are bytes, 128 is zero, 0 is no number. Blue is below zero, orange above: distinguishable with any color vision.
const STOPS = {
  light: [[9, 74, 130], [98, 160, 208], [247, 246, 242], [232, 152, 88], [152, 58, 12]],
  dark: [[148, 206, 255], [52, 116, 176], [24, 29, 34], [172, 96, 40], [255, 190, 132]],
};
const NONE = { light: [196, 20, 130], dark: [255, 80, 190] };

// Return the 256 colours of a theme, by byte.
const palette = (() => {
  const made = {};
  return (theme) => made[theme] ??= Array.from({ length: 256 }, (_, byte) => {
    if (byte === 0) return NONE[theme];
    const place = (byte - 1) / 254 * 4, from = Math.min(3, Math.floor(place)), part = place - from;
    return STOPS[theme][from].map((value, at) => Math.round(value + (STOPS[theme][from + 1][at] - value) * part));
  });
})();

const cellText = document.getElementById("cells");
// Return the bytes of a picture: [at, rows, columns, height, width, scale].
function cellsOf([at, rows, columns]) {
  const begin = at / 3 * 4, letters = Math.ceil(rows * columns / 3) * 4;
  const text = atob(cellText.textContent.substr(begin, letters));
  return Uint8Array.from({ length: rows * columns }, (_, each) => text.charCodeAt(each));
}

function paint(canvas, cells, theme) {
  const context = canvas.getContext("2d"), image = context.createImageData(canvas.width, canvas.height);
  const colours = palette(theme);
  cells.forEach((byte, each) => image.data.set([...colours[byte], 255], each * 4));
  context.putImageData(image, 0, 0);
}

const painted = new Set();
function canvasOf(rows, columns, cells, label) {
  const canvas = document.createElement("canvas");
  canvas.height = rows; canvas.width = columns;
  canvas.setAttribute("role", "img"); canvas.setAttribute("aria-label", label);
  const again = (theme) => paint(canvas, cells, theme);
  again(isDark() ? "dark" : "light");
  painted.add(again);
  return canvas;
}

// Paint all pictures again: the theme has changed, or the page goes to paper.
const repaint = (theme) => painted.forEach((again) => again(theme ?? (isDark() ? "dark" : "light")));
