// A laid out pane as SVG.

function drawPane(container, pane, direction) {
  container.replaceChildren();
  if (!pane.items.length) {
    container.append(el("p", { class: "empty" }, `Nothing of this module is in ${direction}.`));
    return;
  }
  const { width, height, routes } = layOut(pane.items, pane.edges);
  const label = `${direction} graph, ${plural(pane.items.length, "item")}`;
  // A wide graph is drawn smaller, as long as it can be read.
  const scale = Math.max(0.7, Math.min(1, (container.clientWidth - 16) / width));
  const size = { width: width * scale, height: height * scale };
  const picture = svg("svg", { ...size, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": label });
  picture.append(...routes.map(drawRoute));
  pane.items.forEach((item, i) => picture.append(drawItem(item, i === 0, pane)));
  container.append(picture);
  const first = pane.items.find((item) => item.kind !== "port" && item.kind !== "input") || pane.items[0];
  container.scrollLeft = first.x * scale - container.clientWidth / 2;
}

function drawRoute({ points, back }) {
  const [first, ...rest] = points;
  let y = first.y + (first.height || 0) / 2;
  let x = first.x;
  let path = `M${x} ${y}`;
  for (const point of rest) {
    const end = point.y - (point.height || 0) / 2;
    const middle = (y + end) / 2;
    path += `C${x} ${middle} ${point.x} ${middle} ${point.x} ${end}`;
    if (point.height) continue;
    [x, y] = [point.x, end];
  }
  return svg("path", { d: path, class: back ? "edge back" : "edge" });
}

function drawItem(item, first, pane) {
  const { node, kind, width, height } = item;
  const left = item.x - width / 2;
  const top = item.y - height / 2;
  const group = svg("g", {
    class: `item ${kind} ${itemClass(item)}`,
    role: "button",
    tabindex: first ? 0 : -1,
    "data-key": item.key,
    "data-node": node && kind !== "port" ? node.index : null,
    "aria-label": describe(item),
    onclick: () => open(item),
    onkeydown: (event) => walk(event, item, pane),
  });
  group.append(svg("title", {}, describe(item)));
  group.append(svg("rect", { x: left, y: top, width, height, rx: height < 24 ? height / 2 : 7 }));
  item.lines.forEach((line, i) => {
    const y = item.lines.length === 1 ? item.y + 4 : item.y - 5 + i * 16;
    group.append(svg("text", { x: item.x, y, class: i === 0 ? "name" : "type" }, line));
  });
  if (kind === "box") group.append(...shareBar(item, left, top));
  const drawn = node && kind !== "port";
  if (drawn && node.rounds) group.append(svg("circle", { class: "rounds", cx: left + width - 2, cy: top + height - 2, r: 4.5 }));
  if (drawn && isKept(node)) group.append(svg("rect", { class: "saved", x: left + width - 7, y: top - 4, width: 9, height: 9, rx: 2 }));
  return group;
}

function shareBar(item, left, top) {
  const y = top + item.height - 5;
  const [x, width] = [left + 8, item.width - 16];
  const bars = [svg("line", { class: "bar fp32", x1: x, x2: x + width, y1: y, y2: y })];
  if (item.share) bars.push(svg("line", { class: "bar low", x1: x, x2: x + width * item.share, y1: y, y2: y }));
  return bars;
}

function itemClass(item) {
  if (item.kind === "box") return item.share ? "low" : "fp32";
  return item.kind === "port" ? "" : dtypeClass(item.node.dtype);
}

function describe(item) {
  if (item.kind === "box") return `module ${item.path}: ${item.lines[1]}`;
  if (item.out) return `read ${item.lines[0]}`;
  if (!item.node) return `${item.lines[0]}, read by ${item.path}`;
  const { node } = item;
  const marks = [node.rounds ? "rounded here" : "", isKept(node) ? "kept for backward" : ""].filter(Boolean);
  return [`${node.name}: ${node.kind} ${shortOp(node.op)} ${typeText(node)}`.replace(/ +/g, " "), ...marks].join(", ");
}

function open(item) {
  if (!item.node) show({ module: item.path, node: null });
  else if (item.kind === "port") show({ module: item.node.module, node: item.out ? null : item.node });
  else show({ node: item.node });
}

// Arrow keys go from item to item: to the nearest in the layer above or below, or beside.
function walk(event, item, pane) {
  if (event.key === "Enter" || event.key === " ") {
    event.preventDefault();
    open(item);
    return;
  }
  const across = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  const down = { ArrowUp: -1, ArrowDown: 1 }[event.key];
  if (!across && !down) return;
  event.preventDefault();
  const ahead = pane.items.filter((other) =>
    across ? other.rank === item.rank && (other.x - item.x) * across > 0 : (other.rank - item.rank) * down > 0);
  const far = (other) => Math.abs(other.rank - item.rank) * 10000 + Math.abs(other.x - item.x);
  const next = ahead.sort((a, b) => far(a) - far(b))[0];
  if (next) focusItem(event.currentTarget.ownerSVGElement, next.key);
}

function focusItem(picture, key) {
  for (const group of picture.querySelectorAll("g.item")) {
    const chosen = group.dataset.key === key;
    group.setAttribute("tabindex", chosen ? 0 : -1);
    if (chosen) group.focus();
  }
}

function markSelected(node) {
  for (const group of document.querySelectorAll("g.item")) {
    const chosen = node !== null && group.dataset.node === String(node.index);
    group.classList.toggle("selected", chosen);
    if (chosen) group.scrollIntoView({ block: "nearest", inline: "center" });
  }
}
