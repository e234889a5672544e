"""The demo: both paths compute the same embeddings, and it fails if they do not."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner, Result

from tilewright.cli import app
from tilewright.cli.demo import model as models
from tilewright.cli.demo import report, run, texts
from tilewright.cli.demo.encoder import Encoder, Packed, Padded, Size, random_weights
from tilewright.cli.demo.texts import Text

SMALL = Size(hidden=48, layers=2, heads=3, intermediate=96)
CPU = torch.device("cpu")
TOKENS = [[7], list(range(100, 140)), [5, 6, 7], list(range(9)), [3, 3, 3]]


@pytest.fixture
def encoder() -> Encoder:
    weights = {name: weight.double() for name, weight in random_weights(SMALL).items()}
    return Encoder(weights, SMALL.layers, SMALL.heads)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A random model that runs in no time."""
    monkeypatch.setattr(models, "Size", lambda: SMALL)


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["demo", "--device", "cpu", *arguments], env={"COLUMNS": "80"})


def embed(batch: Padded | Packed, encoder: Encoder) -> Tensor:
    return batch.pool(batch.encode(encoder))


def test_packed_rows_give_what_padded_rows_give(encoder: Encoder):
    padded, packed = (embed(kind.of(TOKENS, CPU), encoder) for kind in (Padded, Packed))
    torch.testing.assert_close(packed, padded, rtol=0, atol=1e-13)


def test_a_text_knows_nothing_of_its_neighbours(encoder: Encoder):
    together = embed(Packed.of(TOKENS, CPU), encoder)
    alone = torch.cat([embed(Packed.of([tokens], CPU), encoder) for tokens in TOKENS])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-13)


def test_padding_is_filled_with_what_does_not_count(encoder: Encoder):
    batch = Padded.of(TOKENS, CPU)
    filled = Padded(batch.ids.masked_fill(~batch.mask, 99), batch.mask)
    torch.testing.assert_close(embed(filled, encoder), embed(batch, encoder), rtol=0, atol=1e-13)


def test_the_encoder_is_bert():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=SMALL.hidden,
        num_hidden_layers=SMALL.layers,
        num_attention_heads=SMALL.heads,
        intermediate_size=SMALL.intermediate,
        initializer_range=0.5,
    )
    bert = transformers.BertModel(config, add_pooling_layer=False).double().eval()
    packed = Packed.of(TOKENS, CPU)
    with torch.no_grad():
        got = packed.encode(Encoder(bert.state_dict(), SMALL.layers, SMALL.heads))
        expected = [bert(torch.tensor([tokens])).last_hidden_state[0] for tokens in TOKENS]
    assert set(random_weights(SMALL)) == set(bert.state_dict())
    torch.testing.assert_close(got, torch.cat(expected), rtol=0, atol=1e-12)


def test_the_texts_are_the_same_each_time_and_of_very_different_lengths(
    capsys: pytest.CaptureFixture[str],
):
    loaded = texts.load()
    assert loaded == texts.load()
    assert capsys.readouterr().out == ""
    assert len(loaded) > 36
    assert {text.kind for text in loaded} == {"zen", "docstring", "reference"}
    lengths = sorted(len(text.body) for text in loaded)
    assert 10 < lengths[0] < 50 < 1000 < lengths[-1]


def test_pairs_cross_kinds_and_use_a_text_once():
    bodies = [Text("a", "0", ""), Text("a", "1", ""), Text("b", "2", ""), Text("b", "3", "")]
    embeddings = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.8, 0.6], [0.6, 0.8]])
    pairs = run.most_similar(bodies, embeddings)
    assert [round(pair.cosine, 5) for pair in pairs] == [0.8, 0.6]
    assert all(pair.first.kind != pair.second.kind for pair in pairs)
    used = [text.label for pair in pairs for text in (pair.first, pair.second)]
    assert sorted(used) == ["0", "1", "2", "3"]


def test_random_weights_agree_and_are_called_random(small: None):
    result = invoke("--random", "--repeats", "2")
    assert result.exit_code == 0, result.output
    assert "random because asked for with --random" in result.stdout
    assert "agree" in result.stdout
    assert "Most similar" not in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_json_says_all_that_the_reader_sees(small: None):
    told = json.loads(invoke("--random", "--repeats", "3", "--json").stdout)
    assert told["agree"] and 0 <= told["largest_difference"] < told["limit"] == 1e-5
    assert len(told["stock_seconds"]) == len(told["tilewright_seconds"]) == 3
    assert told["texts"] == len(texts.load())
    assert 0 < told["padding"] < 1
    assert told["path"]["backend"] not in told["path"]["rejected"]
    assert told["path"]["problem"].startswith("varlen float32")


def test_without_the_packages_it_says_so_and_runs(small: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(models, "NEEDED", {"no_such_module": "no-such-package"})
    result = invoke("--repeats", "1")
    assert result.exit_code == 0
    assert "random because not installed: no-such-package" in result.stdout


@pytest.mark.parametrize("value", [float("nan"), 1.001], ids=["NaN", "wrong by 0.1 %"])
def test_it_fails_if_the_paths_differ(small: None, monkeypatch: pytest.MonkeyPatch, value: float):
    right = Packed.attend
    monkeypatch.setattr(Packed, "attend", lambda *args: right(*args) * value)
    result = invoke("--random", "--repeats", "1")
    assert result.exit_code == 1
    assert "DIFFER" in result.stdout


def test_a_slower_path_is_called_slower():
    assert report._compare(stock=3.0, ours=2.0) == "is 1.50 times as fast"
    assert report._compare(stock=2.0, ours=3.0) == "takes 1.50 times as long"


@pytest.mark.parametrize("device", ["meta", "abacus"])
def test_a_device_that_cannot_run_it_is_a_usage_error(device: str):
    result = CliRunner().invoke(app, ["demo", "--random", "--device", device])
    assert result.exit_code == 2
    assert device in result.output


@pytest.mark.gpu
def test_it_runs_on_a_gpu(small: None):
    result = CliRunner().invoke(app, ["demo", "--random", "--device", "cuda", "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["path"]["problem"].endswith("cuda:0")
