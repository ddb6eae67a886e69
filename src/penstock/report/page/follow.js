// A page of a run that goes on loads itself again, and is where it was: its view, its place, what is open. Not while
// somebody points at it, types, or looks elsewhere.

class Follow {
  constructor(timeline, control, seconds) {
    Object.assign(this, { timeline, control });
    this.key = `penstock ${location.pathname}`;
    this.restore();
    addEventListener("pagehide", () => this.keep());
    setInterval(() => this.idle() && location.reload(), seconds * 1000);
  }

  idle() {
    const { timeline, control } = this;
    const typing = document.activeElement === document.getElementById("find");
    return !document.hidden && !typing && !timeline.hover && !control.pointers.size && control.tip.box.hidden;
  }

  keep() {
    const { timeline } = this;
    const open = [...document.querySelectorAll("details")].map((details) => details.open);
    const view = timeline.isWhole() ? null : timeline.view;
    const place = { view, at: [scrollX, scrollY], rows: timeline.offset, open };
    try {
      sessionStorage.setItem(this.key, JSON.stringify(place));
    } catch {} // a browser that keeps nothing for files shows the whole step again
  }

  restore() {
    let kept = null;
    try {
      kept = JSON.parse(sessionStorage.getItem(this.key));
    } catch {}
    if (!kept) return;
    document.querySelectorAll("details").forEach((details, i) => (details.open = kept.open[i] ?? details.open));
    if (kept.view) this.timeline.show(...kept.view);
    this.timeline.scroller.scrollTop = kept.rows;
    requestAnimationFrame(() => scrollTo(...kept.at)); // once the curves have their height
  }
}
