"""evaluate: its perplexity is transformers' own, its windows those of the two conventions, its intervals honest."""

import copy
import json
import math

import hf_twin
import pytest
import small_llama
import torch
import transformers

import dasllama_torch as dl
from dasllama_torch.errors import DasllamaError, UnsupportedModel
from dasllama_torch.export.hf_config import hf_config
from dasllama_torch.inspect.evaluate import Estimate
from dasllama_torch.inspect.windows import cut

TEXT = torch.randint(0, 301, (150,), generator=torch.Generator().manual_seed(7)).tolist()


@pytest.fixture(scope="module")
def twin(tmp_path_factory):
    return hf_twin.make("qwen2", tmp_path_factory.mktemp("twin"))


@pytest.fixture(scope="module")
def exact(twin):
    """transformers' model in f64."""
    return copy.deepcopy(twin.hf).double()


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return small_llama.write(tmp_path_factory.mktemp("small") / "small.gguf")


@torch.no_grad()
@pytest.mark.parametrize("stride", [10, 16, 32])
def test_perplexity_is_that_of_transformers_guide(twin, exact, stride):
    """The loop of the guide "Perplexity of fixed-length models", word by word."""
    result = dl.evaluate(
        dl.load_model(twin.path, mode="fp32"), TEXT, n_ctx=32, convention="hf", stride=stride, progress=False
    )
    total, n_tokens, prev_end = 0.0, 0, 0
    for begin in range(0, len(TEXT), stride):
        end = min(begin + 32, len(TEXT))
        n_targets = end - prev_end
        input_ids = torch.tensor([TEXT[begin:end]])
        targets = input_ids.clone()
        targets[:, :-n_targets] = -100
        n_valid = (targets[:, 1:] != -100).sum().item()
        if n_valid:
            total += exact(input_ids, labels=targets).loss.item() * n_valid
        n_tokens += n_valid
        prev_end = end
        if end == len(TEXT):
            break
    assert result.n_scored == n_tokens
    assert result.nll.mean == pytest.approx(total / n_tokens, rel=1e-6)
    assert result.perplexity.mean == pytest.approx(math.exp(total / n_tokens), rel=1e-6)


def test_windows_of_transformers():
    windows = list(cut(range(100), "hf", 32, 16, None))
    assert [w.ids[0] for w in windows] == [0, 16, 32, 48, 64, 80]
    assert [token for w in windows for token in w.ids[w.first :]] == list(range(1, 100))
    assert list(cut([7], "hf", 32, 16, None)) == []


def test_windows_of_llama_cpp():
    """tools/perplexity: n_chunk = size / n_ctx, BOS over each first token, logits from n_ctx / 2 to n_ctx - 2."""
    windows = list(cut(range(100), "llama.cpp", 32, 32, 999))
    assert [w.ids for w in windows] == [[999, *range(start + 1, start + 32)] for start in (0, 32, 64)]
    assert [w.first for w in windows] == [17, 17, 17]
    assert [w.n_scored for w in windows] == [15, 15, 15]  # n_ctx - 1 - n_ctx / 2
    assert next(cut(range(100), "llama.cpp", 32, 32, None)).ids == list(range(32))
    assert list(cut(range(31), "llama.cpp", 32, 32, None)) == []


@torch.no_grad()
def test_divergence_from_a_parent(small):
    """Against f64 softmaxes of both, with a text in windows of llama.cpp."""
    model, parent = dl.load_model(small, mode="q4_0"), dl.load_model(small, mode="fp32")
    exact = transformers.LlamaForCausalLM(transformers.AutoConfig.for_model(**hf_config(parent))).eval()
    exact.load_state_dict(dl.to_hf(parent))
    exact.double()
    result = dl.evaluate(model, TEXT, parent, n_ctx=32, progress=False)
    kl, same, nll, of_windows = [], [], [], []
    for begin in range(0, 128, 32):
        ids = torch.tensor([[parent.tokenizer.bos_id, *TEXT[begin + 1 : begin + 32]]])
        wanted, found = exact(ids).logits[0, 16:31], model(ids).logits[0, 16:31].double()
        p, q = (torch.distributions.Categorical(logits=logits) for logits in (wanted, found))
        kl += torch.distributions.kl_divergence(p, q).tolist()
        same += (wanted.argmax(-1) == found.argmax(-1)).tolist()
        nll += (-q.log_prob(ids[0, 17:])).tolist()
        of_windows.append(sum(kl[-15:]) / 15)
    assert result.n_scored == len(kl) == 60
    assert result.kl.mean == pytest.approx(sum(kl) / 60, rel=1e-4)
    assert result.kl_of_tokens.tolist() == pytest.approx(kl, rel=1e-3, abs=1e-7)
    assert result.top1.mean == pytest.approx(sum(same) / 60)
    assert result.nll.mean == pytest.approx(sum(nll) / 60, rel=1e-6)
    error = torch.tensor(of_windows).std().item() / 2  # of four windows
    assert result.kl.high - result.kl.mean == pytest.approx(1.96 * error, rel=1e-3)
    difference = result.nll.mean - result.other_nll.mean
    assert result.nll_difference.mean == pytest.approx(difference, abs=1e-9)


def test_transformers_may_be_the_parent(twin):
    model = dl.load_model(twin.path, mode="fp32")
    result = dl.evaluate(model, TEXT, twin.hf, n_ctx=64, progress=False)
    assert result.kl.mean < 1e-8
    assert result.top1.mean == 1
    assert result.nll.mean == pytest.approx(result.other_nll.mean, rel=1e-6)


def test_windows_of_unequal_length_count_by_their_tokens():
    windows = [torch.tensor(v, dtype=torch.float64) for v in ([1.0, 3.0], [2.0], [6.0, 0.0, 3.0])]
    assert Estimate.of(windows).mean == 2.5
    alone = Estimate.of(windows[:1])
    assert alone.mean == 2
    assert math.isnan(alone.low)
    assert str(alone) == "2"


def test_intervals_hold_the_truth_as_often_as_they_say():
    """Windows whose tokens hang together, of unequal length; an error over tokens would hold it half as often."""
    generator = torch.Generator().manual_seed(0)
    held = 0
    for _ in range(400):
        lengths = torch.randint(10, 30, (40,), generator=generator).tolist()
        shared = torch.randn(40, generator=generator, dtype=torch.float64)
        windows = [
            shift + torch.randn(n, generator=generator, dtype=torch.float64)
            for n, shift in zip(lengths, shared, strict=True)
        ]
        estimate = Estimate.of(windows)
        held += estimate.low <= 0 <= estimate.high
    assert 0.91 <= held / 400 <= 0.98


def test_it_shows_itself(small):
    model, parent = dl.load_model(small, mode="q8"), dl.load_model(small, mode="fp32")
    result = dl.evaluate(model, TEXT, parent, n_ctx=32, max_windows=2, progress=False)
    text = str(result)
    for part in ("perplexity of", "KL divergence", "same likeliest token", "30 tokens scored in 2 windows"):
        assert part in text
    assert "<table>" in result._repr_html_()
    figures = json.loads(result.to_json())
    assert figures["n_windows"] == 2
    assert figures["kl"]["mean"] == result.kl.mean
    assert figures["kl_50"] <= figures["kl_99"] <= figures["kl_100"]
    alone = json.loads(dl.evaluate(model, TEXT, n_ctx=32, max_windows=1, progress=False).to_json())
    assert alone["kl"] is None
    assert alone["nll"]["low"] is None


def test_a_file_and_its_bar(demo_model, tmp_path, capsys):
    """Natural text goes through the tokenizer; the bar stays off standard output."""
    path = tmp_path / "text.txt"
    path.write_text("The capital of France is Paris. " * 8, "utf-8")
    model = dl.load_model(demo_model)
    of_file = dl.evaluate(model, path, n_ctx=16, max_windows=2)
    of_text = dl.evaluate(model, path.read_text("utf-8"), n_ctx=16, max_windows=2, progress=False)
    assert of_file.nll == of_text.nll
    assert of_file.perplexity.mean < 50
    assert capsys.readouterr().out == ""
    path.write_bytes(b"caf\xe9")
    with pytest.raises(DasllamaError, match=r"text\.txt: not UTF-8 text: byte 3 is 0xe9"):
        dl.evaluate(model, path)


def test_what_cannot_be_evaluated_is_refused(twin, oracle):
    model = dl.load_model(twin.path)
    with pytest.raises(DasllamaError, match="the text has 10 tokens, wanted at least 32"):
        dl.evaluate(model, TEXT[:10], n_ctx=32)
    with pytest.raises(DasllamaError, match="the text has 1 tokens, wanted at least 2"):
        dl.evaluate(model, TEXT[:1], n_ctx=32, convention="hf")
    with pytest.raises(UnsupportedModel, match="wanted one vocabulary"):
        dl.evaluate(
            model,
            [token % 250 for token in TEXT[:40]],
            dl.load_model(oracle / "tiny" / "llama.gguf"),
            n_ctx=8,
            progress=False,
        )
    for wrong in (
        dict(n_ctx=3),
        dict(convention="gpt"),
        dict(stride=8),
        dict(convention="hf", n_ctx=8, stride=9),
        dict(convention="hf", n_ctx=8, stride=0),
        dict(max_windows=0),
    ):
        with pytest.raises(ValueError, match="wanted|convention"):
            dl.evaluate(model, TEXT, **wrong)
