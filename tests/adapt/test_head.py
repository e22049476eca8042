"""Which layer computes the classes."""

from __future__ import annotations

import pytest
import timm
import torch
import torchvision
from torch import nn
from transformers import SegformerConfig, SegformerForSemanticSegmentation

import torch_odt as odt
from torch_odt.adapt.head import find_head


def test_models_of_timm_say_which_it_is() -> None:
    with torch.device("meta"):
        assert find_head(timm.create_model("repvit_m0_9", distillation=False)) == "head.head.l"
        assert find_head(timm.create_model("caformer_s18")) == "head.fc.fc2"
        for name, heads in (
            ("levit_128s", "head.linear, head_dist.linear"),
            ("repvit_m0_9", "head.head.l, head.head_"),
        ):
            model = timm.create_model(name)
            with pytest.raises(ValueError, match=f"has 2 classifiers, {heads}.*: name one by head="):
                odt.adapt.bias_only_(model, classes=5)
            odt.adapt.bias_only_(model, classes=5, head=heads.partition(",")[0])
            assert model.get_submodule(heads.partition(",")[0]).out_features == 5
        with pytest.raises(ValueError, match="seems to have no classifier: its last layer is layer4"):
            odt.adapt.bias_only_(timm.create_model("resnet10t", num_classes=0), classes=5)


class Backwards(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.features = nn.Linear(8, 3), nn.Conv2d(3, 8, 1)

    def get_classifier(self, name: str) -> nn.Module:
        return self.fc


def test_it_is_the_last_linear_layer_or_convolution_but_for_auxiliary_ones() -> None:
    with torch.device("meta"):
        segmenting = torchvision.models.segmentation.fcn_resnet50(weights_backbone=None, aux_loss=True)
    assert find_head(segmenting) == "classifier.4"
    sizes = {"hidden_sizes": [8] * 4, "depths": [1] * 4, "num_attention_heads": [1] * 4, "decoder_hidden_size": 16}
    model = SegformerForSemanticSegmentation(SegformerConfig(num_labels=3, **sizes)).eval()
    odt.adapt.bias_only_(model, classes=5)
    assert model(torch.zeros(1, 3, 32, 32)).logits.shape == (1, 5, 8, 8)
    assert find_head(Backwards()) == "fc"


def test_features_without_a_classifier_are_refused_but_where_it_is_named() -> None:
    features = torchvision.models.mobilenet_v2(width_mult=0.1).features
    odt.adapt.bias_only_(features).unload()
    with pytest.raises(ValueError, match=r"no classifier: its last layer is 18\.0, and the norm 18\.1 takes what"):
        odt.adapt.bias_only_(features, classes=5)
    model = torchvision.models.resnet18()
    model.fc = nn.Identity()
    with pytest.raises(ValueError, match=r"layer4\.1\.conv2, and the norm"):
        odt.adapt.tinytl_(model, classes=5)
    odt.adapt.sparse_update_(features, odt.adapt.Scheme(1), classes=5, head="18.0")
    assert features[18][0].out_channels == 5


def test_which_layer_is_taken_for_the_classifier_is_told() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.gate = nn.Linear(4, 2), nn.Linear(4, 4)

    told = "taken for the classifier"
    assert f"gate is {told}; head= names another" in str(odt.adapt.bias_only_(Gated()))
    assert told not in str(odt.adapt.bias_only_(Gated(), head="fc"))
    assert told not in str(odt.adapt.bias_only_(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))))
