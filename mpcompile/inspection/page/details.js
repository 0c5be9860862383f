// The selected node: every field of its records, and links to what it reads and who reads it.

function fillDetails(node) {
  if (!node) {
    byId("details").replaceChildren(el("p", { class: "empty" }, "Select a node to see the rule that decided it, its source line and its neighbours."));
    return;
  }
  byId("details").replaceChildren(
    el("h2", {}, node.name),
    el("p", {}, el("span", { class: `chip ${dtypeClass(node.dtype)}` }, typeText(node) || "no tensor"), ...marks(node)),
    el("dl", {}, ...facts(node).flatMap(([term, value]) => (value ? [el("dt", {}, term), el("dd", {}, value)] : []))),
    neighbours("Reads", node.reads, node.outside),
    neighbours("Read by", node.readers, []),
  );
}

function marks(node) {
  return [
    node.rounds ? el("span", { class: "mark rounds" }, "rounded here") : null,
    isKept(node) ? el("span", { class: "mark saved" }, "kept for backward") : null,
  ];
}

function facts(node) {
  const decision = node.decision || {};
  const original = decision.userOp && decision.userOp !== node.op ? decision.userOp : "";
  return [
    ["kind", node.kind],
    ["operator", node.op],
    ["part of", original],
    ["why", decision.reason || node.note],
    ["decided by", decision.rule],
    ["also", decision.reason ? node.note : ""],
    ["class", decision.opClass],
    ["precision", decision.precision],
    ["reads", (decision.inputs || []).join(", ")],
    ["makes", node.dtype],
    ["shape", node.dtype ? `[${node.shape.join(", ")}]` : ""],
    ["bytes", node.dtype ? bytesText(node.bytes) : ""],
    ["kept", isKept(node) ? `${bytesText(node.savedBytes)} until backward (predicted)` : ""],
    ["parameter", node.parameter],
    ["module", moduleLink(node.module)],
    ["direction", node.direction],
    ["source", decision.source],
  ];
}

function neighbours(title, nodes, names) {
  if (!nodes.length && !names.length) return el("section", {});
  const rows = nodes.map((node) => el("li", {}, nodeLink(node), ` ${typeText(node)} `, el("span", { class: "note" }, node.kind === "operation" ? shortOp(node.op) : node.kind)));
  const outside = names.map((name) => el("li", {}, name, el("span", { class: "note" }, " not in this part of the report")));
  return el("section", {}, el("h3", {}, title), el("ul", {}, rows, outside));
}
