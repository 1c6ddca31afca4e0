/** The line a finger draws over the keys: newest points thick, older ones thin. */

const LIFE = 320; // milliseconds a point stays visible

export class Trail {
  #canvas;
  #points = [];
  #frame = 0;

  /** @param {HTMLElement} over  the element that the trail covers */
  constructor(over) {
    this.#canvas = document.createElement("canvas");
    this.#canvas.className = "trail";
    this.#canvas.setAttribute("aria-hidden", "true");
    over.append(this.#canvas);
  }

  /** One more point, in CSS pixels from the upper left corner of the covered element. */
  add(x, y) {
    this.#points.push([x, y, performance.now()]);
    this.#frame ||= requestAnimationFrame(() => this.#draw());
  }

  #draw() {
    this.#frame = 0;
    const canvas = this.#canvas;
    const ratio = window.devicePixelRatio || 1;
    const [width, height] = [Math.round(canvas.clientWidth * ratio), Math.round(canvas.clientHeight * ratio)];
    if (canvas.width !== width || canvas.height !== height) [canvas.width, canvas.height] = [width, height];
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, canvas.clientWidth, canvas.clientHeight);
    const now = performance.now();
    this.#points = this.#points.filter(([, , born]) => now - born < LIFE);
    pen.strokeStyle = getComputedStyle(canvas).color;
    pen.lineCap = pen.lineJoin = "round";
    for (let i = 1; i < this.#points.length; i++) {
      const [x0, y0] = this.#points[i - 1];
      const [x1, y1, born] = this.#points[i];
      pen.lineWidth = 1 + 10 * (1 - (now - born) / LIFE); // it tapers; the whole line is translucent, not its parts
      pen.beginPath();
      pen.moveTo(x0, y0);
      pen.lineTo(x1, y1);
      pen.stroke();
    }
    if (this.#points.length) this.#frame = requestAnimationFrame(() => this.#draw());
  }
}
