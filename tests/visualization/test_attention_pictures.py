"""Check attention over a sentence as data, as the text of a page, and as figures."""

import base64
import dataclasses
import html.parser
import json
import sys
import warnings

import jax.numpy as jnp
import numpy as np
import pytest
from picture_cases import HOSTILE, SENTENCE, made_up, small_translator

from transformer_jax import cli
from transformer_jax.model.transformer import Transformer, attention_maps
from transformer_jax.types import UserError
from transformer_jax.visualization.attention import (
    View,
    attention_of,
    attention_page,
    draw_attention,
    draw_lines,
    draw_map,
    heads_of,
)
from transformer_jax.visualization.canvas import head_colors

# -------------------------------------------------------------------------------------------------------- the weights


def test_weights_of_a_given_target():
    """Check the tokens of each kind: the decoder reads the target shifted by one, and predicts the target."""
    translator = small_translator()
    found = attention_of(translator, SENTENCE, "A dog", run="runs/x")
    tokenizer = translator.tokenizers.source
    src, target = tokenizer.encode([SENTENCE])[0] + [2], tokenizer.encode(["A dog"])[0]
    maps = attention_maps(
        Transformer(translator.config.model), translator.params, jnp.array([src]), jnp.array([[1, *target]])
    )
    assert found.maps["encoder"].queries == found.maps["encoder"].keys == found.maps["cross"].keys
    assert found.maps["encoder"].keys[-1] == "</s>"
    assert "".join(found.maps["encoder"].keys[:-1]).replace("\u2581", " ") == SENTENCE
    assert found.maps["decoder"].queries == found.maps["decoder"].keys == ("<s>", *tokenizer.pieces(target))
    assert found.maps["cross"].queries == (*tokenizer.pieces(target), "</s>")
    for kind, layer, name in (
        ("encoder", 0, "encoder/layer_0/self_attention"),
        ("encoder", 1, "encoder/layer_1/self_attention"),
        ("decoder", 0, "decoder/layer_0/self_attention"),
        ("cross", 0, "decoder/layer_0/cross_attention"),
    ):
        np.testing.assert_allclose(found.maps[kind].weights[layer], maps[name][0], atol=1e-5)
    assert [maps.weights.shape[:2] for maps in found.maps.values()] == [(2, 2), (1, 4), (1, 4)]
    assert (found.run, found.target, found.is_given) == ("runs/x", "A dog", True)


def test_weights_of_own_translation():
    translator = small_translator()
    ((best,),) = translator.translate_n_best([SENTENCE], 1)
    found = attention_of(translator, SENTENCE)
    assert found.maps["cross"].queries == tuple(translator.tokenizers.target.pieces(best.token_ids))
    assert (found.target, found.is_given) == (best.text, False)


def test_empty_sentence_is_rejected():
    with pytest.raises(UserError, match="the sentence is empty"):
        attention_of(small_translator(), "  ")


@pytest.mark.parametrize(
    ("view", "message"),
    [
        (View(layer=3), "layer is 3; cross attention has layers 1 to 2"),
        (View(layer=0), "layer is 0"),
        (View("encoder", head=4), "head is 4; encoder attention has heads 1 to 3, or all, or mean"),
        (View(head="some"), "head is 'some'"),
        (View("self"), "kind is 'self'"),
        (View(style="bars"), "legal: encoder, decoder, cross; lines, map"),
    ],
)
def test_unknown_views_are_rejected(view, message, tmp_path):
    with pytest.raises(UserError, match=message):
        draw_attention(made_up("ab", "cd"), tmp_path / "page.html", view)
    assert not list(tmp_path.iterdir())


# ----------------------------------------------------------------------------------------------------------- the page


class Elements(html.parser.HTMLParser):
    """Parser that collects the names of a page's elements and the text of its scripts."""

    def __init__(self, page):
        super().__init__()
        self.names, self.scripts, self.is_script = [], [], False
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.names.append(tag)
        self.is_script = tag == "script"
        self.scripts += [""] if self.is_script else []

    def handle_endtag(self, tag):
        self.is_script = self.is_script and tag != "script"

    def handle_data(self, text):
        if self.is_script:
            self.scripts[-1] += text


def test_page_contains_the_weights_and_escapes_text():
    attention = made_up(HOSTILE, ["a", "b"])
    page = attention_page(attention, View("encoder", 1, 2, "map"))
    elements, harmless = Elements(page), Elements(attention_page(made_up(["x"], ["y"]), View()))
    assert elements.names == harmless.names
    assert len(elements.scripts) == 2
    assert "src=" not in page.replace(json.dumps(HOSTILE[1])[1:-1].replace("<", "\\u003c"), "")
    data = json.loads(elements.scripts[0])
    assert data["source"] == "".join(HOSTILE)
    assert data["kinds"]["cross"]["keys"] == HOSTILE
    assert data["first"] == {"kind": "encoder", "layer": "1", "head": "2", "style": "map"}
    for kind, maps in attention.maps.items():
        numbers = np.frombuffer(base64.b64decode(data["kinds"][kind]["weights"]), "<u2")
        np.testing.assert_allclose(numbers.reshape(maps.weights.shape) / 65535, maps.weights, atol=0.51 / 65535)


def test_page_references_no_other_file_or_host():
    page = attention_page(made_up(["x"], ["y"]), View())
    for word in ("http:", "https:", "//cdn", "@import", "url(", "<link", "fetch(", "innerHTML"):
        assert word not in page


def test_page_with_too_many_weights_is_rejected():
    attention = made_up(["x"], ["y"])
    weights = np.broadcast_to(np.float32(0), (6, 16, 1000, 1000))
    large = dataclasses.replace(attention, maps={"cross": attention.maps["cross"]._replace(weights=weights)})
    with pytest.raises(UserError, match="a page of 96,000,000 weights is too large"):
        attention_page(large, View())


# -------------------------------------------------------------------------------------------------------- the figures


@pytest.fixture
def axes(optional_package):
    optional_package("matplotlib")
    from matplotlib.figure import Figure

    return Figure().subplots()


def test_line_opacity_is_the_attention_weight(axes):
    maps = made_up("abcd", "xyz").maps["cross"]
    draw_lines(axes, maps, heads_of(maps, 2, 2))
    (lines,) = axes.collections
    weights = maps.weights[1, 1]
    found = np.zeros_like(weights)
    for ((start, top), (end, bottom)), color in zip(lines.get_segments(), lines.get_colors(), strict=True):
        assert (top, bottom) == (1, 0)
        found[int(start), int(end)] = color[3]
        np.testing.assert_allclose(color[:3], head_colors(3)[1])
    np.testing.assert_allclose(found, weights / weights.max(), atol=0.01)
    assert [text.get_text() for text in axes.get_xticklabels()] == ["a", "b", "c", "d"]


def test_lines_of_different_heads_are_shifted(axes):
    maps = made_up("abcd", "xyz").maps["cross"]
    draw_lines(axes, maps, heads_of(maps, 1, "all"))
    assert len(axes.collections) == 3
    starts = [{round(float(segment[0][0]) % 1, 6) for segment in lines.get_segments()} for lines in axes.collections]
    assert all(len(places) == 1 for places in starts)
    assert len(set.union(*starts)) == 3


@pytest.mark.parametrize(
    "keys", [["a", "b", "c"], ["\u05d0", "\u05d1", "\u05d2"]], ids=["left to right", "right to left"]
)
def test_heat_map_is_mirrored_for_right_to_left_keys(axes, keys):
    maps = made_up(keys, "xy").maps["cross"]
    weights = heads_of(maps, 1, "mean")["mean of 3 heads"]
    np.testing.assert_allclose(weights, maps.weights[0].mean(0))
    draw_map(axes, maps, weights, 0.9, has_keys=True, has_queries=True)
    assert axes.images[0].get_clim() == (0, 0.9), "all heads of a figure share one scale"
    is_mirrored = keys[0] != "a"
    np.testing.assert_array_equal(axes.images[0].get_array(), weights[:, ::-1] if is_mirrored else weights)
    assert dict(zip([text.get_text() for text in axes.get_xticklabels()], axes.get_xticks(), strict=True)) == {
        key: 2 - place if is_mirrored else place for place, key in enumerate(keys)
    }


@pytest.mark.parametrize(
    "view", [View(), View("encoder", 1, 2, "map"), View("decoder", head="all", style="map")], ids=str
)
def test_figures_are_reproducible(view, optional_package, tmp_path):
    optional_package("matplotlib")
    attention = made_up(["<b>", "$x_1$", "\u05e9\u05dc\u05d5\u05dd"], ["\u6728", "y"])
    for name in ("one.svg", "two.svg"):
        draw_attention(attention, tmp_path / name, view)
    text = (tmp_path / "one.svg").read_text()
    assert text == (tmp_path / "two.svg").read_text()
    assert "&lt;b&gt;" in text or view.kind == "decoder"
    assert "\u6728" in text or view.kind == "encoder", "the file contains characters that no installed font may have"
    assert f"layer {view.layer or 2} of 2" in text
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        draw_attention(attention, tmp_path / "one.png", view)
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")
    assert all("are drawn as boxes" in str(warning.message) for warning in caught)


def test_missing_matplotlib_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"x.svg needs the package matplotlib: .*transformer-jax\[plot\]"):
        draw_attention(made_up("ab", "cd"), tmp_path / "x.svg")
    draw_attention(made_up("ab", "cd"), tmp_path / "x.html")


# --------------------------------------------------------------------------------------------------------- the command


def test_attention_command_writes_a_page_and_a_picture(tiny, tmp_path, capsys, optional_package):
    run = tiny.run
    command = ["attention", str(run), "the dog", "--output", str(tmp_path / "a.html"), "--no-compilation-cache"]
    assert cli.main([*command, "--target", "der hund", "--kind", "encoder", "--layer", "1", "--head", "2"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'a.html'}: der hund\n"
    data = json.loads(Elements((tmp_path / "a.html").read_text()).scripts[0])
    assert (data["source"], data["target"], data["given"]) == ("the dog", "der hund", True)
    assert data["first"] == {"kind": "encoder", "layer": "1", "head": "2", "style": "lines"}
    assert cli.main([*command, "--layer", "9"]) == 1
    assert capsys.readouterr().err == "error: layer is 9; cross attention has layers 1 to 1\n"
    assert cli.main([*command, "--output", str(tmp_path / "a.gif")]) == 1
    assert "a.gif: the name must end with .html, .png, .svg, .pdf" in capsys.readouterr().err
    assert cli.main([*command, "--output", str(tmp_path / "none" / "a.html")]) == 1
    assert "a.html: cannot be written: there is no folder" in capsys.readouterr().err
    optional_package("matplotlib")
    assert cli.main([*command, "--output", str(tmp_path / "none" / "a.svg"), "--style", "map", "--head", "mean"]) == 1
    assert "a.svg: cannot be written: there is no folder" in capsys.readouterr().err
    assert cli.main([*command, "--output", str(tmp_path / "a.svg"), "--checkpoint", "2"]) == 0
    assert "Cross-attention, layer 1 of 1" in (tmp_path / "a.svg").read_text()
