"use strict";
// The data of the page as objects: graphs of nodes that know what they read and who reads them, and their modules.

const VALUE_FIELDS = [
  "name", "kind", "op", "dtype", "shape", "bytes", "reads", "module", "direction", "rounds", "savedBytes", "note",
  "parameter", "decision",
];
const DECISION_FIELDS = ["userOp", "opClass", "precision", "rule", "reason", "source", "inputs"];
const TEXT_FIELDS = [
  "kind", "op", "dtype", "module", "direction", "note", "parameter", "userOp", "opClass", "precision", "rule",
  "reason", "source",
];
const LOW = ["bfloat16", "float16"];
const SHORT = { bfloat16: "bf16", float16: "f16", float32: "f32", float64: "f64", int64: "i64", int32: "i32", bool: "bool" };

function unpack(row, fields, texts) {
  const record = {};
  fields.forEach((field, i) => {
    record[field] = TEXT_FIELDS.includes(field) ? texts[row[i]] : row[i];
  });
  return record;
}

function readGraph(data, texts) {
  const nodes = data.nodes.map((row, index) => {
    const node = unpack(row, VALUE_FIELDS, texts);
    if (node.decision) {
      node.decision = unpack(node.decision, DECISION_FIELDS, texts);
      node.decision.inputs = node.decision.inputs.map((position) => texts[position]);
    }
    return Object.assign(node, { index, readers: [], outside: [] });
  });
  for (const node of nodes) {
    node.outside = node.reads.filter((read) => typeof read === "string");
    node.reads = node.reads.filter((read) => typeof read === "number").map((position) => nodes[position]);
    for (const source of node.reads) source.readers.push(node);
  }
  const modules = new Map(data.modules.map((figures) => [figures.path, { ...figures, children: [] }]));
  for (const [path, module] of modules) {
    if (path) modules.get(parentOf(path)).children.push(module);
  }
  return { nodes, modules };
}

function readReport(text) {
  const data = JSON.parse(text);
  return { ...data, graphs: data.graphs.map((graph) => readGraph(graph, data.texts)) };
}

function parentOf(path) {
  return path.includes(".") ? path.slice(0, path.lastIndexOf(".")) : "";
}

function lastOf(path) {
  return path.slice(path.lastIndexOf(".") + 1);
}

// Whether a module is another one or inside it.
function isWithin(path, outer) {
  return outer === "" || path === outer || path.startsWith(outer + ".");
}

// "addmm" for "aten.addmm.default".
function shortOp(op) {
  return op.split(".").length === 3 ? op.split(".")[1] : op;
}

function shortDtype(dtype) {
  return SHORT[dtype] || dtype;
}

function typeText(node) {
  return node.dtype ? `${shortDtype(node.dtype)}[${node.shape.join(", ")}]` : "";
}

function dtypeClass(dtype) {
  if (LOW.includes(dtype)) return "low";
  return dtype === "float32" ? "fp32" : "other";
}

function isKept(node) {
  return node.savedBytes !== 0;
}

function bytesText(count) {
  if (count === null) return "dynamic";
  let size = count;
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (size < 999.5) return unit === "B" ? `${size} B` : `${Number(size.toPrecision(3))} ${unit}`;
    size /= 1000;
  }
  return `${Number(size.toPrecision(3))} TB`;
}

// What an operation computes in: a matmul in the low type if it reads one, any other in the widest that it reads.
function computesIn(node) {
  const low = node.decision.inputs.find((dtype) => LOW.includes(dtype));
  if (node.decision.opClass === "low" && low) return low;
  const widths = ["float64", "float32", "float16", "bfloat16"];
  return widths.find((dtype) => node.decision.inputs.includes(dtype)) || node.dtype || "no tensor";
}
