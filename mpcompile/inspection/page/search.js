// Search over modules, node names and operators of all graphs.

const MOST_RESULTS = 40;

function searchIndex(report) {
  return report.graphs.flatMap((graph, number) => [
    ...[...graph.modules.keys()].filter(Boolean).map((path) => ({ graph: number, module: path, node: null, text: path, note: "module" })),
    ...graph.nodes.map((node) => ({ graph: number, module: node.module, node, text: node.name, note: resultNote(node) })),
  ]).map((entry) => ({ ...entry, hay: `${entry.text} ${entry.note}`.toLowerCase() }));
}

function resultNote(node) {
  return [shortOp(node.op), typeText(node), node.note, node.module, node.direction].filter(Boolean).join(" · ");
}

// Every word must be there; what begins with the text comes first, modules before nodes.
function find(index, text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  if (!words.length) return [];
  const hits = index.filter((entry) => words.every((word) => entry.hay.includes(word)));
  const score = (entry) => {
    const name = entry.text.toLowerCase();
    return (name === words[0] ? 0 : name.startsWith(words[0]) ? 1 : name.includes(words[0]) ? 2 : 3) * 2 + (entry.node ? 1 : 0);
  };
  return hits.map((entry) => [score(entry), entry]).sort((a, b) => a[0] - b[0]).map(([, entry]) => entry);
}

function setUpSearch(index) {
  const input = byId("search");
  const list = byId("results");
  let hits = [];
  let chosen = 0;

  function choose(position) {
    chosen = Math.max(0, Math.min(position, list.children.length - 1));
    [...list.children].forEach((row, i) => row.setAttribute("aria-selected", i === chosen ? "true" : "false"));
    const row = list.children[chosen];
    if (row) row.scrollIntoView({ block: "nearest" });
    input.setAttribute("aria-activedescendant", row ? row.id : "");
  }

  function close() {
    list.hidden = true;
    input.setAttribute("aria-expanded", "false");
  }

  function go(entry) {
    close();
    show({ graph: entry.graph, module: entry.module, node: entry.node });
  }

  function update() {
    hits = find(index, input.value);
    const rows = hits.slice(0, MOST_RESULTS).map((entry, i) =>
      el("li", { role: "option", id: `result-${i}`, onmousedown: (event) => event.preventDefault(), onclick: () => go(entry) },
        el("span", { class: entry.node ? `chip ${dtypeClass(entry.node.dtype)}` : "chip module" }, entry.text),
        el("span", { class: "note" }, entry.note)));
    if (!hits.length) rows.push(el("li", { class: "note" }, "Nothing is called so."));
    if (hits.length > MOST_RESULTS) rows.push(el("li", { class: "note" }, `and ${hits.length - MOST_RESULTS} more`));
    list.replaceChildren(...rows);
    list.hidden = !input.value.trim();
    input.setAttribute("aria-expanded", String(!list.hidden));
    choose(0);
  }

  input.addEventListener("input", update);
  input.addEventListener("focus", update);
  input.addEventListener("blur", close);
  input.addEventListener("keydown", (event) => {
    if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      event.preventDefault();
      choose(chosen + (event.key === "ArrowDown" ? 1 : -1));
    } else if (event.key === "Enter" && hits[chosen]) {
      go(hits[chosen]);
    } else if (event.key === "Escape") {
      input.value = "";
      close();
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "/" || event.target === input) return;
    event.preventDefault();
    input.focus();
    input.select();
  });
}
