// The tree of modules: rows are made when their module is unfolded, so that a large model opens at once.

function fillTree(graph) {
  byId("tree").replaceChildren(treeRow(graph.modules.get(""), 1));
  unfold(byId("tree").firstElementChild);
  focusRow(byId("tree").firstElementChild.firstElementChild, false);
}

function treeRow(module, level) {
  const folded = module.children.length > 0;
  const row = el("div", {
    class: "row",
    role: "treeitem",
    tabindex: -1,
    style: null,
    "data-path": module.path,
    "aria-level": level,
    "aria-expanded": folded ? "false" : null,
    "aria-selected": "false",
    onclick: (event) => clickRow(event, row),
    onkeydown: (event) => treeKey(event, row),
  });
  row.style.setProperty("--level", level - 1);
  row.append(
    el("span", { class: "fold", "aria-hidden": "true" }, folded ? "›" : ""),
    el("span", { class: "path", title: module.path || "whole model" }, lastOf(module.path) || "whole model"),
    el("span", { class: `share ${module.low_matmuls ? "low" : "fp32"}` }, module.matmuls ? `${module.low_matmuls}/${module.matmuls}` : "–"),
    el("span", { class: "number" }, module.bytes ? bytesText(module.bytes) : "–"),
    el("span", { class: "number" }, module.casts ? String(module.casts) : "–"),
  );
  return el("li", { role: "none" }, row);
}

function clickRow(event, row) {
  focusRow(row, true);
  if (event.target.classList.contains("fold")) toggle(row.parentElement);
  else show({ module: row.dataset.path, node: null });
}

function isFolded(item) {
  return item.firstElementChild.getAttribute("aria-expanded") === "false";
}

function toggle(item) {
  if (isFolded(item)) unfold(item);
  else fold(item);
}

function unfold(item) {
  const row = item.firstElementChild;
  if (!isFolded(item)) return;
  const level = Number(row.getAttribute("aria-level")) + 1;
  const children = currentGraph().modules.get(row.dataset.path).children;
  item.append(el("ul", { role: "group" }, children.map((child) => treeRow(child, level))));
  row.setAttribute("aria-expanded", "true");
}

function fold(item) {
  const row = item.firstElementChild;
  if (row.getAttribute("aria-expanded") !== "true") return;
  item.lastElementChild.remove();
  row.setAttribute("aria-expanded", "false");
}

function focusRow(row, focus) {
  for (const other of document.querySelectorAll("#tree .row[tabindex='0']")) other.setAttribute("tabindex", -1);
  row.setAttribute("tabindex", 0);
  if (focus) row.focus();
}

function treeKey(event, row) {
  const rows = [...document.querySelectorAll("#tree .row")];
  const at = rows.indexOf(row);
  const item = row.parentElement;
  const outer = item.parentElement.closest("li");
  const isOpen = row.getAttribute("aria-expanded") === "true";
  const moves = {
    ArrowDown: () => rows[at + 1],
    ArrowUp: () => rows[at - 1],
    Home: () => rows[0],
    End: () => rows[rows.length - 1],
    ArrowRight: () => (isOpen ? rows[at + 1] : void unfold(item)),
    ArrowLeft: () => (isOpen ? void fold(item) : outer && outer.firstElementChild),
    Enter: () => void show({ module: row.dataset.path, node: null }),
    " ": () => void show({ module: row.dataset.path, node: null }),
  };
  if (!moves[event.key]) return;
  event.preventDefault();
  const next = moves[event.key]();
  if (next) focusRow(next, true);
}

// Unfold the way to a module and mark it.
function selectRow(path) {
  const parts = path ? path.split(".") : [];
  let item = byId("tree").firstElementChild;
  parts.forEach((_, depth) => {
    unfold(item);
    const wanted = parts.slice(0, depth + 1).join(".");
    item = [...item.lastElementChild.children].find((child) => child.firstElementChild.dataset.path === wanted);
  });
  for (const row of document.querySelectorAll("#tree .row[aria-selected='true']")) row.setAttribute("aria-selected", "false");
  item.firstElementChild.setAttribute("aria-selected", "true");
  if (document.activeElement !== item.firstElementChild) focusRow(item.firstElementChild, false);
  item.firstElementChild.scrollIntoView({ block: "nearest" });
}
