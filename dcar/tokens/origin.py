"""Origin of the ids of a corpus, so that models refuse ids of another one."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class TokenizerInfo:
    """Speech tokenizer that made tokens."""

    name: str
    checksum: str  # covers everything that decides its codes
    vocab_size: int
    rate_hz: float  # tokens a second
    spec: str = ""  # setting that loads it
    layers: int | None = None  # of the codes that are stored; None = the first alone

    @property
    def identity(self) -> str:
        """NAME@CHECKSUM, as stored in decoders, vocoders and policies."""
        return f"{self.name}@{self.checksum}"


@dataclass(frozen=True)
class Origin:
    """Origin of text ids and speech tokens."""

    tokenizer: TokenizerInfo
    phonemes: str  # name of the text units (`dcar.text.units`)
    languages: tuple[str, ...] = field(default=(), kw_only=True)  # of the texts; none if unknown
