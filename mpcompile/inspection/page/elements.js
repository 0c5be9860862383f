// Making elements. Text goes in as text nodes and attributes only: names from the model are never read as HTML.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null));
  return element;
}

function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function byId(id) {
  return document.getElementById(id);
}

// A node or module that is shown elsewhere: a button that leads there.
function nodeLink(node) {
  return el("button", { class: `link ${dtypeClass(node.dtype)}`, onclick: () => show({ node, module: node.module }) }, node.name);
}

function moduleLink(path) {
  return el("button", { class: "link", onclick: () => show({ module: path, node: null }) }, path || "whole model");
}

function plural(count, noun) {
  return `${count} ${noun}${count === 1 ? "" : "s"}`;
}
