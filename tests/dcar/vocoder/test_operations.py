"""The vocoder's operations in C equal those in PyTorch."""

import pytest
import torch

from dcar.decoding.cpu.native import kernels
from dcar.vocoder.acoustic import VocoderConfig
from dcar.vocoder.operations import Convolution, NativeOperations, Operations, operations

PYTORCH = Operations()
BFLOAT16 = {"rtol": 2**-7, "atol": 1e-6}  # two roundings


@pytest.fixture(scope="module")
def native() -> NativeOperations:
    library = kernels()
    assert library is not None
    return NativeOperations(library)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("count", "dilation", "rows"), [(7, 1, 1), (7, 4, 50), (3, 2, 5)])
def test_convolution_norm_and_residual(native, count, dilation, rows, dtype):
    width, tolerance = 48, BFLOAT16 if dtype == torch.bfloat16 else {}
    conv = Convolution(torch.randn(count, width), torch.randn(width), dilation, 1e-5, dtype)
    x, weight, shift = torch.randn(rows + (count - 1) * dilation, width), *torch.randn(2, width)
    got = native.convolve(x, conv, weight, shift)
    assert got.dtype == dtype and got.shape == (rows, width)
    torch.testing.assert_close(got, PYTORCH.convolve(x, conv, weight, shift), **tolerance)
    expected = x[-rows:] + got
    native.add_(x[-rows:], got)
    assert torch.equal(x[-rows:], expected)


@pytest.mark.parametrize("hop", [15, 240])
def test_pulses(native, hop):
    f0 = torch.linspace(50, 600, 40)[torch.randperm(40)]
    place = (torch.arange(hop) + (1 - hop % 2) / 2) / hop
    for part in (slice(0, 39 * hop), slice(hop // 2, 38 * hop + 7), slice(3, 4)):
        expected, got = torch.full((2, part.stop - part.start), 100.0)
        phases = [
            choice.pulses(f0, place, part, 24_000, 0.4, out)
            for choice, out in ((PYTORCH, expected), (native, got))
        ]
        assert abs(phases[0] - phases[1]) < 1e-5
        assert (got - expected).abs().max() < 2e-3 * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bins", [16, 33, 513])
def test_filters(native, bins, dtype):
    """Also where gains reach their limits and phases turn several times."""
    head = (4 * torch.randn(9, 3 * bins)).to(dtype)
    spectra, envelope = torch.randn(2, 9, bins, dtype=torch.complex64), 6 * torch.randn(9, bins)
    expected = PYTORCH.filtered(*spectra.clone(), envelope, head)
    got = native.filtered(*spectra.clone(), envelope, head)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(("size", "hop", "n_fft"), [(45, 15, 65), (720, 240, 1024)])
def test_overlap_add(native, size, hop, n_fft):
    pieces, window = torch.randn(11, n_fft), torch.randn(size)
    waves = torch.randn(10 + size // hop, hop).expand(2, -1, -1).clone()
    for wave, choice in zip(waves, (PYTORCH, native), strict=True):
        choice.overlap_add(pieces, window, wave)
    torch.testing.assert_close(*waves)


def test_c_serves_the_shipped_shape_with_a_compiler(monkeypatch):
    shipped = VocoderConfig()
    assert type(operations(shipped)) is NativeOperations
    for other in (VocoderConfig(acoustic_size=250), VocoderConfig(hop=5, n_fft=20, window=20)):
        assert type(operations(other)) is Operations
    monkeypatch.setattr("dcar.vocoder.operations.kernels", lambda: None)
    assert type(operations(shipped)) is Operations
