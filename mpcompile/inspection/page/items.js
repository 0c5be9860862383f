// What is drawn of one module in one direction: its own nodes, a box for each module inside, and ports to the rest.

const MOST_ITEMS = 300;
const CHARACTER = 6.7;

function paneOf(graph, path, direction, showViews, page) {
  const hidden = (node) => node.kind === "view" && !showViews;
  const inside = graph.nodes.filter((node) => node.direction === direction && isWithin(node.module, path));
  const all = itemsOf(inside.filter((node) => node.module !== path || !hidden(node)), path);
  const pages = Math.max(1, Math.ceil(all.length / MOST_ITEMS));
  const shown = all.slice(page * MOST_ITEMS, (page + 1) * MOST_ITEMS);
  const home = new Map();
  for (const item of shown) for (const node of item.nodes) home.set(node, item);
  const left = new Set(pages > 1 ? inside : []); // on other pages: known, but not drawn
  const ports = new Map();
  const links = new Map();
  for (const [node, item] of home) {
    if (hidden(node)) continue;
    for (const read of node.reads) {
      const source = behindViews(read, hidden);
      connect(links, home.get(source) || (left.has(source) ? null : portInto(ports, source, item, direction)), item);
    }
    const readers = readersOf(node, hidden).filter((reader) => reader.direction === direction && !isWithin(reader.module, path));
    if (readers.length) connect(links, home.get(node), portOutOf(ports, home.get(node), readers));
  }
  const items = [...shown, ...ports.values()].sort((a, b) => a.order - b.order);
  items.forEach((item, position) => (item.position = position));
  const edges = [...links.values()].map(([from, to]) => [from.position, to.position]);
  return { items, edges, pages, count: inside.length };
}

function itemsOf(nodes, path) {
  const boxes = new Map();
  const items = [];
  for (const node of nodes) {
    if (node.module === path) {
      items.push(nodeItem(node));
      continue;
    }
    const rest = path ? node.module.slice(path.length + 1) : node.module;
    const child = (path ? path + "." : "") + rest.split(".")[0];
    if (!boxes.has(child)) {
      boxes.set(child, { kind: "box", path: child, nodes: [], order: node.index });
      items.push(boxes.get(child));
    }
    boxes.get(child).nodes.push(node);
  }
  for (const box of boxes.values()) describeBox(box);
  return items;
}

function behindViews(node, hidden) {
  while (hidden(node) && node.reads.length) node = node.reads[0];
  return node;
}

function readersOf(node, hidden) {
  return node.readers.flatMap((reader) => (hidden(reader) ? readersOf(reader, hidden) : [reader]));
}

function connect(links, from, to) {
  if (from && from !== to) links.set(`${from.key}>${to.key}`, [from, to]);
}

function sized(item, lines, height) {
  const width = Math.max(44, Math.ceil(Math.max(...lines.map((line) => line.length)) * CHARACTER) + 18);
  return Object.assign(item, { lines, width, height });
}

function nodeItem(node) {
  const item = { kind: node.kind, key: `n${node.index}`, nodes: [node], node, order: node.index };
  item.loose = node.kind === "input";
  if (node.kind === "cast") return sized(item, [`${lastOf(node.parameter)} ${castText(node)}`.trim()], 22);
  if (node.kind === "input") return sized(item, [`${inputText(node)}  ${typeText(node)}`], 22);
  if (node.kind === "output") return sized(item, [`${outputText(node)}  ${typeText(node)}`], 22);
  // What scales the loss is known by its name: unscaled_head_weight.
  return sized(item, [node.kind === "added" && node.note ? node.name : shortOp(node.op), typeText(node)], 40);
}

function castText(node) {
  return `${node.reads.length ? shortDtype(node.reads[0].dtype) : "?"} → ${shortDtype(node.dtype)}`;
}

function inputText(node) {
  if (node.note.startsWith("parameter ")) return lastOf(node.note);
  return node.note === "loss scale" ? node.note : node.name;
}

function outputText(node) {
  return node.note.startsWith("gradient of ") ? `gradient of ${lastOf(node.note.slice(12))}` : node.note;
}

function describeBox(box) {
  const matmuls = box.nodes.filter((node) => node.decision && node.decision.opClass === "low");
  const low = matmuls.filter((node) => node.decision.inputs.some((dtype) => LOW.includes(dtype)));
  const casts = box.nodes.filter((node) => node.kind === "cast").length;
  box.key = `b${box.path}`;
  // Parameters and casts of them stand first in a graph, wherever the module computes.
  box.order = (box.nodes.find((node) => node.kind === "operation" || node.kind === "added") || box.nodes[0]).index;
  box.share = matmuls.length ? low.length / matmuls.length : null;
  const figures = [matmuls.length ? `${low.length}/${matmuls.length} low` : "", casts ? plural(casts, "cast") : ""];
  sized(box, [lastOf(box.path), figures.filter(Boolean).join(", ") || plural(box.nodes.length, "node")], 46);
}

// Ports are per value: one for all its readers here; but what a box of backward reads of forward has one in all.
function portInto(ports, source, reader, direction) {
  const together = reader.kind === "box" && source.direction !== direction;
  const key = together ? `f${reader.key}` : `i${source.index}`;
  if (!ports.has(key)) {
    const ends = together ? { path: reader.path } : { node: source };
    ports.set(key, { kind: "port", key, nodes: [], order: Infinity, loose: true, ...ends });
  }
  const port = ports.get(key);
  port.order = Math.min(port.order, reader.order - 0.5);
  if (!port.nodes.includes(source)) port.nodes.push(source);
  const one = port.nodes.length === 1;
  return sized(port, [one ? portText(source) : `${plural(port.nodes.length, "value")} of ${source.direction}`], 20);
}

function portText(source) {
  const name = {
    input: `${inputText(source)} ${shortDtype(source.dtype)}`,
    cast: `${lastOf(source.parameter)} ${castText(source)}`.trim(),
  }[source.kind] || `${shortOp(source.op)} ${shortDtype(source.dtype)}`;
  return source.module ? `${name} · ${source.module.split(".").slice(-2).join(".")}` : name;
}

function portOutOf(ports, item, readers) {
  const key = `o${item.key}`;
  const modules = [...new Set(readers.map((reader) => reader.module))];
  if (!ports.has(key)) {
    ports.set(key, { kind: "port", key, out: true, node: readers[0], nodes: [], order: item.order + 0.5, modules: new Set() });
  }
  const port = ports.get(key);
  modules.forEach((module) => port.modules.add(module));
  const [first] = port.modules;
  const more = port.modules.size > 1 ? ` and ${port.modules.size - 1} more` : "";
  return sized(port, [`to ${first.split(".").slice(-2).join(".") || "the model itself"}${more}`], 20);
}
