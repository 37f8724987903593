"""Sound in the browser while it is being spoken, without anything but the page itself.

Gradio's own streamed audio needs ffmpeg on the server. Here every piece of sound is added to one growing text, of which
Gradio sends only what is new; a script in the page plays the pieces one behind the other as they come.
"""

from __future__ import annotations

import base64
import secrets

import numpy as np

SCRIPT = """<script>
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
</script>"""
WAKE = "(...given) => { window.dcarPlayer.wake(); return given; }"
"""For a button: sound may begin, and what it sends is left as it is."""
HUSH = "(...given) => { window.dcarPlayer.stop(); return given; }"
"""For a button: what is still playing ends."""


def taking(side: str) -> str:
    """For the text of a side, when it changes."""
    return f"text => {{ window.dcarPlayer.take({side!r}, text); return []; }}"


class Channel:
    """The growing text of one utterance."""

    def __init__(self, rate: int):
        self.text = f"{secrets.token_hex(8)} {rate}"

    def add(self, samples: np.ndarray) -> str:
        """With these samples [n], -1 to 1, behind all before."""
        self.text += "|" + base64.b64encode(pcm(samples).astype("<i2").tobytes()).decode()
        return self.text


def pcm(samples: np.ndarray) -> np.ndarray:
    """Samples from -1 to 1 as 16-bit integers."""
    return (np.clip(samples, -1.0, 1.0) * 32767).astype(np.int16)
