// Layered layout of a directed graph (Sugiyama): ranks, dummies on long edges, barycentres, then positions.

const GAP_X = 18;
const GAP_Y = 30;
const DUMMY_WIDTH = 10;
const MOST_DUMMIES = 6000;

// items: [{id, width, height, loose}], in an order in which sources come before readers where they can;
// edges: [[from, to]] of positions in items. Adds x and y (centres) to the items; returns the size and the edges' points.
function layOut(items, edges) {
  const forward = edges.filter(([a, b]) => a < b);
  const ranks = rankOf(items, forward);
  const boxes = items.map((item, i) => ({ ...item, rank: ranks[i], above: [], below: [] }));
  const routes = routeEdges(boxes, forward);
  const layers = layersOf(boxes);
  orderLayers(layers);
  placeAcross(layers);
  const size = placeDown(layers);
  items.forEach((item, i) => Object.assign(item, { x: boxes[i].x, y: boxes[i].y, rank: boxes[i].rank }));
  const back = edges.filter(([a, b]) => a >= b).map(([a, b]) => ({ edge: [a, b], back: true, points: [items[a], items[b]] }));
  return { ...size, routes: [...routes.map(({ edge, boxes: via }) => ({ edge, back: false, points: via })), ...back] };
}

function rankOf(items, edges) {
  const into = items.map(() => []);
  const out = items.map(() => []);
  for (const [a, b] of edges) {
    into[b].push(a);
    out[a].push(b);
  }
  const ranks = items.map(() => 0);
  items.forEach((_, i) => {
    for (const a of into[i]) ranks[i] = Math.max(ranks[i], ranks[a] + 1);
  });
  // Inputs, and what is made of inputs alone, stand next to their first reader instead of all at the top.
  const loose = items.map((item, i) => item.loose && into[i].length === 0);
  items.forEach((item, i) => {
    loose[i] = loose[i] || (into[i].length > 0 && into[i].every((a) => loose[a]) && out[i].length > 0);
  });
  for (let i = items.length - 1; i >= 0; i--) {
    if (loose[i] && out[i].length) ranks[i] = Math.min(...out[i].map((b) => ranks[b])) - 1;
  }
  const used = [...new Set(ranks)].sort((a, b) => a - b);
  const dense = new Map(used.map((rank, i) => [rank, i]));
  return ranks.map((rank) => dense.get(rank));
}

function routeEdges(boxes, edges) {
  const span = edges.reduce((sum, [a, b]) => sum + boxes[b].rank - boxes[a].rank - 1, 0);
  const straight = span > MOST_DUMMIES;
  return edges.map(([a, b]) => {
    const via = [boxes[a]];
    for (let rank = boxes[a].rank + 1; rank < boxes[b].rank && !straight; rank++) {
      const dummy = { width: DUMMY_WIDTH, height: 0, rank, above: [], below: [], dummy: true };
      boxes.push(dummy);
      via.push(dummy);
    }
    via.push(boxes[b]);
    for (let i = 1; i < via.length; i++) {
      via[i - 1].below.push(via[i]);
      via[i].above.push(via[i - 1]);
    }
    return { edge: [a, b], boxes: via };
  });
}

function layersOf(boxes) {
  const layers = [];
  for (const box of boxes) (layers[box.rank] = layers[box.rank] || []).push(box);
  return layers;
}

function orderLayers(layers) {
  layers.forEach((layer) => layer.forEach((box, i) => (box.place = i)));
  for (let sweep = 0; sweep < 8; sweep++) {
    const down = sweep % 2 === 0;
    for (const layer of down ? layers : [...layers].reverse()) {
      for (const box of layer) {
        const near = down ? box.above : box.below;
        box.weight = near.length ? near.reduce((sum, other) => sum + other.place, 0) / near.length : box.place;
      }
      layer.sort((a, b) => a.weight - b.weight);
      const wide = layer.length > 1 ? 1 / (layer.length - 1) : 1;
      layer.forEach((box, i) => (box.place = layer.length > 1 ? i * wide : 0.5));
    }
  }
}

function placeAcross(layers) {
  for (const layer of layers) {
    let x = 0;
    for (const box of layer) {
      box.x = x + box.width / 2;
      x += box.width + GAP_X;
    }
    for (const box of layer) box.x -= x / 2;
  }
  for (let sweep = 0; sweep < 16; sweep++) {
    for (const layer of sweep % 2 === 0 ? layers : [...layers].reverse()) settle(layer, sweep);
  }
}

// The positions nearest to where the neighbours are that keep order and distance: isotonic regression.
function settle(layer, sweep) {
  let offset = 0;
  const blocks = [];
  layer.forEach((box, i) => {
    if (i > 0) offset += (layer[i - 1].width + box.width) / 2 + GAP_X;
    box.offset = offset;
    const near = sweep < 12 ? (sweep % 2 === 0 ? box.above : box.below) : [...box.above, ...box.below];
    const wanted = near.length ? near.reduce((sum, other) => sum + other.x, 0) / near.length : box.x;
    const weight = near.length ? (box.dummy ? 2 : 1) : 0.1;
    blocks.push({ sum: (wanted - offset) * weight, weight, count: 1 });
    while (blocks.length > 1 && mean(blocks[blocks.length - 2]) > mean(blocks[blocks.length - 1])) {
      const last = blocks.pop();
      const before = blocks[blocks.length - 1];
      before.sum += last.sum;
      before.weight += last.weight;
      before.count += last.count;
    }
  });
  let i = 0;
  for (const block of blocks) {
    for (let k = 0; k < block.count; k++, i++) layer[i].x = mean(block) + layer[i].offset;
  }
}

function mean(block) {
  return block.sum / block.weight;
}

function placeDown(layers) {
  let left = Infinity;
  let right = -Infinity;
  let y = 12;
  for (const layer of layers) {
    const height = Math.max(...layer.map((box) => box.height));
    for (const box of layer) {
      box.y = y + height / 2;
      left = Math.min(left, box.x - box.width / 2);
      right = Math.max(right, box.x + box.width / 2);
    }
    y += height + GAP_Y;
  }
  for (const layer of layers) {
    for (const box of layer) box.x += 12 - left;
  }
  return { width: layers.length ? right - left + 24 : 0, height: layers.length ? y - GAP_Y + 12 : 0 };
}
