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
                find_head(model)
            assert find_head(model, heads.partition(",")[0]) == heads.partition(",")[0]
        with pytest.raises(ValueError, match="made without a classifier"):
            find_head(timm.create_model("resnet10t", num_classes=0))


def test_it_is_the_last_layer_of_either_kind_but_for_auxiliary_ones() -> None:
    with torch.device("meta"):
        segmenting = torchvision.models.segmentation.fcn_resnet50(weights_backbone=None, aux_loss=True)
    assert find_head(segmenting) == "classifier.4"
    sizes = {"hidden_sizes": [8] * 4, "depths": [1] * 4, "num_attention_heads": [1] * 4, "decoder_hidden_size": 16}
    model = SegformerForSemanticSegmentation(SegformerConfig(num_labels=3, **sizes)).eval()
    odt.adapt.bias_only_(model, classes=5)
    assert model(torch.zeros(1, 3, 32, 32)).logits.shape == (1, 5, 8, 8)
    assert find_head(nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten(), nn.Linear(4, 2), nn.ReLU())) == "2"


def test_features_without_a_classifier_are_refused() -> None:
    features = torchvision.models.mobilenet_v2(width_mult=0.1).features
    with pytest.raises(ValueError, match=r"no classifier: behind its last layer, 18\.0, there is a norm \(18\.1\)"):
        odt.adapt.bias_only_(features, classes=5)
    model = torchvision.models.resnet18()
    model.fc = nn.Identity()
    with pytest.raises(ValueError, match=r"layer4\.1\.conv2, there is a norm"):
        odt.adapt.tinytl_(model, classes=5)
