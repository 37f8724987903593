"""Names of the chain verifiers: what they verify with, where the draft comes from, and how long it is.

    KIND[-PARAMETERS][-eos][@DRAFTER][:LENGTH]

    sd                   lossless speculative decoding, draft by the additional heads, 3 tokens
    sd@draft             the same with the draft model
    ssd-0.4@draft:4      tolerance 0.4, the draft model drafts 4 tokens
    ssd-0.4-eos@draft    as in the paper: the tolerance holds for EOS too (without -eos it is judged as in sd)
    pcg-0.42             similarity groups at threshold 0.42
    typical              Medusa's typical acceptance; typical-0.09-0.3 gives epsilon and delta
    topk-verify-50       accepted where the base head has the token among its 50 likeliest

DRAFTER is `heads` (the default: every CAR checkpoint has them) or `draft`. LENGTH is 3 unless given (the best in both
papers), or as many as there are additional heads where there are fewer.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

from dcar.errors import ConfigError
from dcar.model.draft import AnyDecoder
from eval.verifiers.chain import ChainVerifier
from eval.verifiers.drafters import Drafter, HeadDrafter, ModelDrafter

DEFAULT_LENGTH = 3
NUMBER = r"-?\d+(?:\.\d+)?(?:e-?\d+)?"
SUFFIX = re.compile(rf"(?P<parameters>(?:-{NUMBER})*)(?P<eos>-eos)?(?:@(?P<drafter>\w+))?(?::(?P<length>\d+))?")


def chain_method(name: str, kind: str, example: str, verifier: type[ChainVerifier], decoder: AnyDecoder,
                 draft: AnyDecoder | None) -> tuple[Callable[[], ChainVerifier], dict[str, str]]:
    """What builds the method called `name`, and all that its tokens depend on besides the models.

    ConfigError for a malformed name, parameters out of range, too few heads, or a missing draft model.
    """
    found = SUFFIX.fullmatch(name.removeprefix(kind))
    if found is None:
        raise ConfigError(f"method '{name}': write {example}, then @heads or @draft, then :LENGTH, as in "
                          f"{example}@draft:3")
    numbers = tuple(float(x) for x in re.findall(f"-({NUMBER})", found["parameters"]))
    if len(numbers) not in verifier.numbers:
        wanted = " or ".join(map(str, verifier.numbers))
        raise ConfigError(f"method '{name}': {len(numbers)} parameters instead of {wanted}; write {example}")
    if found["eos"] and not verifier.relaxes_end:
        raise ConfigError(f"method '{name}': -eos relaxes the rule for EOS, which {kind} never does")
    source, most = found["drafter"] or "heads", decoder.config.num_prediction_heads - 1
    if source not in ("heads", "draft"):
        raise ConfigError(f"method '{name}': the draft comes from @heads or @draft, not @{source}")
    length = int(found["length"] or (DEFAULT_LENGTH if source == "draft" else min(DEFAULT_LENGTH, most)))
    if found["length"] and length == 0:
        raise ConfigError(f"method '{name}': a draft has at least 1 token")
    about = {"draft": f"{source}:{length}", "eos_strict": str(not found["eos"])}
    make_drafter: Callable[[], Drafter] = partial(HeadDrafter, length)
    if source == "draft":
        if draft is None:
            raise ConfigError(f"method '{name}' needs a draft model: give its folder in `draft` (made by `dcar "
                              "train-draft`, or a smaller decoder of the same ids), or draft by the heads: @heads")
        make_drafter = partial(ModelDrafter, draft, length)
    elif not 1 <= length <= most:
        raise ConfigError(f"method '{name}': this decoder has {most} additional heads to draft with; draft at most "
                          "that many tokens, or use a draft model: @draft")
    arguments = verifier.arguments(decoder, numbers)
    loose = {"eos_strict": False} if found["eos"] else {}

    def made() -> ChainVerifier:
        return verifier(name, make_drafter(), *arguments, **loose)

    return made, {**about, **made().identity}  # impossible parameters are refused now
