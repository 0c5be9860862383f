// What is shown now, kept in the address so that back, forward and links work.

const report = readReport(byId("data").textContent);
const state = { graph: -1, module: "", node: null, views: false, pages: {} };

function currentGraph() {
  return report.graphs[state.graph];
}

// Show another graph, module or node; what is not given stays.
function show(change) {
  const next = { graph: state.graph, module: state.module, node: state.node, ...change };
  const hash = new URLSearchParams({ g: next.graph, m: next.module, ...(next.node ? { n: next.node.name } : {}) });
  if (`#${hash}` !== location.hash) history.pushState(null, "", `#${hash}`);
  render(next);
}

function fromAddress() {
  const wanted = new URLSearchParams(location.hash.slice(1));
  const graph = report.graphs[Number(wanted.get("g"))] ? Number(wanted.get("g")) : 0;
  const { modules, nodes } = report.graphs[graph];
  const module = modules.has(wanted.get("m")) ? wanted.get("m") : "";
  const node = nodes.find((candidate) => candidate.name === wanted.get("n")) || null;
  render({ graph, module, node });
}

function render(next) {
  const isNewGraph = next.graph !== state.graph;
  const isNewModule = isNewGraph || next.module !== state.module;
  // A hidden view that is asked for is shown.
  const needsViews = next.node !== null && next.node.kind === "view" && !state.views;
  if (needsViews) byId("views").checked = state.views = true;
  if (isNewModule) state.pages = { forward: 0, backward: 0 };
  Object.assign(state, next);
  if (isNewGraph) {
    byId("graph").value = String(state.graph);
    fillTree(currentGraph());
  }
  if (isNewModule) {
    selectRow(state.module);
    fillOverview(currentGraph(), state.module);
  }
  if (isNewModule || needsViews) drawPanes();
  fillDetails(state.node);
  markSelected(state.node);
}

function drawPanes() {
  for (const direction of ["forward", "backward"]) {
    const container = byId(direction);
    const pane = paneOf(currentGraph(), state.module, direction, state.views, state.pages[direction]);
    drawPane(container, pane, direction);
    container.parentElement.querySelector(".count").textContent = plural(pane.count, "node");
    if (pane.pages > 1) container.prepend(pager(direction, pane.pages));
  }
}

function pager(direction, pages) {
  const turn = (by) => () => {
    state.pages[direction] += by;
    drawPanes();
    markSelected(state.node);
  };
  const page = state.pages[direction];
  return el("p", { class: "pager" },
    el("button", { onclick: turn(-1), disabled: page === 0 }, "earlier"),
    ` part ${page + 1} of ${pages} `,
    el("button", { onclick: turn(1), disabled: page === pages - 1 }, "later"));
}

function start() {
  byId("facts").textContent = report.summary[0].replace("mixprec: ", "");
  if (!report.graphs.length) {
    byId("overview").append(el("p", { class: "empty" }, "The report has no graph."));
    return;
  }
  report.graphs.forEach((graph, number) => byId("graph").append(el("option", { value: number }, `${number + 1} (${plural(graph.nodes.length, "node")})`)));
  byId("graph-choice").hidden = report.graphs.length < 2;
  byId("graph").addEventListener("change", () => show({ graph: Number(byId("graph").value), module: "", node: null }));
  byId("views").addEventListener("change", () => {
    state.views = byId("views").checked;
    drawPanes();
    markSelected(state.node);
  });
  window.addEventListener("popstate", fromAddress);
  setUpSearch(searchIndex(report));
  fromAddress();
}

start();
