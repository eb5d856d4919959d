// A drawing of boxes and edges: dagre places them, a panel lists what is known of the chosen box.
const drawComputation = (() => {
  const LINE_HEIGHT = 17, SIDE = 12, READABLE = 0.85;
  const measure = document.createElement("canvas").getContext("2d");
  function sizeOf(box) {
    measure.font = `600 12.5px ${getComputedStyle(document.documentElement).getPropertyValue("--mono") || "monospace"}`;
    const width = Math.max(48, ...box.lines.map((line) => measure.measureText(line).width)) + 2 * SIDE;
    return { width, height: LINE_HEIGHT * box.lines.length + (box.kind === "activation" ? 8 : 16) };
  }
  function place(boxes, rankdir) {
    const graph = new dagre.graphlib.Graph();
    graph.setGraph({ rankdir, nodesep: 22, ranksep: 30, marginx: 14, marginy: 14 });
    graph.setDefaultEdgeLabel(() => ({}));
    boxes.forEach((box, at) => graph.setNode(at, sizeOf(box)));
    boxes.forEach((box, at) => box.inputs.forEach((from) => graph.setEdge(from, at)));
    dagre.layout(graph);
    return graph;
  }

  let drawings = 0;
  return function drawComputation(holder, { zooms = false } = {}) {
    const boxes = JSON.parse(holder.dataset.boxes);
    const panel = holder.parentElement.querySelector(".box-panel");
    const users = boxes.map(() => []);
    boxes.forEach((box, at) => box.inputs.forEach((from) => users[from].push(at)));
    const arrow = `arrow-${drawings++}`;
    let view = null, shapes = [], full = null;

    // The direction that shows more of the drawing at once; long ones run from top to bottom.
    function layOut() {
      const wide = holder.clientWidth || 1000, high = zooms ? holder.clientHeight : 700;
      const fit = (graph) => Math.min(1, wide / graph.graph().width, high / graph.graph().height);
      const down = place(boxes, "TB");
      if (boxes.length > 120 || wide < 700 || fit(down) === 1) return down;
      const across = place(boxes, "LR");
      return fit(across) > fit(down) ? across : down;
    }
    function drawBox(box, at, graph) {
      const { x, y, width, height } = graph.node(at), top = y - LINE_HEIGHT * (box.lines.length - 1) / 2 + 4;
      const round = box.kind === "activation" ? height / 2 : 6;
      const shape = draw("rect", { x: x - width / 2, y: y - height / 2, width, height, rx: round });
      const texts = box.lines.map((line, number) => draw("text", { x, y: top + number * LINE_HEIGHT, class: number ? "more" : "name" }, `${line} `));
      const group = draw("g", { class: `box ${box.kind}${box.assumed ? " assumed" : ""}`, role: "button", tabindex: at ? -1 : 0 }, shape, ...texts);
      group.addEventListener("click", () => choose(at));
      return group;
    }
    function drawEdge({ v, w }, graph) {
      if (boxes[v].kind === "title") return "";
      const [first, ...rest] = graph.edge(v, w).points;
      return draw("path", { class: "flow", d: `M${first.x} ${first.y}` + rest.map(({ x, y }) => `L${x} ${y}`).join(""), "marker-end": `url(#${arrow})` });
    }
    function show() {
      if (view) return;
      const graph = layOut(), { width, height } = graph.graph();
      full = [0, 0, width, height];
      shapes = boxes.map((box, at) => drawBox(box, at, graph));
      const head = draw("marker", { id: arrow, viewBox: "0 0 8 8", refX: 8, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto-start-reverse" }, draw("path", { d: "M0 0L8 4L0 8z" }));
      view = draw("svg", { viewBox: full.join(" "), role: "group", "aria-label": holder.getAttribute("aria-label") }, draw("defs", {}, head), ...graph.edges().map((edge) => drawEdge(edge, graph)), ...shapes);
      holder.append(view);
      if (!zooms) {
        const fit = Math.min(1, holder.clientWidth / width), shown = fit < READABLE ? 1 : fit;
        view.setAttribute("width", width * shown); view.setAttribute("height", height * shown);
        return;
      }
      // Readable at first: the whole drawing if it fits, else the part where it begins.
      const scale = Math.min(1, holder.clientWidth / width, holder.clientHeight / height);
      if (scale >= READABLE) { frame(width / 2, Math.max(height, holder.clientHeight / scale) / 2, scale); return; }
      const { x, y } = graph.node(0), [wide, high] = [holder.clientWidth, holder.clientHeight];
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
