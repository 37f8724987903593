"""Sound in the browser while it is being spoken, without anything but the page itself.

Gradio's own streamed audio needs ffmpeg on the server. Here every piece of sound is added to one growing text, of which
Gradio sends only what is new; a script in the page plays the pieces one behind the other as they come.
"""

from __future__ import annotations

import base64
import secrets
from importlib.resources import files

import numpy as np

SCRIPT = f"<script>{(files('eval.demo') / 'player.js').read_text(encoding='utf-8')}</script>"
"""For the head of the page: `window.dcarPlayer`, which plays the growing text of a `Channel`."""
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
