// Pictures in the theme's colors, paper, and links from tables into the tree.
onTheme.push(() => repaint());

document.addEventListener("click", (event) => {
  const link = event.target.closest("a[data-change]");
  if (!link) return;
  const wanted = Number(link.dataset.change), index = rows.findIndex((row) => row.change === wanted);
  if (index >= 0) { event.preventDefault(); reveal(index); }
});
document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); if (visible.length) focus(current); });

// On paper a small tree stands whole, in the colours of paper.
const ON_PAPER = 400;
let before = null;
addEventListener("beforeprint", () => {
  before = [new Set(expanded), limit];
  if (rows.length <= ON_PAPER) { rows.forEach((row, index) => row.module && expanded.add(index)); limit = ON_PAPER; show(); }
  repaint("light");
});
addEventListener("afterprint", () => {
  if (before) { expanded.clear(); before[0].forEach((index) => expanded.add(index)); limit = before[1]; before = null; show(); }
  repaint();
});

unfoldFirst();
search();
performance.mark("ready");
