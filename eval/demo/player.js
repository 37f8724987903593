// take(side, text): play what of a text is new. text: "ID RATE|PIECE|PIECE…", a piece 16-bit mono samples in base64.
window.dcarPlayer = {
  context: null, id: "", count: 0, ends: 0, sources: [], log: [],
  wake() {  // browsers let sound begin in answer to a click only
    this.context ??= new AudioContext();
    this.context.resume();
  },
  stop() {
    for (const source of this.sources) source.stop();
    this.sources = [];
  },
  take(side, text) {
    if (!text) return;
    const [head, ...pieces] = text.split("|"), [id, rate] = head.split(" ");
    this.wake();
    if (id !== this.id) {
      this.stop();
      Object.assign(this, {id, count: 0, ends: 0});
    }
    for (const piece of pieces.slice(this.count)) {
      const bytes = Uint8Array.from(atob(piece), letter => letter.charCodeAt(0));
      const samples = Float32Array.from(new Int16Array(bytes.buffer), sample => sample / 32768);
      this.count += 1;
      this.log.push({side, id, at: performance.now(), seconds: samples.length / rate});
      if (!samples.length) continue;
      const buffer = this.context.createBuffer(1, samples.length, Number(rate));
      buffer.copyToChannel(samples, 0);
      const source = this.context.createBufferSource();
      source.buffer = buffer;
      source.connect(this.context.destination);
      const start = Math.max(this.ends, this.context.currentTime + (this.ends ? 0.02 : 0.15));  // late pieces wait
      source.start(start);
      this.ends = start + buffer.duration;
      this.sources.push(source);
    }
  },
};
