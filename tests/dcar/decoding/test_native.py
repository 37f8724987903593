"""Decoding steps in C: products and stacks of layers equal PyTorch's, no row depends on the others; how the kernels are
compiled and kept."""

import copy
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
import torch.nn.functional as F

from dcar.decoding.backend import Backend
from dcar.decoding.columns import CausalMask, Columns, RotaryCache, additive, columns_of
from dcar.decoding.cpu import native as module
from dcar.decoding.cpu.backend import cpu_backend
from dcar.decoding.cpu.native import Kernels, NativeError, kernels
from dcar.decoding.stack import Stack
from heads.layers import KVCache, RotaryTable, TransformerLayer


def close(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """To float32 rounding of the sums; a bfloat16 result to its last place."""
    step = 2.0**-7 if got.dtype == torch.bfloat16 else 1e-5
    return torch.allclose(got.float(), wanted, atol=1e-5, rtol=step)


@pytest.mark.parametrize("size, out", [(64, 48), (1024, 50), (40, 16), (33, 7), (5, 3)])
@pytest.mark.parametrize("biased", [True, False])
def test_linear_layers(own, size, out, biased):
    """Widths that fill tiles and widths that leave a rest, from one row to more than the tiles hold."""
    torch.manual_seed(size)
    weight = (torch.randn(out, size) / size**0.5).to(own.dtype)
    bias = torch.randn(out).to(own.dtype) if biased else None
    product = own.linear(weight, bias)
    for rows in (*range(1, 14), 16, 17, 40, 96, 97, 130):
        x = torch.randn(rows, size).to(own.dtype)
        wanted = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
        got = product(x)
        assert got.dtype == own.dtype and close(got, wanted), rows


class Case:
    """Layers with what stands around them, a ragged cache of three rows, and new positions behind each."""

    PREFIX, PAST, ROOM = 7, (21, 0, 14), 40

    def __init__(self, own: Kernels, width: int = 64, heads: int = 2, ffn: int = 80, new: int = 5, ends: bool = False):
        torch.manual_seed(width + new)
        rows, size = len(self.PAST), width // heads
        self.layers = [TransformerLayer(width, heads, ffn) for _ in range(2)]
        self.first = [torch.nn.LayerNorm(24), torch.nn.Linear(24, width)] if ends else []
        self.last = [torch.nn.LayerNorm(width)] + [torch.nn.Linear(width, 6)] * ends
        for part in (*self.layers, *self.first, *self.last):
            part.eval().requires_grad_(False).to(own.dtype)
            for norm in (m for m in part.modules() if isinstance(m, torch.nn.LayerNorm)):
                norm.weight.normal_(1, 0.3), norm.bias.normal_(0, 0.3)
        self.cache = KVCache(2, rows, heads, self.ROOM, size, prefix=self.PREFIX,
                             prefix_lengths=torch.tensor([7, 5, 0]), dtype=own.dtype)
        self.cache.kv.normal_()
        self.cache.lengths, self.cache.longest = torch.tensor(self.PAST), max(self.PAST)
        self.table, self.new = RotaryTable(size), new
        position = self.cache.lengths[:, None] + torch.arange(new)
        self.angle = position.view(-1) - 3
        self.index = (torch.arange(rows)[:, None] * (self.PREFIX + self.ROOM) + self.PREFIX + position).view(-1)
        self.row = torch.arange(rows).repeat_interleave(new)
        self.x = torch.randn(rows * new, 24 if ends else width).to(own.dtype)
        self.stack = own.stack(self.layers, self.last, self.first)

    def reference(self, tree: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """States [N, …] and the cache after them, in PyTorch and float32."""
        first, layers, last = (copy.deepcopy(torch.nn.ModuleList(m)).float()
                               for m in (self.first, self.layers, self.last))
        cache, cpu = self.cache.over(self.cache.kv.float()), torch.device("cpu")
        rotary = RotaryCache(self.table, cpu, torch.float32)
        rotary.cover(-10, 100)
        columns = columns_of(cache, self.new, CausalMask(cpu, torch.float32), tree=tree)
        return Stack(list(layers), list(last), list(first)).read(self.x.float(), rotary, self.angle, columns), cache.kv

    def own(self, which: torch.Tensor | None = None, mask: torch.Tensor | None = None, kept: torch.Tensor | None = None,
            ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same by the kernels, of the positions `which` alone."""
        kv = self.cache.kv.clone()
        x, angle, index = (t if which is None else t[which] for t in (self.x, self.angle, self.index))
        total = self.cache.columns(self.new)
        columns = Columns(kv, index, len(self.PAST), self.new, total, lambda: None, ends=kept)
        if mask is None:
            columns.padding_from = self.cache.prefix_lengths
            columns.padding_to = torch.full_like(columns.padding_from, self.PREFIX)
        else:
            columns.tree = mask.flatten(0, 2)
        rotary = RotaryCache(self.table, x.device, x.dtype)
        rotary.cover(-10, 100)
        return self.stack(x.clone(), rotary, angle, columns), kv


def near(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """After two layers: float32 to 1e-5, bfloat16 to the roundings between the operations."""
    return torch.allclose(got.float(), wanted, atol=0.08 if got.dtype == torch.bfloat16 else 1e-5, rtol=0)


@pytest.mark.parametrize("shape", [{}, dict(width=36, heads=3, ffn=50), dict(new=11),
                                   dict(ends=True, new=3), dict(width=192, heads=4, ffn=704, new=1)])
def test_stacks_of_layers(own, shape):
    """Ragged rows, text that is padded in the middle, head widths that fill no vector."""
    case = Case(own, **shape)
    wanted, kv = case.reference()
    got, own_kv = case.own()
    assert got.dtype == own.dtype and near(got, wanted)
    assert near(own_kv, kv)  # what was written, and nothing else
    kept = torch.tensor([0, 0, 2, len(wanted) - 1])
    assert torch.equal(case.own(kept=kept)[0], got[kept])


def test_a_position_of_a_stack_does_not_depend_on_the_others(own):
    """Nor on the order of the rows."""
    case = Case(own)
    whole, _ = case.own()
    for which in ((case.row == 1), torch.cat(((case.row == 2).nonzero(), (case.row == 0).nonzero()))[:, 0],
                  torch.arange(len(case.row)) % case.new < 2):
        assert torch.equal(case.own(which)[0], whole[which])


def test_trees_in_a_stack(own):
    """A mask says who sees whom: two branches behind one root."""
    case = Case(own, new=4)
    tree = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]).bool().expand(3, -1, -1)
    seen = case.cache.mask(4, tree)
    got, _ = case.own(mask=additive(seen, own.dtype))
    assert near(got, case.reference(tree)[0])


def test_threads_share_a_stack(own, monkeypatch):
    case = Case(own, width=256, heads=8, ffn=1024, ends=True)
    alone = case.own()
    monkeypatch.setattr(module.torch, "get_num_threads", lambda: 3)
    for got, wanted in zip(case.own(), alone, strict=True):
        assert torch.equal(got, wanted)


def test_what_a_stack_cannot_read():
    own = kernels(torch.float32)

    def layer() -> TransformerLayer:
        return TransformerLayer(32, 2, 64)

    last = [torch.nn.LayerNorm(32)]
    assert own.stack([layer()], last) is not None
    quantised, transposed, other, half = layer(), layer(), layer(), layer().to(torch.bfloat16)
    quantised.up = torch.nn.Sequential(quantised.up)
    transposed.up.weight.data = transposed.up.weight.data.t().contiguous().t()
    other.ffn_norm.eps = 1e-3
    for bad in (quantised, transposed, other, half, layer().to("meta")):
        assert own.stack([layer(), bad], last) is None
    assert own.stack([layer()], [torch.nn.LayerNorm(32, bias=False)]) is None
    case = Case(own)
    for bad in (case.x.bfloat16(), case.x[:, :-1]):
        case.x = bad
        with pytest.raises(TypeError, match="cannot be read by layers for 64"):
            case.own()
    case = Case(own)
    case.cache.kv = case.cache.kv.bfloat16()
    with pytest.raises(TypeError, match="keys and values must be torch.float32"):
        case.own()


def test_a_row_depends_neither_on_the_others_nor_on_threads(own, monkeypatch):
    weight, x = torch.randn(640, 256).to(own.dtype), torch.randn(30, 256).to(own.dtype)
    product = own.linear(weight, None)
    alone = torch.cat([product(row[None]) for row in x])
    for rows in (2, 4, 7, 9, 12, 13, 30):
        assert torch.equal(product(x[:rows]), alone[:rows])
    monkeypatch.setattr(module.torch, "get_num_threads", lambda: 3)
    assert torch.equal(product(x[:29]), alone[:29])


def test_no_rows_and_rows_of_another_kind(own):
    product = own.linear(torch.ones(32, 64, dtype=own.dtype), None)
    assert product(torch.ones(0, 64, dtype=own.dtype)).shape == (0, 32)
    other = torch.bfloat16 if own.dtype == torch.float32 else torch.float32
    for bad in (torch.ones(2, 64, dtype=other), torch.ones(2, 63, dtype=own.dtype)):
        with pytest.raises(TypeError, match="cannot be multiplied by a weight"):
            product(bad)


def test_rows_that_are_no_number_stay_alone():
    own, x = kernels(torch.bfloat16), torch.ones(2, 64, dtype=torch.bfloat16)
    x[1] = torch.nan
    got = own.linear(torch.ones(32, 64, dtype=torch.bfloat16), None)(x)
    assert (got[0] == 64).all() and got[1].isnan().all()


def test_onednn_goes_on_as_if_nothing_had_happened():
    """The matrix unit has one configuration, which oneDNN leaves in place between its calls."""
    own = kernels(torch.bfloat16)
    weight, x = torch.randn(512, 512).to(torch.bfloat16), torch.randn(200, 512).to(torch.bfloat16)
    wanted, product = F.linear(x, weight), own.linear(weight, None)
    for rows in (3, 16, 1, 90):
        assert close(product(x[:rows]), F.linear(x[:rows].float(), weight.float()))
        assert torch.equal(F.linear(x, weight), wanted)


@pytest.fixture()
def fresh(tmp_path, monkeypatch):
    """An empty cache, and a small source: these tests are of the cache, not of what is in it."""
    (tmp_path / "layers.c").write_text("int one(void) { return 1; }")
    monkeypatch.setattr(module, "SOURCES", (tmp_path / "layers.c",))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kernels.cache_clear()
    yield tmp_path
    kernels.cache_clear()


def test_without_a_compiler_pytorch_computes_and_the_log_says_so(fresh, monkeypatch, caplog):
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    assert kernels(torch.float32) is None
    assert "no C compiler" in caplog.text and "install one" in caplog.text
    assert type(cpu_backend(torch.float32)) is Backend


def test_a_compiler_that_fails_is_quoted(fresh, monkeypatch):
    with pytest.raises(NativeError, match="could not compile layers.c: .*no-such-flag"):
        Kernels(torch.float32, ("-fno-such-flag",))
    monkeypatch.setenv("DCAR_NATIVE", "off")
    assert kernels(torch.float32) is None


def test_a_cache_that_cannot_be_written_is_named(fresh, monkeypatch):
    (fresh / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(fresh / "file"))
    with pytest.raises(NativeError, match="set XDG_CACHE_HOME"):
        Kernels(torch.float32)


@pytest.mark.parametrize("harm", ["content", "mode", "link"])
def test_a_library_that_is_not_as_it_was_built_is_never_loaded(fresh, harm, caplog):
    """Whoever can write into the cache could otherwise run code of his own here."""
    library = module._compiled(module.FLAGS)
    assert module._compiled(module.FLAGS) == library and library.stat().st_mode & 0o777 == 0o700
    if harm == "content":
        library.write_bytes(b"no library")
    elif harm == "mode":
        library.chmod(0o777)
    else:
        library.rename(fresh / "elsewhere.so")
        library.symlink_to(fresh / "elsewhere.so")
    again = module._compiled(module.FLAGS)
    assert again.read_bytes()[:4] == b"\x7fELF" and not again.is_symlink() and again.stat().st_mode & 0o22 == 0
    assert "is damaged, or others may write it" in caplog.text


def test_the_folder_of_kernels_is_this_user_s_alone(fresh, monkeypatch):
    (fresh / "dcar").mkdir(mode=0o777)
    (fresh / "dcar").chmod(0o777)
    module._compiled(module.FLAGS)
    assert (fresh / "dcar").stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(NativeError, match="belongs to somebody else"):
        module._compiled(module.FLAGS)


def test_processes_that_start_together_compile_once_each_and_agree(fresh):
    fork = multiprocessing.get_context("fork")  # they keep the small source
    with ProcessPoolExecutor(2, fork, initializer=fork.Barrier(2).wait) as both:
        one, other = both.map(module._compiled, [module.FLAGS] * 2)
    assert one == other and list((fresh / "dcar").iterdir()) == [one]
