"""Batch sizes as found by the tuner."""

import pytest

from partita_trainers.batch_size.probe import BatchSize, ProbeResult

MB = 10**6


@pytest.fixture
def generation() -> BatchSize:
    """Return a size limited by memory at 148 rows and by speed at 24; one probe was too large."""
    probes = (
        ProbeResult(1, "fits", 68 * MB, 68 * MB, 0.005, 0.0022, 42.857, 0.1),
        ProbeResult(4, "fits", 91 * MB, 91 * MB, 0.014, 0.0026, 120.0, 0.1),
        ProbeResult(152, "too large", 1230 * MB, 1230 * MB, 0.458, 0.0203, 234.8, 0.4),
        ProbeResult(148, "fits", 1197 * MB, 1197 * MB, 0.446, 0.0199, 235.2, 0.4),
    )
    paces = ((1, 42.857), (4, 120.0), (16, 218.18), (24, 240.0), (64, 243.6), (148, 235.2))
    return BatchSize(24, "tuned", "cpu", 148, 24, probes, paces, False, 461, 32, 1200 * MB, 1.23)


@pytest.fixture
def training() -> BatchSize:
    """Return a size for which the device ran out of memory at 128 rows and reserves more than is used."""
    probes = (
        ProbeResult(1, "fits", 6_100 * MB, 6_283 * MB, 0.05, 0.0, 3.0, 0.3),
        ProbeResult(4, "fits", 9_400 * MB, 9_682 * MB, 0.14, 0.0, 11.0, 0.3),
        ProbeResult(128, "out of memory", None, None, seconds=0.8),
        ProbeResult(120, "fits", 134_600 * MB, 138_638 * MB, 3.0, 0.0, 40.0, 6.0),
    )
    return BatchSize(120, "tuned", "cuda:0", 120, 120, probes, (), True, 2048, 0, 140_000 * MB, 12.04)


@pytest.fixture
def evaluation() -> BatchSize:
    """Return a cached size, with one probe that is small compared with the budget."""
    probes = (ProbeResult(64, "fits", 552 * MB, 552 * MB, 0.194, 0.0, 243.6, 0.3),)
    return BatchSize(64, "cached", "cpu", 64, 64, probes, (), False, 461, 0, 40_000 * MB, 0.31)


@pytest.fixture
def written() -> BatchSize:
    """Return a size set in the configuration."""
    return BatchSize(8, "file", "cpu")
