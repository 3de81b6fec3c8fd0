"""Models, written plainly, in the sizes that people know."""

from gossamer.apps.models.densenet import DenseNet
from gossamer.apps.models.gpt import GPT, GPT2_SMALL, GPT2_SMALL_NO_BIAS, GPT_NANO, GPTShape
from gossamer.apps.models.layers import he_, norm_layer
from gossamer.apps.models.lstm import WordLSTM
from gossamer.apps.models.resnet import CifarResNet, ResNet50
from gossamer.apps.models.small import cnn, mlp

__all__ = [
    "GPT",
    "GPT2_SMALL",
    "GPT2_SMALL_NO_BIAS",
    "GPT_NANO",
    "CifarResNet",
    "DenseNet",
    "GPTShape",
    "ResNet50",
    "WordLSTM",
    "cnn",
    "he_",
    "mlp",
    "norm_layer",
]
