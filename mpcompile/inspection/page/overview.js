// The selected module in words: what it computes in and why, and its casts.

const MOST_CASTS = 60;

function fillOverview(graph, path) {
  const module = graph.modules.get(path);
  const nodes = graph.nodes.filter((node) => isWithin(node.module, path));
  const facts = path ? figures(module) : el("pre", {}, report.summary.slice(1).map((line) => line.trim()).join("\n"));
  byId("overview").replaceChildren(heading(path), facts, reasons(nodes), casts(nodes, path));
}

function heading(path) {
  const parts = path ? path.split(".") : [];
  const above = path ? ["", ...parts.slice(0, -1).map((part, i) => parts.slice(0, i + 1).join("."))] : [];
  const crumbs = above.flatMap((outer, i) => (i ? [" / ", moduleLink(outer)] : [moduleLink(outer)]));
  return el("header", {}, el("p", { class: "crumbs" }, crumbs), el("h2", {}, path || "whole model"));
}

function figures(module) {
  const part = module.bytes ? `, ${Math.round((100 * module.low_bytes) / module.bytes)}% of it in 16 bits` : "";
  const facts = [
    module.matmuls ? `${module.low_matmuls} of ${module.matmuls} matmuls, convolutions and attentions run low` : "no matmul here",
    `${plural(module.operations, "operation")}`,
    `makes ${bytesText(module.bytes)}${part}`,
    `${plural(module.casts, "cast")}${module.casts ? `, ${bytesText(module.cast_bytes)} if none is fused` : ""}`,
    module.saved_bytes ? `keeps ${bytesText(module.saved_bytes)} for backward` : "",
  ];
  return el("p", { class: "figures" }, ...facts.filter(Boolean).map((fact) => el("span", {}, fact)));
}

function reasons(nodes) {
  const groups = new Map();
  for (const node of nodes) {
    if (!node.decision || node.decision.opClass === "exact" || node.kind === "view") continue;
    const dtype = computesIn(node);
    if (dtypeClass(dtype) === "other") continue; // positions and masks
    const { rule, reason } = node.decision;
    const key = [dtype, rule, reason].join("\n");
    if (!groups.has(key)) groups.set(key, { dtype, rule, reason, nodes: [] });
    groups.get(key).nodes.push(node);
  }
  const weight = ({ nodes: [first], nodes }) => (first.decision.opClass === "low" ? 1e9 : 0) + nodes.length;
  const sorted = [...groups.values()].sort((a, b) => weight(b) - weight(a));
  const rows = sorted.map((group) =>
    el("tr", {},
      el("td", {}, el("span", { class: `chip ${dtypeClass(group.dtype)}` }, group.dtype)),
      el("td", {}, group.rule === "class" ? group.reason : `${group.rule}: ${group.reason}`),
      el("td", {}, operatorCounts(group.nodes))));
  const head = el("tr", {}, ...["computes in", "why", "operations"].map((title) => el("th", { scope: "col" }, title)));
  return el("table", { class: "reasons" }, el("thead", {}, head), el("tbody", {}, rows));
}

function operatorCounts(nodes) {
  const counts = new Map();
  for (const node of nodes) counts.set(shortOp(node.op), (counts.get(shortOp(node.op)) || 0) + 1);
  const named = [...counts].map(([op, count]) => (count > 1 ? `${count} ${op}` : op));
  return named.length > 8 ? `${named.slice(0, 8).join(", ")} and ${plural(named.length - 8, "operator")} more` : named.join(", ");
}

function casts(nodes, path) {
  const inside = nodes.filter((node) => node.kind === "cast");
  const border = new Set(nodes.flatMap((node) => node.reads).filter((node) => node.kind === "cast" && !isWithin(node.module, path)));
  const lists = ["forward", "backward"].map((direction) => {
    const own = inside.filter((node) => node.direction === direction);
    const read = [...border].filter((node) => node.direction === direction);
    return el("div", {},
      el("h4", {}, `${direction}: ${plural(own.length, "cast")}`),
      castList(own.map((node) => [node, node.note])),
      read.length ? el("h4", {}, `made elsewhere, read here: ${read.length}`) : null,
      castList(read.map((node) => [node, `made in ${node.module || "the model itself"}`])));
  });
  const few = inside.length + border.size <= 16;
  return el("details", { open: few }, el("summary", {}, `Casts (${inside.length})`), el("div", { class: "casts" }, lists));
}

function castList(entries) {
  const rows = entries.slice(0, MOST_CASTS).map(([node, note]) =>
    el("li", {}, nodeLink(node), ` ${castText(node)} [${node.shape.join(", ")}] `, el("span", { class: "note" }, note)));
  if (entries.length > MOST_CASTS) rows.push(el("li", { class: "note" }, `and ${entries.length - MOST_CASTS} more, in the modules inside`));
  return el("ul", {}, rows);
}
