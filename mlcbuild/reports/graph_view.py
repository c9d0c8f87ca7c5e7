"""Shows the picture of a graph on an HTML page, with controls that enlarge it, filter it, and mark the
steps that depend on each other.
"""

from __future__ import annotations

STYLE = """
.graph>div{overflow:auto;max-height:80vh;margin-top:8px}.graph svg{display:block}
.graph button,.graph input{font:inherit;padding:4px 10px;margin-right:6px;border:1px solid #a9b3c1;
border-radius:6px;background:#fff;color:#1c2330}
.graph svg *{transition:opacity .15s}
"""

_SCRIPT = """
for (const graph of document.querySelectorAll('.graph')) {
  const one = (name) => graph.querySelector(name);
  const svg = one('svg'), area = one('div'), filter = one('input'), count = one('output');
  const nodes = [...svg.querySelectorAll('[data-node]')], edges = [...svg.querySelectorAll('[data-from]')];
  const natural = svg.viewBox.baseVal.width;
  const fitting = () => Math.min(1, area.clientWidth / natural);
  let scale = 1;
  // The point of the picture at (x, y) of the area, its middle by default, stays there.
  const zoom = (next, x = area.clientWidth / 2, y = area.clientHeight / 2) => {
    const before = scale, [left, top] = [area.scrollLeft + x, area.scrollTop + y];
    scale = Math.min(4, Math.max(0.1, next));
    svg.setAttribute('width', natural * scale);
    svg.removeAttribute('height');
    area.scrollTo(left * scale / before - x, top * scale / before - y);
  };
  const reveal = (node) => {
    const [box, shown] = [node, area].map((element) => element.getBoundingClientRect());
    const missing = (low, high, from, to) => (low < from ? low - from - 20 : high > to ? high - to + 20 : 0);
    area.scrollBy(missing(box.left, box.right, shown.left, shown.right),
      missing(box.top, box.bottom, shown.top, shown.bottom));
  };
  const reach = (start, from, to) => {
    const found = new Set([start]);
    for (const node of found) for (const e of edges) if (e.dataset[from] === node) found.add(e.dataset[to]);
    return found;
  };
  const around = (node) => [...reach(node, 'from', 'to'), ...reach(node, 'to', 'from')];
  const show = (kept) => {
    for (const n of nodes) n.style.opacity = !kept || kept.has(n.dataset.node) ? 1 : 0.15;
    for (const e of edges)
      e.style.opacity = !kept || (kept.has(e.dataset.from) && kept.has(e.dataset.to)) ? 1 : 0.08;
  };
  const title = (node) => node.querySelector('title').textContent.toLowerCase();
  const filtered = () => {
    const text = filter.value.trim().toLowerCase();
    const named = nodes.filter((n) => title(n).includes(text));
    show(text ? new Set(named.flatMap((n) => around(n.dataset.node))) : null);
    count.textContent = text ? `${named.length} of ${nodes.length}, and what belongs to them` : '';
    return text ? named[0] : null;
  };
  for (const node of nodes) {
    node.tabIndex = 0;
    for (const event of ['mouseenter', 'focus'])
      node.addEventListener(event, () => show(new Set(around(node.dataset.node))));
    for (const event of ['mouseleave', 'blur']) node.addEventListener(event, filtered);
  }
  filter.addEventListener('input', () => { const first = filtered(); if (first) reveal(first); });
  const [larger, smaller, fit] = graph.querySelectorAll('button');
  larger.onclick = () => zoom(scale * 1.25);
  smaller.onclick = () => zoom(scale / 1.25);
  fit.onclick = () => zoom(fitting());
  area.addEventListener('wheel', (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    const box = area.getBoundingClientRect();
    zoom(scale * Math.exp(-event.deltaY / 300), event.clientX - box.left, event.clientY - box.top);
  }, { passive: false });
  zoom(Math.max(0.6, fitting()));
}
"""


def view(svg: str) -> str:
    """Returns the HTML of a graph's picture with its controls and their script. svg: a result of
    `graph_picture.drawing`. The page that holds it must include the style sheet STYLE."""
    return (
        '<div class="graph">'
        "<button>Larger</button><button>Smaller</button><button>Fit</button>"
        '<input type="search" placeholder="Filter steps" aria-label="Filter steps"><output></output>'
        f"<div>\n{svg}</div></div>\n<script>{_SCRIPT}</script>\n"
    )
