"""`dcar analyse what=heads`: which head predicts a token best, and what the first layer attends to.

Source: arXiv 2506.22023, section 3.2, Figures 3 and 4.

    dcar analyse what=heads decoder=runs/car_paper far_decoder=runs/far_paper \\
      data=runs/prepared_libritts limit=0

Along the true tokens, each of the K heads predicts every token, from K different positions. The
table lists the mean cross entropy of each head and the shares of the tokens that it predicts best
and worst of all heads; the paper reports 60.07 % and 9.27 % for the base head of seven on LibriTTS
dev. Only tokens that all heads predict are counted.

For the attention of the first layer, averaged over its attention heads, the table lists the share
that goes to the text and to the last ten speech tokens, and the entropy in nats. The paper shows
pictures of it and no numbers.

Writes heads.json, heads.png (the order of the heads by position, Figure 4), attention.png (the
weights of one utterance, whole and near the diagonal, Figure 3) and config.yaml.
"""

from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dcar.config import check, load_config, save_config, setting
from dcar.config.commands import DeviceSettings, OutSettings, PromptSettings, SeedSettings
from dcar.errors import ConfigError
from dcar.model.batch import speech_batch
from dcar.model.car import CARDecoder
from dcar.model.load import Shipped, load_decoder
from dcar.process import own_device, run_claimed
from dcar.prompts.items import PromptItem
from dcar.prompts.load import load_prompts
from dcar.storage import replacing
from dcar.tracking import provenance, write_json
from eval.analysis.fit_verifiers import teacher_forced
from heads.layers import rotate

RECENT = 10  # speech tokens, the current one included
SHOWN = 60  # positions of the pictures that show single tokens


@dataclass
class HeadsConfig(SeedSettings, OutSettings, DeviceSettings, PromptSettings):
    """Settings of `dcar analyse what=heads`."""

    out: str = "runs/heads"
    data: str = "starter"
    split: str = "dev"
    limit: int = 200
    decoder: str = setting("starter", "Decoder with several heads; starter = the shipped one.")
    far_decoder: str = setting(
        "",
        "Decoder with one head, whose attention is shown too; starter = the shipped one; "
        "empty = none.",
    )

    def __post_init__(self) -> None:
        check(self)


@torch.no_grad()
def losses_by_head(model: CARDecoder, hidden: Tensor, tokens: Sequence[int]) -> Tensor:
    """Return the cross entropy in nats of every token by every head, float32 [K, T].

    hidden [T, D]: states of the last prompt position and of all tokens (`teacher_forced`); tokens:
    the T - 1 tokens, after which the end of speech is predicted. Head k predicts token i from the
    state k - 1 positions earlier; NaN where there is none.
    """
    targets = torch.tensor([*tokens, model.config.eos], device=hidden.device)
    logits = model.heads.logits(hidden).float().unbind(1)
    length = len(targets)
    rows = [
        F.cross_entropy(head[: length - k], targets[k:], reduction="none")
        for k, head in enumerate(logits)
    ]
    return torch.stack([F.pad(row, (length - len(row), 0), value=torch.nan) for row in rows])


@torch.no_grad()
def first_attention(model: CARDecoder, item: PromptItem) -> Tensor:
    """Return the attention weights of the first layer, averaged over its heads, float32 [S, N + S].

    Rows are the S speech positions of prompt and target, columns the N text positions and the
    speech positions.
    """
    device = model.norm.weight.device
    bos = [model.config.speech_vocab_size + 1] * model.config.bos
    start = [*item.prompt_ids, *bos]
    inputs: list[tuple[Any, ...]] = []
    hook = model.layers[0].register_forward_pre_hook(
        lambda module, arguments: inputs.append(arguments)
    )
    model.speech_hidden(
        speech_batch([item.text_ids], [[*start, *item.reference_tokens]], [len(start)], device)
    )
    hook.remove()
    x, rotary = inputs[0][:2]
    layer: Any = model.layers[0]
    width = x.shape[1]
    q, k = rotate(layer.project(x)[:2], *rotary)[:, 0].float()
    column = torch.arange(width, device=device)
    visible = (column < len(item.text_ids)) | (column <= column[:, None])
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~visible, -torch.inf)
    return scores.softmax(-1).mean(0)[len(item.text_ids) :]


@dataclass
class Attention:
    """Attention of the target's positions of one utterance, each a mean over these."""

    text: float  # share on the text
    recent: float  # share on the last RECENT speech tokens
    entropy: float  # nats


@dataclass
class Head:
    """Predictions of one head. head: from 1; best, worst: shares of the tokens that it predicts
    best and worst of all heads."""

    head: int
    nats: float
    best: float
    worst: float


@dataclass
class Heads:
    """The content of heads.json. attention: by decoder, of its first layer."""

    utterances: int
    heads: list[Head]
    attention: dict[str, Attention]


def attention_of(weights: Tensor, texts: int, first: int) -> Attention:
    """Summarise weights [S, N + S] over the speech positions from `first`; N = texts."""
    target = weights[first:]
    row = torch.arange(first, len(weights), device=weights.device)[:, None]
    column = torch.arange(len(weights), device=weights.device)
    recent = (column <= row) & (column > row - RECENT)
    shares = (
        target[:, :texts].sum(1),
        (target[:, texts:] * recent).sum(1),
        torch.special.entr(target).sum(1),
    )
    return Attention(*(float(share.mean()) for share in shares))


def draw_order(order: Tensor, path: Path) -> None:
    """Draw the order of the heads by position [K, T]: 0 = the best head of a position."""
    from matplotlib.figure import Figure

    figure = Figure((8, 0.6 + 0.25 * len(order)), dpi=170, layout="constrained")
    panel = figure.subplots()
    panel.imshow(-order.cpu().numpy(), cmap="viridis", aspect="auto", interpolation="nearest")
    panel.set_yticks(range(len(order)), [str(k + 1) for k in range(len(order))])
    panel.set(xlabel="speech token", ylabel="head (bright: best)")
    with replacing(path) as part:
        figure.savefig(part, format="png")


def draw_attention(weights: dict[str, Tensor], path: Path) -> None:
    """Draw attention weights [S, N + S] by name, whole and for the last SHOWN speech positions."""
    from matplotlib.figure import Figure

    figure = Figure((8, 4 * len(weights)), dpi=170, layout="constrained")
    rows = figure.subplots(len(weights), 2, squeeze=False)
    for (name, of), (whole, near) in zip(weights.items(), rows, strict=True):
        shown = of.cpu().sqrt().numpy()  # small weights would be invisible
        whole.imshow(shown, cmap="magma", aspect="auto", interpolation="nearest")
        near.imshow(shown[-SHOWN:, -SHOWN:], cmap="magma", aspect="auto", interpolation="nearest")
        whole.set(title=f"{name}: text, then speech", ylabel="speech position")
        near.set(title=f"last {SHOWN} speech positions")
    with replacing(path) as part:
        figure.savefig(part, format="png")


def measured_decoder(path: str, device: str, starter: Shipped) -> CARDecoder:
    """Load a decoder of stage one. ConfigError for a converted language model."""
    model = load_decoder(path, device, starter)
    if not isinstance(model, CARDecoder):
        raise ConfigError(
            f"{path}: what=heads reads the layers of decoders of `dcar train`; this is a converted "
            "language model"
        )
    return model


def order_of_heads(model: CARDecoder, items: Sequence[PromptItem], picture: Path) -> list[Head]:
    """Return nats and shares by head; draw the order of the heads of the first utterance."""
    heads = model.config.num_prediction_heads
    losses = [
        losses_by_head(model, hidden, item.reference_tokens)[:, heads - 1 :]
        for item, hidden in zip(items, teacher_forced(model, items), strict=True)
    ]
    draw_order(losses[0][:, :SHOWN].argsort(0).argsort(0), picture)
    every = torch.cat(losses, 1)
    best, worst = (
        ids.bincount(minlength=heads) / len(ids) for ids in (every.argmin(0), every.argmax(0))
    )
    columns = zip(every.mean(1).tolist(), best.tolist(), worst.tolist(), strict=True)
    return [Head(k, *values) for k, values in enumerate(columns, start=1)]


def run(config: HeadsConfig) -> Heads:
    """Measure, draw and write, heads.json too. Raises ConfigError for a single head."""
    device = own_device(config.device)
    models = {"decoder": measured_decoder(config.decoder, device, "decoder")}
    if config.far_decoder:
        models["far_decoder"] = measured_decoder(config.far_decoder, device, "far")
    model, out = models["decoder"], Path(config.out)
    if model.config.num_prediction_heads < 2:
        raise ConfigError(
            f"{config.decoder}: what=heads compares heads, and this decoder has one; give it as "
            "far_decoder and one with several heads as decoder"
        )
    out.mkdir(parents=True, exist_ok=True)
    items = load_prompts(
        config.data, config.split, model, config.prompt_tokens, config.seed, config.limit
    )
    heads = order_of_heads(model, items, out / "heads.png")
    bos = int(model.config.bos)
    shown: dict[str, Tensor] = {}
    attention: dict[str, Attention] = {}
    for name, of in models.items():
        measured = []
        for item in items:
            weights = first_attention(of, item)
            shares = attention_of(weights, len(item.text_ids), len(item.prompt_ids) + bos)
            measured.append(astuple(shares))
            shown.setdefault(name, weights)
        means = torch.tensor(measured).mean(0).tolist()
        attention[name] = Attention(*means)
    draw_attention(shown, out / "attention.png")
    result = Heads(len(items), heads, attention)
    about = provenance(decoder=config.decoder, data=config.data, split=config.split)
    write_json(out / "heads.json", {**asdict(result), "provenance": about})
    save_config(config, out / "config.yaml")
    return result


def table(result: Heads) -> str:
    """Format the result for a terminal."""
    lines = ["head   nats   best %  worst %"]
    lines += [
        f"{h.head:4} {h.nats:6.3f} {100 * h.best:8.2f} {100 * h.worst:8.2f}" for h in result.heads
    ]
    lines += [
        f"{name}, first layer: {100 * a.text:.1f} % of the attention on the text, "
        f"{100 * a.recent:.1f} % on the last {RECENT} speech tokens; entropy {a.entropy:.2f} nats"
        for name, a in result.attention.items()
    ]
    return "\n".join(lines)


CONFIG = HeadsConfig


def main(arguments: Sequence[str] | None = None) -> None:
    print(table(run_claimed(run, load_config(CONFIG, arguments))))
