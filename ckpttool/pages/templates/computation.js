// A drawing of boxes and edges: dagre places them, a panel lists what is known of the chosen box.
const drawComputation = (() => {
  const LINE_HEIGHT = 17, SIDE = 12, READABLE = 0.84, HIGH = 690;
  const measure = document.createElement("canvas").getContext("2d");
  function sizeOf(box) {
    measure.font = `600 12.5px ${getComputedStyle(document.documentElement).getPropertyValue("--mono") || "monospace"}`;
    const width = Math.max(48, ...box.lines.map((line) => measure.measureText(line).width)) + 2 * SIDE;
    return { width, height: LINE_HEIGHT * box.lines.length + (box.kind === "activation" ? 8 : 16) };
  }
  // Boxes with their middle and size, edges with their points. Each network is placed alone: its boxes are not
  // aligned with those of another.
  function place(boxes, rankdir, high = Infinity) {
    const down = rankdir === "TB", drawing = { width: 0, height: 0, boxes: [], edges: [] };
    for (const members of networks(boxes)) {
      const graph = new dagre.graphlib.Graph();
      graph.setGraph({ rankdir, nodesep: down ? 14 : 22, ranksep: down ? 26 : 20, marginx: 14, marginy: 10 });
      graph.setDefaultEdgeLabel(() => ({}));
      members.forEach((at) => graph.setNode(at, sizeOf(boxes[at])));
      members.forEach((at) => boxes[at].inputs.forEach((from) => graph.setEdge(from, at)));
      dagre.layout(graph);
      const { width, height } = graph.graph(), [x, y] = down ? [drawing.width, 0] : [0, drawing.height];
      const part = { width, height, boxes: members.map((at) => [at, { ...graph.node(at) }]), edges: graph.edges().map(({ v, w }) => [v, w, graph.edge(v, w).points]) };
      if (height > high) fold(part, high);
      for (const [at, box] of part.boxes) drawing.boxes[at] = { ...box, x: box.x + x, y: box.y + y };
      for (const [v, w, points] of part.edges) drawing.edges.push({ v, w, points: points.map((point) => ({ x: point.x + x, y: point.y + y })) });
      drawing.width = Math.max(x + part.width, drawing.width); drawing.height = Math.max(y + part.height, drawing.height);
    }
    return drawing;
  }
  function networks(boxes) {
    const owner = boxes.map((_, at) => at), root = (at) => { while (owner[at] !== at) at = owner[at] = owner[owner[at]]; return at; };
    boxes.forEach((box, at) => box.inputs.forEach((from) => { owner[root(at)] = root(from); }));
    const parts = new Map();
    boxes.forEach((_, at) => parts.set(root(at), [...(parts.get(root(at)) ?? []), at]));
    return [...parts.values()];
  }
  // Continue a long drawing in columns, which begin where the fewest edges cross.
  function fold(part, high) {
    const spans = part.boxes.map(([, { y, height }]) => [y - height / 2, y + height / 2]).sort((a, b) => a[0] - b[0]), gaps = [];
    spans.reduce((bottom, [top, below]) => { if (top > bottom) gaps.push((top + bottom) / 2 + 1); return Math.max(bottom, below); }, 0);
    const ends = part.edges.map(([, , points]) => [points[0].y, points.at(-1).y]);
    const crossing = (y) => ends.filter(([from, to]) => from < y && to > y).length;
    const cuts = [0], even = part.height / Math.ceil(part.height / high);
    while (part.height - cuts.at(-1) > high) {
      const near = gaps.filter((y) => y > cuts.at(-1) + even / 2 && y <= cuts.at(-1) + high);
      const fewest = Math.min(...near.map(crossing));
      if (!(fewest <= 4)) return;
      cuts.push(near.findLast((y) => crossing(y) === fewest));
    }
    cuts.push(part.height);
    const columnOf = (y) => Math.max(0, cuts.findLastIndex((cut) => cut < y)), last = cuts.length - 2, COLUMN = 26;
    const above = 5 * (Math.max(...cuts.slice(1, -1).map(crossing)) - 1);
    const extents = Array.from({ length: last + 1 }, () => [Infinity, -Infinity]);
    const reach = (column, ...xs) => { extents[column] = [Math.min(extents[column][0], ...xs), Math.max(extents[column][1], ...xs)]; };
    for (const [, { x, y, width }] of part.boxes) reach(columnOf(y), x - width / 2, x + width / 2);
    // Pieces of edges by column, with the point where they cross each cut.
    const pieces = part.edges.map(([, , points]) => points.flatMap((point, at) => {
      const before = points[at - 1], passed = at ? cuts.slice(1, -1).filter((cut) => before.y < cut && point.y > cut) : [];
      const crossed = passed.map((cut) => [before.x + (point.x - before.x) * (cut - before.y) / (point.y - before.y), cut]);
      return [...crossed.map(([x, y]) => ({ x, y, crosses: cuts.indexOf(y) - 1 })), { x: point.x, y: point.y, column: columnOf(point.y) }];
    }));
    pieces.flat().forEach(({ x, column, crosses }) => { for (const beside of crosses === undefined ? [column] : [crosses, crosses + 1]) reach(beside, x); });
    const shifts = [];
    let width = 14;
    extents.forEach(([left, right]) => { shifts.push(width - left); width += right - left + COLUMN; });
    const lanes = new Map();
    part.edges.forEach((edge, number) => {
      edge[2] = pieces[number].flatMap(({ x, y, column, crosses }) => {
        if (crosses === undefined) return [{ x: x + shifts[column], y: y - cuts[column] + above }];
        const lane = 5 * (lanes.get(crosses) ?? 0), gutter = extents[crosses][1] + shifts[crosses] + COLUMN / 2 - lane, bottom = y - cuts[crosses] + above + lane;
        lanes.set(crosses, lane / 5 + 1);
        return [{ x: x + shifts[crosses], y: bottom }, { x: gutter, y: bottom }, { x: gutter, y: 4 + lane }, { x: x + shifts[crosses + 1], y: 4 + lane }];
      });
    });
    for (const [, box] of part.boxes) { const column = columnOf(box.y); box.x += shifts[column]; box.y += above - cuts[column]; }
    part.width = width - COLUMN + 14;
    part.height = Math.max(...cuts.slice(1).map((cut, at) => cut - cuts[at])) + 2 * above + 24;
  }

  let drawings = 0;
  return function drawComputation(holder, { zooms = false } = {}) {
    const boxes = JSON.parse(holder.dataset.boxes);
    const panel = holder.parentElement.querySelector(".box-panel");
    const users = boxes.map(() => []);
    boxes.forEach((box, at) => box.inputs.forEach((from) => users[from].push(at)));
    const arrow = `arrow-${drawings++}`;
    let view = null, shapes = [], full = null;

    // The form that shows more of the drawing at once; one that fits in no form runs down, on wide screens in columns.
    function layOut() {
      const wide = holder.clientWidth || 1000, high = zooms ? holder.clientHeight : HIGH;
      const fit = (drawing) => Math.min(1, wide / drawing.width, high / drawing.height);
      const down = place(boxes, "TB");
      if (wide < 600 || (zooms && fit(down) === 1)) return down;
      const across = boxes.length > 120 ? down : place(boxes, "LR");
      return [across, down].find((drawing) => fit(drawing) >= READABLE) ?? place(boxes, "TB", Math.max(high - 24, 400));
    }
    function drawBox(box, at, drawing) {
      const { x, y, width, height } = drawing.boxes[at], top = y - LINE_HEIGHT * (box.lines.length - 1) / 2 + 4;
      const round = box.kind === "activation" ? height / 2 : 6;
      const shape = draw("rect", { x: x - width / 2, y: y - height / 2, width, height, rx: round });
      const texts = box.lines.map((line, number) => draw("text", { x, y: top + number * LINE_HEIGHT, class: number ? "more" : "name" }, `${line} `));
      const group = draw("g", { class: `box ${box.kind}${box.assumed ? " assumed" : ""}`, role: "button", tabindex: at ? -1 : 0 }, shape, ...texts);
      group.addEventListener("click", () => choose(at));
      return group;
    }
    function drawEdge({ v, points: [first, ...rest] }) {
      if (boxes[v].kind === "title") return "";
      return draw("path", { class: "flow", d: `M${first.x} ${first.y}` + rest.map(({ x, y }) => `L${x} ${y}`).join(""), "marker-end": `url(#${arrow})` });
    }
    function show() {
      if (view) return;
      const drawing = layOut(), { width, height } = drawing;
      full = [0, 0, width, height];
      shapes = boxes.map((box, at) => drawBox(box, at, drawing));
      const head = draw("marker", { id: arrow, viewBox: "0 0 8 8", refX: 8, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto-start-reverse" }, draw("path", { d: "M0 0L8 4L0 8z" }));
      view = draw("svg", { viewBox: full.join(" "), role: "group", "aria-label": holder.getAttribute("aria-label") }, draw("defs", {}, head), ...drawing.edges.map(drawEdge), ...shapes);
      holder.append(view);
      if (!zooms) {
        const fit = Math.min(1, holder.clientWidth / width, HIGH / height), shown = fit < READABLE ? 1 : fit;
        view.setAttribute("width", width * shown); view.setAttribute("height", height * shown);
        return;
      }
      // Readable at first: the whole drawing if it fits, else the part where it begins.
      const scale = Math.min(1, holder.clientWidth / width, holder.clientHeight / height);
      if (scale >= READABLE) { frame(width / 2, Math.max(height, holder.clientHeight / scale) / 2, scale); return; }
      const { x, y } = drawing.boxes[0], [wide, high] = [holder.clientWidth, holder.clientHeight];
      const clamp = (middle, part, whole) => part >= whole ? whole / 2 : Math.min(Math.max(middle, part / 2), whole - part / 2);
      frame(clamp(x, wide, width), Math.max(clamp(y, high, height), high / 2), 1);
    }
    function frame(x, y, scale) {
      const [wide, high] = [holder.clientWidth / scale, holder.clientHeight / scale];
      set(x - wide / 2, y - high / 2, wide, high);
    }
    const set = (...box) => view.setAttribute("viewBox", box.join(" "));
    function choose(at, follow = false) {
      shapes.forEach((shape, number) => { shape.classList.toggle("chosen", number === at); shape.setAttribute("tabindex", number === at ? 0 : -1); });
      shapes[at].focus({ preventScroll: true });
      const pairs = boxes[at].facts.map(([name, text]) => [name, text]);
      const links = (numbers) => {
        const list = make("span");
        for (const number of numbers) {
          const link = make("button", "jump", boxes[number].lines[0]);
          link.type = "button"; link.addEventListener("click", () => choose(number, true));
          list.append(link, " ");
        }
        return list;
      };
      const from = boxes[at].inputs.filter((number) => boxes[number].kind !== "title");
      if (from.length) pairs.push(["receives", links(from)]);
      if (users[at].length && boxes[at].kind !== "title") pairs.push(["used by", links(users[at])]);
      panel.replaceChildren(make("h3", "", boxes[at].lines[0]), facts(pairs, "facts"));
      panel.hidden = false;
      if (follow) reach(at);
    }
    function reach(at) {
      if (!zooms) { shapes[at].scrollIntoView({ block: "nearest", inline: "nearest" }); return; }
      const box = view.viewBox.baseVal, own = shapes[at].getBBox();
      if (own.x >= box.x && own.y >= box.y && own.x + own.width <= box.x + box.width && own.y + own.height <= box.y + box.height) return;
      set(own.x + own.width / 2 - box.width / 2, own.y + own.height / 2 - box.height / 2, box.width, box.height);
    }
    function zoom(by, x, y) {
      const box = view.viewBox.baseVal;
      x ??= box.x + box.width / 2; y ??= box.y + box.height / 2;
      set(x - (x - box.x) * by, y - (y - box.y) * by, box.width * by, box.height * by);
    }
    const whole = () => set(...full);
    // Arrow keys walk along the edges, Enter lists a box.
    holder.addEventListener("keydown", (event) => {
      const at = shapes.indexOf(event.target);
      if (at < 0 || event.ctrlKey || event.altKey || event.metaKey) return;
      const beside = (numbers, step) => numbers[(numbers.indexOf(at) + step + numbers.length) % numbers.length];
      const peers = () => (boxes[at].inputs.length ? users[boxes[at].inputs[0]] : boxes.flatMap((box, number) => box.inputs.length ? [] : [number]));
      const next = {
        ArrowDown: () => users[at][0], ArrowUp: () => boxes[at].inputs[0], ArrowRight: () => beside(peers(), 1),
        ArrowLeft: () => beside(peers(), -1), Enter: () => at, " ": () => at, Home: () => 0, End: () => boxes.length - 1,
      }[event.key];
      if (zooms && "+-0=".includes(event.key)) { event.preventDefault(); if (event.key === "0") whole(); else zoom(event.key === "-" ? 1.25 : 0.8); }
      if (!next) return;
      event.preventDefault();
      if (next() !== undefined) choose(next(), true);
    });
    if (zooms) {
      let from = null;
      holder.addEventListener("wheel", (event) => {
        event.preventDefault();
        const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(view.getScreenCTM().inverse());
        zoom(Math.exp(event.deltaY * 0.0015), at.x, at.y);
      }, { passive: false });
      holder.addEventListener("pointerdown", (event) => { from = [event.clientX, event.clientY]; });
      addEventListener("pointermove", (event) => {
        if (!from) return;
        const box = view.viewBox.baseVal, scale = view.getScreenCTM().a;
        set(box.x - (event.clientX - from[0]) / scale, box.y - (event.clientY - from[1]) / scale, box.width, box.height);
        from = [event.clientX, event.clientY];
      });
      addEventListener("pointerup", () => { from = null; });
    } else {
      // Drawn when it comes near the screen, or is printed: a page of many tensors opens at once.
      const near = new IntersectionObserver((seen) => { if (seen.some((each) => each.isIntersecting)) { near.disconnect(); show(); } }, { rootMargin: "800px" });
      near.observe(holder);
      addEventListener("beforeprint", show);
    }
    return { show, zoom, whole, choose };
  };
})();
document.querySelectorAll("#networks .drawing").forEach((each) => drawComputation(each));
