"""A head's network as an ordinary module, whatever that network returns."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from torch_odt.adapt import online_head


def test_a_network_that_returns_more_than_its_scores_becomes_an_ordinary_module() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=16, patch_size=8
    )
    model, x = transformers.ViTForImageClassification(config), torch.randn(4, 3, 16, 16)
    head = online_head(model, x[:1])
    head.learn(x, ["a", "b", "a", "b"])
    torch.testing.assert_close(head.to_module()(x), head.scores(x))


def test_a_layer_of_two_names_is_replaced_under_both() -> None:
    class TwoNames(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 8), nn.Linear(8, 3)])
            self.fc = self.layers[1]

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.fc(self.layers[0](x))
            return result

    model, x = TwoNames(), torch.randn(4, 4)
    head = online_head(model, x[:1])
    head.learn(x, ["a", "b", "a", "b"])
    torch.testing.assert_close(head.to_module()(x), head.scores(x))
    assert model.fc.out_features == 3


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.fc = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = self.body(x)
        return {"features": features, "scores": self.fc(features)}


def test_nothing_runs_behind_a_layer_whose_output_is_returned_beside_others() -> None:
    x = torch.randn(4, 4)
    for place in ({"attach": "body"}, {"replace": "fc"}):
        head = online_head(Both(), x[:1], **place)  # type: ignore[arg-type]
        head.learn(x, ["a", "b", "a", "b"])
        torch.testing.assert_close(head.to_module()(x), head.scores(x))
