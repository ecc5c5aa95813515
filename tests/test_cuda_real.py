"""Published models on a GPU, against transformers' figures as `test_oracle_real.py` holds the CPU to them. Skipped
without a GPU, and where the model is not; `make test-cuda` runs them."""

import pytest
from conftest import absent_gpu
from test_oracle_real import check_dequantized, check_natural_text, nll, path_and_golden  # noqa: F401
from tolerances import CUDA_REAL_NLL, CUDA_REAL_NLL_RMS

import dasllama_torch as dl
from dasllama_torch.ops import registry, report, reset_report

absent_gpu()


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_natural_text(path_and_golden, dtype):  # noqa: F811
    """Many rows, and few and single ones, which integers multiply; single ones in captured steps."""
    path, golden = path_and_golden
    model = dl.load_model(path, device="cuda", dtype=dtype)
    for together in (256, 5, 1):
        reset_report()
        with registry.strict():
            found = nll(model, golden.prompts["passage"]["ids"], "f16", together)
        assert ("captured" in report()["step"]) == (together == 1)
        check_natural_text(golden, found, CUDA_REAL_NLL, CUDA_REAL_NLL_RMS)


def test_dequantized(path_and_golden):  # noqa: F811
    path, golden = path_and_golden
    with registry.strict():
        check_dequantized(dl.load_model(path, mode="fp32", device="cuda"), golden)
