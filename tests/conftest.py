"""Shared fixtures. Golden data and downloaded models are optional: a test that needs them skips and says what is
missing.
"""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def oracle() -> Path:
    """The folder of independent golden data (tiny models, every quant type, real models, vocabularies)."""
    folder = ROOT.parent / "shared" / "oracle"
    if not folder.is_dir():
        pytest.skip("golden data absent: ../shared/oracle")
    return folder
